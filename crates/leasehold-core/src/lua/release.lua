-- Give back a lease or a place in the queue.
--
-- ARGV  2 acquisition  3 at least  4 tombstone
-- Returns the time, and
--       9   given back
--       8   not held

local id, at_least, tombstone = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local function give_back(l)
  remove_lease(l)
  local keep_until = l.granted_at + at_least
  if keep_until <= now or (l.has_owner == 1 and weight_of(l.owner) > 0) then return end
  l.kept = 1
  l.claimed = 1
  l.expires_at = keep_until
  add_lease(l)
  head_was_told_wrong()
end

local function release()
  if tombstone > 0 then
    local ends = now + tombstone
    if not redis.call('ZSCORE', KEYS[9], id) then h.tombstones = h.tombstones + 1 end
    redis.call('ZADD', KEYS[9], ends, id)
    touch(KEYS[9])
    h.latest = math.max(h.latest, ends)
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
  return { now, 9 }
end

may_exceed_memory = true
begin(raw)
grant()
local reply = release()
store(raw)
return reply
