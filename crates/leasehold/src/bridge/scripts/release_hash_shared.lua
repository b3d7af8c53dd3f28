-- Releases a reader of a read-write lock. The last one wakes the waiters of the other library.
--
-- KEYS[1]  the lock
-- KEYS[2]  the reader's own key
-- ARGV[1]  the reader's field
-- ARGV[2]  the channel that the waiters have subscribed to
-- ARGV[3]  the message that wakes them
-- ARGV[4]  what the own keys of all readers begin with; a field and the number of an acquisition follow
--
-- Returns 1, 2 if the user may not send the message, or 0 if the reader does not have the lock.
local is_held = redis.call('hdel', KEYS[1], ARGV[1])
redis.call('del', KEYS[2])
if is_held == 0 then return 0 end
-- First, the time that is left to the others: a field stays when its holder has crashed, and then its keys are gone.
local fields, left, mode, looks = redis.call('hgetall', KEYS[1]), 0, nil, 0
for position = 1, #fields, 2 do
  local field, value = fields[position], fields[position + 1]
  if field == 'mode' then mode = value end
  local entries = tonumber(value) or 0
  looks = looks + entries
  -- So many readers are not there: another user has written the number. The hash keeps its time, since a long look would block the server.
  if looks > 10000 then return 1 end
  for number = 1, entries do
    local own = redis.call('pttl', ARGV[4] .. ':' .. field .. ':rwlock_timeout:' .. number)
    -- Without an expiry it stays until it is deleted.
    if own == -1 then return 1 end
    left = math.max(left, own)
  end
end
-- Then, the lock of other readers, or of a writer.
if left > 0 then
  redis.call('pexpire', KEYS[1], left)
  return 1
end
if mode == 'write' then return 1 end
-- Finally, the free lock. Without the right to the channel it is released all the same.
redis.call('del', KEYS[1])
local sent = redis.pcall('publish', ARGV[2], ARGV[3])
return type(sent) == 'table' and 2 or 1
