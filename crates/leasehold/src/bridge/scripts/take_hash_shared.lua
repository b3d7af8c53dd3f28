-- Takes a read-write lock as a reader that takes it once. A repeated call does not enter again.
--
-- The hash has the mode and a field for each holder. Each reader has a key of its own that lasts as long as the reader's lease, while
-- the hash lasts as long as the longest of them.
--
-- KEYS[1]  the lock
-- KEYS[2]  the reader's own key
-- ARGV[1]  the reader's field
-- ARGV[2]  the ttl in milliseconds
--
-- Returns 1 if the reader has the lock, or else 0.
local mode = redis.call('hget', KEYS[1], 'mode')
-- First, the lock of a writer. A hash without a mode is a lock of another kind.
if mode and mode ~= 'read' or not mode and redis.call('exists', KEYS[1]) == 1 then return 0 end
-- Then, the ttl of the reader's key, and of the lock if there is one: also for an earlier call whose answer was lost. A call that arrives
-- after a renewal does not shorten what the renewal has set, and no reader shortens the time of another one. The server keeps what a
-- refused script has written, so a user without one of the rights is refused before there is a lock that would not expire.
if redis.call('pttl', KEYS[2]) < tonumber(ARGV[2]) then redis.call('set', KEYS[2], 1, 'px', ARGV[2]) end
if redis.call('pttl', KEYS[1]) < tonumber(ARGV[2]) then redis.call('pexpire', KEYS[1], ARGV[2]) end
redis.call('hset', KEYS[1], 'mode', 'read', ARGV[1], 1)
-- Finally, the ttl of the lock that was free.
if not mode then redis.call('pexpire', KEYS[1], ARGV[2]) end
return 1
