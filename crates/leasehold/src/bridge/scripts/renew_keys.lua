-- Renews a lock that is held by the holder of more than half of some keys.
--
-- KEYS     the lock's keys
-- ARGV[1]  the holder's value
-- ARGV[2]  the ttl in milliseconds
--
-- Returns 1, or 0 if the holder does not have the first key and more than half of all.
local mine = {}
for _, key in ipairs(KEYS) do
  if redis.call('get', key) == ARGV[1] then mine[#mine + 1] = key end
end
if mine[1] ~= KEYS[1] or #mine <= #KEYS / 2 then return 0 end
for _, key in ipairs(mine) do redis.call('pexpire', key, ARGV[2]) end
return 1
