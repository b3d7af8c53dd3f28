-- Acquires several resources, each for itself: what one `acquire.lua` after the other would do, at less than half of the price.
--
-- KEYS  the key of each resource, then the clock
-- ARGV  for each resource the first three arguments of acquire.lua, of an attempt that its first lines can grant
-- Returns for each resource the reply of acquire.lua.
--
-- `acquire` is that script as a function. The ids of all attempts are drawn at once: the clock's next, and those behind it.

local call = redis.call
local count, clock = #KEYS - 1, KEYS[#KEYS]
local LAST_SEQUENCE, FIRST_LATE_MS = 999, 4000000000000

local ms, sequence = nil, nil
local id = redis.pcall('XADD', clock, 'MAXLEN', '0', '*', 't', '')
if not id.err then
  ms, sequence = string.match(id, '(%d+)%-(%d+)')
  local last = sequence + count - 1
  if last > LAST_SEQUENCE or tonumber(ms) >= FIRST_LATE_MS
    or redis.pcall('XADD', clock, 'MAXLEN', '0', ms .. '-' .. last, 't', '').err then
    ms = nil
  end
end

local replies = {}
for i = 1, count do
  local request, ttl = ARGV[3 * i - 2], ARGV[3 * i - 1]
  local own = ms and ms .. '-' .. sequence + i - 1
  if own and string.byte(ttl) ~= 45 and call('SET', KEYS[i], request .. ' leasehold:4@' .. own, 'NX', 'PX', ttl) then
    replies[i] = own
  else
    -- With an id of its own, because the rules may move the clock on from that, and it is further already.
    drawn = nil
    local is_done, reply = pcall(acquire, { KEYS[i], clock }, { request, ttl, ARGV[3 * i] })
    replies[i] = (is_done or type(reply) == 'table') and reply or redis.error_reply(reply)
  end
end
return replies
