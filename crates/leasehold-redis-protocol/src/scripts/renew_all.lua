-- Extends several plain leases by one ttl.
--
-- KEYS  the key of each resource
-- ARGV  1 the ttl in milliseconds; then each lease's acquisition, with what may follow it in renew.lua
--       the last on a quorum node: see floor.lua
-- Returns the time alone if renew.lua would return it for each; otherwise a list of the replies of renew.lua, with false for a
--       lease that must be renewed by itself.
--
-- The expiry is a string that is made once: the conversion of a number costs as much as the rest of a lease. PEXPIREAT costs less
-- than PEXPIRE, which the server rewrites for its replicas.

local time = NOW()
local now = time[1] * 1000000 + time[2]
local expiry = string.format('%.0f', math.floor(now / 1000) + ARGV[1])
local call, find, keys, ids = redis.call, string.find, KEYS, ARGV
local alone = nil -- the numbers of the leases that are not plain
for i, raw in ipairs(floor == 0 and call('MGET', unpack(keys)) or keys) do
  local id = ids[i + 1]
  local mark = #id > 24 and string.sub(id, 25)
  if mark then id = string.sub(id, 1, 24) end
  if floor == 0 and raw and find(raw, id, 1, true) == 1 and (not mark or is_marked(raw, mark)) then
    call('PEXPIREAT', keys[i], expiry)
  else
    alone = alone or {}
    alone[i] = true
  end
end
if not alone then return now end
local replies = {}
for i = 1, #keys do replies[i] = not alone[i] and now end
return replies
