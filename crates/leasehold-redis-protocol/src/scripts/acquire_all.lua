-- Acquires several resources in one step: all are granted, or none is. The counterpart of `model/acquire_all.rs`.
--
-- KEYS  state and rows of each resource, all in one hash slot
-- ARGV  for each resource the first argument of acquire.lua, of an attempt that neither waits nor replaces; then in a cluster
--       the inbox name without the client id
-- Returns for each resource the reply of acquire.lua.
--
-- `acquire` and `release` are the scripts of those names, as functions. Each attempt runs as if it were alone. After the first
-- one that is not granted, the earlier grants of this step are released, and the later attempts are not made. The same
-- happens after an error, because a script that ends with an error keeps what it has written; the reply is then that error.

local count = #KEYS / 2
local replies, is_new = {}, {}
local refused, failure = nil, nil

local function keys_of(i)
  return { KEYS[2 * i - 1], KEYS[2 * i] }
end

for i = 1, count do
  local is_done, reply, is_known = pcall(acquire, keys_of(i), { ARGV[i], ARGV[count + 1] })
  if not is_done then
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
  for i = 1, refused - 1 do
    if is_new[i] then
      release(keys_of(i), { string.sub(ARGV[i], 1, 24), ARGV[count + 1] })
      replies[i] = { now, 3 }
    end
  end
  for i = refused + 1, count do replies[i] = { now, 3 } end
end

if type(failure) == 'string' then return redis.error_reply(failure) end
return failure or replies
