-- Lists holders and waiters, after removing what has expired.
--
-- KEYS  1 the resource, 2 the clock: see table.lua
-- ARGV  1 empty
--       2 in a cluster: the inbox name without the client's digest; on a quorum node: see floor.lua
-- Returns the time, and
--       10 capacity, in use, last token, holders, waiters
--          a holder is  acquisition, has owner, owner, weight, token, granted at, expires at, retained, metadata
--          a waiter is  acquisition, weight, since, deadline, skipped, metadata
--       13 milliseconds left, or -1   another program holds the key

local raw = redis.call('MGET', KEYS[1])[1]
--@use rules

if not begin() then return { now, 13, foreign } end
grant()
local holders, waiters = each_lease(), {}
for i = 1, #holders do holders[i] = shown(holders[i]) end
for i, w in ipairs(h.waiters > 0 and waiters_in(all_fields()) or {}) do
  waiters[i] = { w.id, w.weight, w.since, w.deadline, passed_of(w.client) and 1 or 0, w.metadata }
end
store()
return { now, 10, h.capacity, h.in_use, h.last_token, holders, waiters }
