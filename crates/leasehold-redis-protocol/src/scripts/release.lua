-- Releases a lease or a queue entry.
--
-- KEYS  1 state, 2 rows: see rows.lua
-- ARGV  1 'c24': acquisition; unless both are zero '>I8I8': minimum hold, tombstone
--       2 in a cluster: the inbox name without the client id; on a quorum node: see floor.lua
-- Returns the time alone if it is released; otherwise the time, and
--       8   not held

local id, at_least, tombstone = string.sub(ARGV[1], 1, 24), 0, 0
if #ARGV[1] > 24 then at_least, tombstone = struct.unpack('>I8I8', ARGV[1], 25) end

local function give_back(l)
  remove_lease(l)
  -- No longer than `at_least` from now, though the clock may have been set back since the grant.
  local keep_for = at_least - math.max(now - l.granted_at, 0)
  if keep_for <= 0 or (l.has_owner == 1 and weight_of(l.owner) > 0) then return end
  l.kept = 1
  l.claimed = 1
  l.expires_at = now + keep_for
  add_lease(l)
  head_was_told_wrong()
end

local function release()
  if tombstone > 0 then
    local ends = now + tombstone
    if not first_row_with('t' .. id) then h.tombstones = h.tombstones + 1 end
    put_tombstone(id, ends)
    soonest_expiry(ends)
  end
  local l = held_lease(id)
  local w = not l and h.waiters > 0 and waiter(id)
  if l then
    give_back(l)
  elseif w then
    remove_waiter(w)
  else
    return { now, 8 }
  end
  grant()
  return now
end

may_exceed_memory = true
begin(raw)
grant()
local reply = release()
store(raw)
return reply
