-- Revokes all leases of the resource.
--
-- KEYS  1 the resource, 2 the clock: see table.lua
-- ARGV  1 empty
--       2 in a cluster: the inbox name without the client id; on a quorum node: see floor.lua
-- Returns the time, and
--       11 holders                    as in inspect.lua
--       13 milliseconds left, or -1   another program holds the key, which is left alone

local raw = redis.call('MGET', KEYS[1])[1]
--@use rules

local function force_release()
  local taken = each_lease()
  table.sort(taken, function(one, other)
    if one.token ~= other.token then return one.token < other.token end
    return one.id < other.id
  end)
  for i, l in ipairs(taken) do
    remove_lease(l)
    flush()
    push(l.id, 3)
    taken[i] = shown(l)
  end
  grant()
  return { now, 11, taken }
end

return step(force_release)
