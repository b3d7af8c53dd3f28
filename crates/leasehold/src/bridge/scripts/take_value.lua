-- Takes a lock that is a key with its holder's value, for a holder that may have it already.
--
-- KEYS[1]  the lock
-- ARGV[1]  the holder's value
-- ARGV[2]  the ttl in milliseconds
--
-- Returns 1 if the holder has the lock, or else 0.
local value = redis.call('get', KEYS[1])
if not value then
  -- First, the free lock.
  redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[2])
  return 1
end
-- Then, the lock of another holder.
if value ~= ARGV[1] then return 0 end
-- Finally, the lock that an earlier call has taken. A call that arrives after a renewal does not shorten what the renewal has set.
if redis.call('pttl', KEYS[1]) < tonumber(ARGV[2]) then redis.call('pexpire', KEYS[1], ARGV[2]) end
return 1
