-- Renews a lock that is a hash with one field per holder.
--
-- KEYS[1]  the lock
-- KEYS[2]  the counter of its holders' numbers, if it has one
-- ARGV[1]  the holder's field
-- ARGV[2]  the ttl in milliseconds
--
-- Returns 1, or the holder's number, or 0 if the holder does not have the lock.
if redis.call('hexists', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('pexpire', KEYS[1], ARGV[2])
return KEYS[2] and tonumber(redis.call('get', KEYS[2]) or 1) or 1
