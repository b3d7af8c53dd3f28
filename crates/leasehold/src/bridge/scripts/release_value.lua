-- Releases a lock that is a key with its holder's value.
--
-- KEYS[1]  the lock
-- ARGV[1]  the holder's value
--
-- Returns 1, or 0 if the key has another value or none.
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('del', KEYS[1])
