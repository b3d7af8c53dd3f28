-- Takes a lock that is held by the holder of more than half of some keys: the first one and as many others as are free.
--
-- KEYS     the lock's keys, the one that all holders try first in front
-- ARGV[1]  the holder's value
-- ARGV[2]  the ttl in milliseconds
--
-- Returns 1 if the holder has the lock, or else 0.
local mine = {}
for index, key in ipairs(KEYS) do
  -- First, which keys are free, or have been taken by an earlier call whose answer was lost.
  local value = redis.call('get', key)
  if not value or value == ARGV[1] then
    mine[#mine + 1] = key
  elseif index == 1 then
    return 0
  end
end
if #mine <= #KEYS / 2 then return 0 end
for _, key in ipairs(mine) do
  -- Then, those keys. A call that arrives after a renewal does not shorten what the renewal has set.
  redis.call('set', key, ARGV[1], 'nx', 'px', ARGV[2])
  if redis.call('pttl', key) < tonumber(ARGV[2]) then redis.call('pexpire', key, ARGV[2]) end
end
return 1
