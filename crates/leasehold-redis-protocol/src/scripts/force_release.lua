-- Revokes all leases of the resource.
--
-- KEYS  1 the resource, 2 the clock: see table.lua
-- ARGV  1 empty
--       2 in a cluster: the inbox name without the client's digest; on a quorum node: see floor.lua
-- Returns the time, and
--       11 holders                    as in inspect.lua
--       13 milliseconds left, or -1   another program holds the key, which is left alone

local raw = redis.call('MGET', KEYS[1])[1]
--@use rules

may_exceed_memory = true
if not begin() then return { now, 13, foreign } end
grant()
local taken = each_lease()
table.sort(taken, function(a, b)
  if a.token ~= b.token then return a.token < b.token end
  return a.id < b.id
end)
for i = 1, #taken do
  local l = taken[i]
  store_part()
  remove_lease(l)
  push(l, 3)
  taken[i] = shown(l)
end
grant()
store()
return { now, 11, taken }
