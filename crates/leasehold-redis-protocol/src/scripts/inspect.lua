-- Lists holders and waiters, after removing what has expired.
--
-- KEYS  1 state, 2 rows: see rows.lua
-- ARGV  1 empty
--       2 in a cluster: the inbox name without the client id; on a quorum node: see floor.lua
-- Returns the time, and
--       10 capacity, in use, last token, holders, waiters
--          a holder is  acquisition, has owner, owner, weight, token, granted at, expires at, retained, metadata
--          a waiter is  acquisition, weight, since, deadline, skipped, metadata

begin(raw)
grant()
local holders, waiters = each_lease(), {}
for i = 1, #holders do
  local l = holders[i]
  holders[i] = { l.id, l.has_owner, l.owner, l.weight, l.token, l.granted_at, l.expires_at, l.kept, l.metadata }
end
if h.waiters > 0 then
  local all, parked = rows_with('w'), {}
  for _, row in ipairs(rows_with('p')) do parked[string.sub(row, 2)] = 1 end
  for i = 1, #all do all[i] = unpack_waiter(all[i], 2) end
  table.sort(all, function(a, b) return a.place < b.place end)
  for i = 1, #all do
    local w = all[i]
    waiters[i] = { w.id, w.weight, w.since, w.deadline, parked[string.sub(w.id, 1, 16)] or 0, w.metadata }
  end
end
store(raw)
return { now, 10, h.capacity, h.in_use, h.last_token, holders, waiters }
