-- Take several resources in one step: all of them, or none. The twin of `model/together.rs`.
--
-- KEYS  the state and the rows of each resource
-- ARGV  for each resource what `acquire.lua` is told, of an attempt that neither waits nor replaces; then what they all
--       need to know
-- Returns for each resource what `acquire.lua` returns.
--
-- `acquire` and `release` are the scripts of those names, as functions. First each attempt steps as if it were alone. At the
-- first that is not granted, what was granted before it in this step is given back, and the others are not asked. So it
-- is when one fails, since a script that ends with an error keeps what it has written; finally that error is the answer.

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
