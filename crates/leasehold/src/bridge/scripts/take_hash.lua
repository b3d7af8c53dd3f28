-- Takes a lock that is a hash with one field per holder, for a holder that takes it once. A repeated call does not enter again.
--
-- KEYS[1]  the lock
-- ARGV[1]  the holder's field
-- ARGV[2]  the ttl in milliseconds
-- ARGV[3]  the mode, of a read-write lock only
--
-- Returns 1 if the holder has the lock, or else 0.
if redis.call('exists', KEYS[1]) == 0 then
  -- First, the free lock: the field counts how often its holder has entered. The server keeps what a refused script has written, so a user
  -- without the right to PEXPIRE is refused before there is a lock that would not expire.
  redis.call('pexpire', KEYS[1], ARGV[2])
  redis.call('hset', KEYS[1], ARGV[1], 1, unpack(ARGV[3] and { 'mode', ARGV[3] } or {}))
elseif redis.call('hexists', KEYS[1], ARGV[1]) == 0 then
  -- Then, the lock of another holder.
  return 0
end
-- Finally, the ttl: also of a lock that an earlier call has taken, whose answer was lost. A call that arrives after a renewal does not
-- shorten what the renewal has set.
if redis.call('pttl', KEYS[1]) < tonumber(ARGV[2]) then redis.call('pexpire', KEYS[1], ARGV[2]) end
return 1
