-- Revokes all leases of the resource.
--
-- KEYS  1 state, 2 rows: see rows.lua
-- ARGV  1 empty
--       2 in a cluster: the inbox name without the client id; on a quorum node: see floor.lua
-- Returns the time, and
--       11 holders   as in inspect.lua

begin(raw)
grant()
local taken = each_lease()
table.sort(taken, function(a, b)
  if a.token ~= b.token then return a.token < b.token end
  return a.id < b.id
end)
for i = 1, #taken do
  local l = taken[i]
  remove_lease(l)
  push(l.id, 3)
  taken[i] = { l.id, l.has_owner, l.owner, l.weight, l.token, l.granted_at, l.expires_at, l.kept, l.metadata }
end
grant()
store(raw)
return { now, 11, taken }
