-- Renews a reader of a read-write lock, and leaves the time of the others as it is.
--
-- KEYS[1]  the lock
-- KEYS[2]  the reader's own key
-- ARGV[1]  the reader's field
-- ARGV[2]  the ttl in milliseconds
--
-- Returns 1, 2 if the lock would have expired before the reader's own key, or 0 if the reader does not have the lock.
if redis.call('hexists', KEYS[1], ARGV[1]) == 0 then return 0 end
local is_shortened = redis.call('pttl', KEYS[1]) < redis.call('pttl', KEYS[2])
-- The own key may have expired. No writer has had the lock since, because the field would be gone.
redis.call('set', KEYS[2], 1, 'px', ARGV[2])
if redis.call('pttl', KEYS[1]) < tonumber(ARGV[2]) then redis.call('pexpire', KEYS[1], ARGV[2]) end
return is_shortened and 2 or 1
