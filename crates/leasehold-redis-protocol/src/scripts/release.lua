-- Releases a lease or a queue entry.
--
-- KEYS  1 the resource, 2 the clock: see table.lua
-- ARGV  1 'c24': acquisition; unless both are zero '>I8I8' before it: minimum hold, tombstone
--       2 in a cluster: the inbox name without the client id; on a quorum node: see floor.lua
-- Returns a number if it is released; otherwise the time, and
--       8   not held
--       13 milliseconds left, or -1   another program holds the key, so that the tombstone finds no place
--
-- MGET instead of GET, because an error for a key of another type would be counted in the server's statistics.

local raw = redis.call('MGET', KEYS[1])[1]
if raw and string.sub(raw, 1, #ARGV[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
--@use rules

local id, min_hold, tombstone = ARGV[1], 0, 0
if #id > struct.size('c24') then min_hold, tombstone, id = struct.unpack('>I8I8c24', id) end

local function end_lease(l)
  remove_lease(l)
  -- No longer than `min_hold` from now, though the clock may have been set back since the grant.
  local keep_for = min_hold - math.max(now - l.granted_at, 0)
  if keep_for <= 0 or weight_of(l) > 0 then return end
  l.retained, l.claimed, l.expires_at = 1, 1, now + keep_for
  add_lease(l)
  invalidate_head_hint()
end

local function leave_tombstone()
  local ends, old = now + tombstone, first_row('t' .. id)
  if old then
    change(false, rows_of_tombstone(id, (select(3, struct.unpack(BY_ID, old)))))
  else
    tombstones = tombstones + 1
  end
  change(true, rows_of_tombstone(id, ends))
  note_expiry(ends)
end

local function release()
  if tombstone > 0 then leave_tombstone() end
  local l = held_lease(id)
  local w = not l and waiters > 0 and waiter(id)
  if l then
    end_lease(l)
  elseif w then
    remove_waiter(w)
  else
    return { now, 8 }
  end
  grant()
  return now
end

if foreign and tombstone == 0 then return { now, 8 } end
exceed_memory()
return step(release)
