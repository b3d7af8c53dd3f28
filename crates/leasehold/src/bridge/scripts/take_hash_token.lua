-- Takes a lock that is a hash with one field per holder, and whose holders get numbers from a counter. The holder takes it once: a
-- repeated call does not enter again, and gets the same number.
--
-- KEYS[1]  the lock
-- KEYS[2]  the counter
-- ARGV[1]  the holder's field
-- ARGV[2]  the ttl in milliseconds
-- ARGV[3]  the least number that will do
--
-- Returns the number if the holder has the lock, or else 0.
local count = tonumber(redis.call('get', KEYS[2]) or 0)
if redis.call('exists', KEYS[1]) == 0 then
  -- First, the free lock. The next number is higher than every one before, and at least the one that is asked for.
  local number = math.max(count + 1, tonumber(ARGV[3]))
  if number >= 9007199254740992 then return redis.error_reply('ERR the counter of tokens is exhausted') end
  -- The server keeps what a refused script has written, so a user without the right to PEXPIRE is refused before there is a lock that would
  -- not expire.
  redis.call('pexpire', KEYS[1], ARGV[2])
  redis.call('incrby', KEYS[2], string.format('%.0f', number - count))
  redis.call('hset', KEYS[1], ARGV[1], 1)
  count = number
elseif redis.call('hexists', KEYS[1], ARGV[1]) == 0 then
  -- Then, the lock of another holder.
  return 0
end
-- Finally, the ttl, which a call that arrives late does not shorten. While the lock is held the counter stays as it is, unless it is
-- deleted by hand.
if redis.call('pttl', KEYS[1]) < tonumber(ARGV[2]) then redis.call('pexpire', KEYS[1], ARGV[2]) end
return math.max(count, 1)
