-- Releases a lock that is a key with its holder's value, and sends a message to the waiters of the other library.
--
-- KEYS[1]  the lock
-- ARGV[1]  the holder's value
-- ARGV[2]  the channel that the waiters have subscribed to
-- ARGV[3]  the message that wakes them
--
-- Returns 1, 2 if the user may not send the message, or 0 if the key has another value or none.
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('del', KEYS[1])
-- Without the right to the channel the lock is released all the same. An error here would make it look unconfirmed.
local sent = redis.pcall('publish', ARGV[2], ARGV[3])
return type(sent) == 'table' and 2 or 1
