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
if mode == false then
  -- First, the free lock. A hash without a mode is a lock of another kind.
  if redis.call('exists', KEYS[1]) == 1 then return 0 end
  redis.call('hset', KEYS[1], 'mode', 'read')
elseif mode ~= 'read' then
  -- Then, the lock of a writer.
  return 0
end
redis.call('hset', KEYS[1], ARGV[1], 1)
-- Finally, the ttl of both keys: also for an earlier call whose answer was lost. A call that arrives after a renewal does not shorten
-- what the renewal has set, and no reader shortens the time of another one.
if redis.call('pttl', KEYS[2]) < tonumber(ARGV[2]) then redis.call('set', KEYS[2], 1, 'px', ARGV[2]) end
if redis.call('pttl', KEYS[1]) < tonumber(ARGV[2]) then redis.call('pexpire', KEYS[1], ARGV[2]) end
return 1
