-- Acquires several resources in one step: all are granted, or none is. The counterpart of `model/acquire_all.rs`.
--
-- KEYS  the key of each resource, then the clock: all in one hash slot
-- ARGV  for each resource the first three arguments of acquire.lua, of an attempt that neither waits nor replaces; then in a
--       cluster the inbox name without the client's digest
-- Returns for each resource the reply of acquire.lua.
--
-- `acquire` and `release` are the scripts of those names, as functions. Each attempt runs as if it were alone. After the first
-- one that is not granted, the earlier grants of this step are released, and the later attempts are not made. The same
-- happens after an error, because a script that ends with an error keeps what it has written; the reply is then that error.

local count = math.floor(#ARGV / 3)
local replies, is_new = {}, {}
local refused, failure = nil, nil
local inbox = ARGV[#ARGV]

local function keys_of(i)
  return { KEYS[i], KEYS[count + 1] }
end

for i = 1, count do
  local is_done, reply, is_known = pcall(acquire, keys_of(i), { ARGV[3 * i - 2], ARGV[3 * i - 1], ARGV[3 * i], inbox })
  if not is_done then
    refused, failure = i, reply
    break
  end
  if type(reply) == 'table' and reply.err then
    refused, failure = i, reply
    break
  end
  replies[i], is_new[i] = reply, not is_known
  if type(reply) == 'table' and reply[2] ~= 1 then
    refused = i
    break
  end
end

if refused then
  local time = NOW()
  local now = time[1] * 1000000 + time[2]
  for i = 1, refused - 1 do
    if is_new[i] then
      release(keys_of(i), { (struct.unpack('c24', ARGV[3 * i - 2])), inbox })
      replies[i] = { now, 3 }
    end
  end
  for i = refused + 1, count do replies[i] = { now, 3 } end
end

if type(failure) == 'string' then return redis.error_reply(failure) end
return failure or replies
