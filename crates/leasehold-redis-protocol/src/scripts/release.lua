-- Releases a lease or a queue entry.
--
-- KEYS  1 the resource, 2 the clock: see table.lua
-- ARGV  1 'c24': acquisition; unless both are zero '>I8I8' before it: minimum hold, tombstone; a hyphen behind it if the client expects
--           that the lock is contended or shared; or with the two numbers 'c16' behind it: it is released only while this client
--           speaks for the attempt
--       2 in a cluster: the inbox name without the client's digest; on a quorum node: see floor.lua
-- Returns a number if it is released; otherwise the time, and
--       8   not held
--       9   there was no lease, and a queue entry is removed
--       13 milliseconds left, or -1   another program holds the key, so that the tombstone finds no place
--
-- MGET instead of GET, because an error for a key of another type would be counted in the server's statistics.

local released, found, raw = ARGV[1], nil, nil
if #released == 25 then
  released = string.sub(released, 1, 24)
  found = redis.pcall('HMGET', KEYS[1], 'h')
  if found.err or not found[1] then found = nil end
end
if not found then
  raw = redis.call('MGET', KEYS[1])[1]
  if raw and string.sub(raw, 1, #released) == released then return redis.call('DEL', KEYS[1]) end
end
--@use rules

local id, min_hold, tombstone, speaker = released, 0, 0, ''
if #id > struct.size('c24') then
  speaker = string.sub(id, 41)
  min_hold, tombstone, id = struct.unpack('>I8I8c24', id)
end

local function end_lease(l)
  remove_lease(l)
  -- No longer than `min_hold` from now, though the clock may have been set back since the grant.
  local keep_for = min_hold - math.max(now - l.granted_at, 0)
  if keep_for <= 0 or (l.has_owner == 1 and weight_of(l.owner) > 0) then return end
  l.retained = 1
  l.claimed = 1
  l.expires_at = now + keep_for
  add_lease(l)
  invalidate_head_hint()
end

local function release()
  local current = speaker ~= '' and (held_lease(id) or waiter(id))
  if current and current.client ~= speaker then return { now, 8 } end
  if tombstone > 0 then
    local ends = now + tombstone
    put_tombstone(id, ends)
    note_expiry(ends)
  end
  local l = held_lease(id)
  local w = not l and waiter(id)
  local reply = now
  if l then
    end_lease(l)
  elseif w then
    remove_waiter(w)
    reply = { now, 9 }
  else
    return { now, 8 }
  end
  grant()
  return reply
end

may_exceed_memory = true
if not begin() then return tombstone > 0 and { now, 13, foreign } or { now, 8 } end
grant()
local reply = release()
store()
return reply
