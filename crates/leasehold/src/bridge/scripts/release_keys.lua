-- Releases a lock that is held by the holder of more than half of some keys. The server tells waiters that track a key.
--
-- KEYS     the lock's keys
-- ARGV[1]  the holder's value
--
-- Returns 1, or 0 if the holder did not have the first key and more than half of all.
local mine = {}
for _, key in ipairs(KEYS) do
  if redis.call('get', key) == ARGV[1] then mine[#mine + 1] = key end
end
local is_held = mine[1] == KEYS[1] and #mine > #KEYS / 2
for _, key in ipairs(mine) do redis.call('del', key) end
return is_held and 1 or 0
