-- Lists holders and waiters, after removing what has expired.
--
-- KEYS  1 the resource, 2 the clock: see table.lua
-- ARGV  1 empty
--       2 in a cluster: the inbox name without the client id; on a quorum node: see floor.lua
-- Returns the time, and
--       10 capacity, in use, last token, holders, waiters
--          a holder is  acquisition, has owner, owner, weight, token, granted at, expires at, retained, metadata
--          a waiter is  acquisition, weight, since, deadline, skipped, metadata
--       13 milliseconds left, or -1   another program holds the key

local raw = redis.call('MGET', KEYS[1])[1]
--@use rules

local function inspect()
  local holders, queue, absent = each_lease(), {}, {}
  for i, l in ipairs(holders) do holders[i] = shown(l) end
  if waiters > 0 then
    for _, text in ipairs(rows_with('p')) do absent[text] = 1 end
    for i, text in ipairs(rows_with('w')) do queue[i] = unpack_waiter(text) end
    table.sort(queue, function(one, other) return one.place < other.place end)
    for i, w in ipairs(queue) do
      queue[i] = { w.id, w.weight, w.since, w.deadline, absent['p' .. client_of(w.id)] or 0, w.metadata }
    end
  end
  return { now, 10, capacity, in_use, last_token, holders, queue }
end

return step(inspect)
