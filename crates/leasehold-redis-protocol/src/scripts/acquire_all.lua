-- Acquires several resources in one step: all are granted, or none is. The counterpart of `model/acquire_all.rs`.
--
-- KEYS  the key of each resource, then the clock: all in one hash slot
-- ARGV  for each resource the first two arguments of acquire.lua, of an attempt that neither waits nor replaces; then in a
--       cluster the inbox name without the client id
-- Returns for each resource the reply of acquire.lua.
--
-- `acquire` and `release` are the scripts of those names, as functions. Each attempt runs as if it were alone. After the first
-- one that is not granted, the earlier grants of this step are released, and the later attempts are not made. The same
-- happens after an error, because a script that ends with an error keeps what it has written; the reply is then that error.

local count, inbox = #KEYS - 1, ARGV[#ARGV]
local replies, is_new, refused = {}, {}, nil

local function keys_of(i)
  return { KEYS[i], KEYS[#KEYS] }
end

for i = 1, count do
  local is_done, reply, is_known = pcall(acquire, keys_of(i), { ARGV[2 * i - 1], ARGV[2 * i], inbox })
  if not is_done and type(reply) == 'string' then reply = redis.error_reply(reply) end
  replies[i], is_new[i] = reply, not is_known
  if type(reply) == 'table' and reply[2] ~= 1 then
    refused = i
    break
  end
end
if not refused then return replies end

local time = redis.call('TIME')
local busy = { time[1] * 1000000 + time[2], 3 }
for i = 1, count do
  if i < refused and is_new[i] then
    release(keys_of(i), { (struct.unpack('c24', ARGV[2 * i - 1])), inbox })
    replies[i] = busy
  elseif i > refused then
    replies[i] = busy
  end
end
if replies[refused].err then return replies[refused] end
return replies
