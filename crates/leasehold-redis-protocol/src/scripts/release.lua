-- Releases a lease or a queue entry.
--
-- KEYS  1 the resource, 2 the clock: see table.lua
-- ARGV  1 'c24': acquisition; a hyphen behind it if the client expects that the lock is contended or shared. Or '>I8I8c24': minimum hold,
--           tombstone, acquisition; then a condition, if there is one: 'c16' if it is released only while this client speaks for the
--           attempt, ` leasehold:4@` and a stream id if only the lease with this token is released
--       2 in a cluster: the inbox name without the client's digest; on a quorum node: see floor.lua
-- Returns a number if it is released; otherwise the time, and
--       8   not held
--       9   there was no lease, and a queue entry is removed
--       13 milliseconds left, or -1   another program holds the key, so that the tombstone finds no place
--
-- MGET instead of GET, because an error for a key of another type would be counted in the server's statistics.

local released, found, raw = ARGV[1], nil, nil
local terms = nil -- of a release that says more than the acquisition
if #released == 25 then
  released = string.sub(released, 1, 24)
  found = redis.pcall('HMGET', KEYS[1], 'h')
  if found.err or not found[1] then found = nil end
elseif #released > 25 then
  local min_hold, tombstone, condition
  min_hold, tombstone, released, condition = struct.unpack('>I8I8c24', released)
  condition = string.sub(ARGV[1], condition)
  local speaker, mark = #condition == 16 and condition, #condition > 16 and condition
  terms = { min_hold = min_hold, tombstone = tombstone, speaker = speaker, mark = mark }
  -- Whether the tombstone, if there is one, is a key, as that of a request; and whether nothing is left else.
  terms.is_apart = tombstone == 0 or math.floor(string.byte(released, 17) / 32) == 3
  terms.is_brief = terms.is_apart and min_hold == 0 and not speaker
end

-- Leaves the tombstone of a request, before anything else is changed.
local function leave_tombstone()
  if not terms or terms.tombstone == 0 then return end
  local attempt, ms = released, string.format('%.0f', math.ceil(terms.tombstone / 1000))
  local done = redis.pcall('SET', ENDED, '', 'PX', ms)
  if done.err and string.find(done.err, 'OOM') then
    -- Once the script has written something that takes no memory, full memory refuses nothing more.
    redis.call('XTRIM', KEYS[2], 'MAXLEN', '0')
    done = redis.pcall('SET', ENDED, '', 'PX', ms)
  end
  if done.err then error(done.err, 0) end
end

if not found then
  raw = redis.call('MGET', KEYS[1])[1]
  if raw and string.sub(raw, 1, #released) == released
    and (not terms or terms.is_brief and (not terms.mark or is_marked(raw, terms.mark))) then
    leave_tombstone()
    return redis.call('DEL', KEYS[1])
  end
end
--@use rules

local id = released
local min_hold, tombstone = 0, 0
if terms then min_hold, tombstone = terms.min_hold, terms.tombstone end

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

-- Whether the condition of the release is met.
local function is_met()
  if not terms then return true end
  local l = held_lease(id)
  if terms.mark then return not l or l.token == token_of(terms.mark) end
  local current = terms.speaker and (l or waiter(id))
  return not current or current.client == terms.speaker
end

local function release()
  if not is_met() then return { now, 8 } end
  if not terms or terms.is_apart then
    leave_tombstone()
  else
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
