-- Acquires a lease, or enqueues the attempt.
--
-- KEYS  1 the resource, 2 the clock: see table.lua
-- ARGV  1 '>c24BI4I4I8I4': acquisition, flags (1 waits, 2 has owner, 4 replaces), capacity, weight, ttl, reserve;
--           with flag 1 '>I8I4': entry ttl, longest queue; with 2 '>I4c0': owner; with 4 'c8': sequence number of the
--           lease to replace; the rest is the metadata
--       2 the ttl in milliseconds, if the first lines can grant it: a weight from 1 to the capacity, no owner, no reserve,
--           nothing to replace, and no quorum node; otherwise empty
--       3 in a cluster: the inbox name without the client id; on a quorum node: see floor.lua and restart_guard.lua
-- Returns the stream id that is the token if the first lines grant the lease; otherwise the time, and
--       1 first token, last token, valid_for  granted
--       2 is head (0, 1), repoll at         queued
--       3                                  busy
--       4                                  cancelled: the attempt was released before
--       5                                  the queue is full
--       6 1 capacity                       refused: the weight is zero or too large
--       6 2 capacity in use                refused: another capacity is in use
--       6 3 weight held                    refused: the owner holds with less weight, and may not wait for more
--       6 4 0                              refused: the lease to replace is not held
--       13 milliseconds left, or -1        another program holds the key
-- As a function it also returns whether the attempt was known before.
--
-- The first lines are the whole usual case. The id is drawn before the SET, because the value contains it, and a third call
-- would cost more than the ids of busy attempts. A longer id may have a sequence number beyond a millisecond's tokens, and one
-- of the next century may be no token.

local LONGEST_ID, FIRST_LATE_ID = #'1700000000000-999', '4'
if ARGV[2] ~= '' then
  local id = drawn or redis.pcall('XADD', KEYS[2], 'MAXLEN', '0', '*', 't', '')
  drawn = nil
  if not id.err then
    if #id <= LONGEST_ID and id < FIRST_LATE_ID
      and redis.call('SET', KEYS[1], ARGV[1] .. ' leasehold:3@' .. id, 'NX', 'PX', ARGV[2]) then
      return id
    end
    drawn = id
  elseif string.find(id.err, 'READONLY', 1, true) then
    return id
  end
end
local raw = redis.call('MGET', KEYS[1])[1]
--@use rules

local function grant_now(token, last, granted_at)
  a.token, a.granted_at, a.expires_at = token, granted_at, now + a.ttl
  add_lease(a)
  return { now, 1, token, last, a.ttl }
end

local function queued(place)
  local w = first_ready()
  if w and w.place == place then
    head = place
    return { now, 2, 1, head_hint() }
  end
  return { now, 2, 0, follower_repoll_at(head_hint(), count_rows('q' .. client_of(a.id))) }
end

local function recheck(w)
  local held = held_by(w)
  if held and w.weight <= held.weight then return { now, 1, lease_to_waiter(w, held) } end
  if a.entry_ttl then
    change(false, rows_of_waiter(w))
    w.deadline = now + a.entry_ttl
    change(true, rows_of_waiter(w))
    note_expiry(w.deadline)
  end
  return queued(w.place)
end

local function known_attempt()
  local granted = take_back_grant(a.id)
  if granted then return { now, 1, granted.a, granted.b, granted.c } end
  if tombstones > 0 and first_row('t' .. a.id) then return { now, 4 } end
  local l = lease(a.id)
  if l then
    if l.retained == 1 then return { now, 4 } end
    -- A clock that was set back leaves more than was asked for.
    return { now, 1, l.token, l.token, math.min(l.expires_at - now, a.ttl) }
  end
  local w = waiters > 0 and waiter(a.id)
  if w then return recheck(w) end
end

local function enqueue()
  if a.replaces == '' and waiters >= a.max_queue then return { now, 5 } end
  a.place, a.since, a.deadline = next_place, now, now + a.entry_ttl
  if a.replaces == '' then a.place = FIRST_WAITER_PLACE + next_place end
  a.is_parked = requester_parked
  change_waiter(true, a)
  note_expiry(a.deadline)
  next_place = next_place + 1
  waiters = waiters + 1
  if a.is_parked then parked = parked + 1 end
  return queued(a.place)
end

local function replace(held)
  local further = math.max(a.weight - held.weight, 0)
  if not fits(further) then
    if not a.entry_ttl then return { now, 3 } end
    if held.weight > math.floor(capacity / 2) then return enqueue() end
    return { now, 6, 3, held.weight }
  end
  local token, last = held.token, held.token
  if further > 0 then token, last = next_tokens(a.reserve) end
  if not token then return nil end
  remove_replaced(held)
  local reply = grant_now(token, last, hold_start(held))
  invalidate_head_hint()
  grant()
  return reply
end

local function acquire()
  local known = known_attempt()
  if known then return known, true end
  if a.weight == 0 or a.weight > a.capacity then return { now, 6, 1, a.capacity } end
  local replaced = a.replaces ~= '' and a.has_owner == 0 and replaceable(a.id, a.replaces)
  if a.replaces ~= '' and not replaced then return { now, 6, 4, 0 } end
  if leases + waiters == 0 then capacity = a.capacity end
  if capacity ~= a.capacity then return { now, 6, 2, capacity } end
  if replaced then return replace(replaced) end
  local held = held_by(a)
  if held then
    if a.weight > held.weight then return { now, 6, 3, held.weight } end
    return grant_now(held.token, held.token, now)
  end
  if not has_ready_waiter() and fits(a.weight) then
    local token, last = next_tokens(a.reserve)
    if not token then return nil end
    return grant_now(token, last, now)
  end
  if not a.entry_ttl then return { now, 3 } end
  return enqueue()
end

requester = a.id
return step(acquire, a.id)
