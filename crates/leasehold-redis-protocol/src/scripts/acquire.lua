-- Acquires a lease, or enqueues the attempt.
--
-- KEYS  1 the resource, 2 the clock: see table.lua; on a quorum node 3 born: see restart_guard.lua
-- ARGV  1 '>c24BI8': acquisition, flags (2 has owner, 4 replaces, 8 has an extent, 16 names a client), ttl; with
--           flag 8 '>I4I4I4': capacity, weight, reserve, otherwise they are 1, 1, 0; with 16 'c16': the client that speaks for the
--           attempt, otherwise it is that of the acquisition; with 2 '>I4c0': owner; with 4 'c8': sequence number of the
--           lease to replace; the rest is the metadata
--       2 the ttl in milliseconds, if the first lines can grant it: a weight from 1 to the capacity, no owner, no reserve, and
--           nothing to replace; otherwise empty; a hyphen before it if the client expects that the lock is contended or shared
--       3 of an attempt that waits, 'c8': the secret that the push of a grant proves; then 'c40', which may be missing if it is
--           that of the acquisition's client: the digest in the inbox's name; then, unless they are 80 s and 100,000, '>I8I4': entry
--           ttl, longest queue; otherwise empty
--       4 in a cluster: the inbox name without the client's digest; on a quorum node: see floor.lua and restart_guard.lua
-- Returns the stream id that is the token if these first lines grant the lease; otherwise the time, and
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
-- of the next century may be no token: ids are compared as text, of 13 digits before the hyphen. A quorum node has other first lines: acquire_voter.lua.
--
-- If another attempt holds a plain lease of capacity 1, or another program has the key, an attempt that does not wait is busy.

-- How many waiters the client of an `Acquire` has.
local function client_field_of(request)
  local flags = string.byte(request, 25)
  local at = flags < 16 and 1 or flags % 16 < 8 and 34 or 46
  return 'c' .. string.sub(request, at, at + 15)
end

-- Whether it is a request that has ended: see release.lua. An error says that this is not known.
local has_ended = false
if math.floor(string.byte(ARGV[1], 17) / 32) == 3 then
  local attempt = string.sub(ARGV[1], 1, 24)
  local count = redis.pcall('EXISTS', ENDED)
  has_ended = count == 1 or count ~= 0 and count
end
local plain_ttl, id, own_field, client_field, found, raw = has_ended and '' or ARGV[2], nil, nil, nil, nil, nil
if string.byte(plain_ttl) == 45 then -- a hyphen
  id = string.sub(ARGV[1], 1, 24)
  own_field, client_field = 'i' .. id, client_field_of(ARGV[1])
  found = redis.pcall('HMGET', KEYS[1], 'h', own_field, client_field)
  if found.err or not found[1] then found = nil end
  if not found then plain_ttl = string.sub(plain_ttl, 2) end
end
local LONGEST_ID, FIRST_LATE_ID, DIGITS, HYPHEN = #'1700000000000-999', '4', #'1700000000000', 45
if plain_ttl ~= '' and not found then
  local id = drawn or redis.pcall('XADD', KEYS[2], 'MAXLEN', '0', '*', 't', '')
  drawn = nil
  if not id.err then
    if #id <= LONGEST_ID and string.byte(id, DIGITS + 1) == HYPHEN and id < FIRST_LATE_ID
      and redis.call('SET', KEYS[1], ARGV[1] .. ' leasehold:4@' .. id, 'NX', 'PX', plain_ttl) then
      return id
    end
    drawn = id
  elseif string.find(id.err, 'READONLY') then
    return id
  end
end
if not found then raw = redis.call('MGET', KEYS[1])[1] end
local ID_AND_FLAGS = '>c24B'
if raw and #raw >= struct.size(ID_AND_FLAGS) then
  local id, flags = struct.unpack(ID_AND_FLAGS, ARGV[1])
  local holder, holder_flags = struct.unpack(ID_AND_FLAGS, raw)
  -- A key that has lost its expiry gets one from the rules.
  if flags == 0 and ARGV[3] == '' and holder_flags < 8 and holder ~= id and redis.call('PTTL', KEYS[1]) > 0 then
    local time = NOW()
    return { time[1] * 1000000 + time[2], 3 }
  end
end
--@use rules

local request = unpack_acquire(ARGV[1])
local id, has_owner, owner, replaces = request.id, request.has_owner, request.owner, request.replaces
local capacity, weight, ttl, reserve = request.capacity, request.weight, request.ttl, request.reserve
local waits = ARGV[3] ~= ''
local secret, inbox, entry_ttl, max_queue = unpack_wait(ARGV[3], request.client)

local function grant_now(token, last, granted_at)
  request.token, request.granted_at, request.expires_at, request.claimed, request.retained = token, granted_at, now + ttl, 1, 0
  add_lease(request)
  return { now, 1, token, last, ttl }
end

local function queued(place)
  local w = first_ready_waiter()
  if w and w.place == place then
    h.head, h.head_client = place, w.client
    return { now, 2, 1, head_hint() }
  end
  return { now, 2, 0, follower_repoll_at(request.client, head_hint(), h.clients, waiters_of(request.client)) }
end

-- A grant from the queue, of which no answer has told yet.
local function claim(l)
  -- Another client may still wait for it.
  if l.client ~= request.client then push({ id = id, client = l.client, inbox = l.inbox }, 3) end
  l.claimed, l.granted_at, l.expires_at = 1, hold_start(l), now + ttl
  change_client(l, request.client, request.metadata)
  note_expiry(l.expires_at)
  put_lease(l)
  return { now, 1, l.token, l.token, ttl }
end

-- Of an attempt that several clients make only the first answer is a grant. After a further one no client may release the lease on the
-- condition that it speaks for the attempt.
local function repeated_grant(l)
  if l.retained == 1 then return { now, 4 } end
  local mark = 0
  if request.names_client then
    if l.claimed == 0 then return claim(l) end
    local own = string.sub(id, 1, 16)
    if l.client ~= own then
      change_client(l, own, l.metadata)
      put_lease(l)
    end
    mark = 1
  end
  -- A clock that was set back leaves more than was asked for.
  return { now, 1, l.token, l.token, math.max(math.min(l.expires_at - now, ttl) - mark, 0) }
end

local function recheck(w)
  local held = held_by(w.has_owner, w.owner)
  if held and w.weight <= held.weight then
    local token, last, valid_for = lease_to_waiter(w, held)
    if request.names_client then return claim(w) end
    return { now, 1, token, last, valid_for }
  end
  if waits then
    w.deadline, w.secret = now + entry_ttl, secret
    if w.client == request.client then w.inbox = inbox end
    put_waiter(w)
  end
  return queued(w.place)
end

local function known_attempt()
  local granted = take_back_grant(id)
  if granted and not request.names_client then return { now, 1, granted.a, granted.b, granted.c } end
  if has_ended == true or tombstone(id) then return { now, 4 } end
  local l = lease(id)
  if l then return repeated_grant(l) end
  local w = waiter(id)
  if w and w.deadline <= now then
    remove_waiter(w)
    w = nil
  end
  if w then return recheck(w) end
  if has_ended and string.find(has_ended.err, 'non local key') then
    return redis.error_reply('TRYAGAIN the hash slot of ' .. KEYS[1] .. ' is being moved')
  end
  return has_ended
end

-- An `Acquire` that waits, from another client than before: it speaks for the waiter from now on. The one before is told.
local function move_waiter()
  local w = request.names_client and waits and waiter(id)
  if not w or w.deadline <= now or w.client == request.client then return end
  push({ id = id, client = w.client, inbox = w.inbox }, 3)
  queue.has_moved = put_moved_waiter(w, request) or queue.has_moved
end

local function enqueue()
  if replaces == '' and h.waiters >= max_queue then return { now, 5 } end
  local number = h.next_place
  local place = replaces ~= '' and number or FIRST_WAITER_PLACE + number
  request.place, request.since, request.deadline, request.secret, request.inbox = place, now, now + entry_ttl, secret, inbox
  h.next_place = number + 1
  put_waiter(request)
  return queued(place)
end

local function replace(held)
  local further = math.max(weight - held.weight, 0)
  if not fits(further) then
    if not waits then return { now, 3 } end
    if held.weight > math.floor(h.capacity / 2) then return enqueue() end
    return { now, 6, 3, held.weight }
  end
  local token, last = held.token, held.token
  if further > 0 then token, last = next_tokens(reserve) end
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
  if weight == 0 or weight > capacity then return { now, 6, 1, capacity } end
  local replaced = replaces ~= '' and has_owner == 0 and replaceable(id, replaces)
  if replaces ~= '' and not replaced then return { now, 6, 4, 0 } end
  if h.leases == 0 and h.waiters == 0 then
    h.capacity = capacity
  elseif h.capacity ~= capacity then
    return { now, 6, 2, h.capacity }
  end
  if replaced then return replace(replaced) end
  local held = held_by(has_owner, owner)
  if held then
    if weight > held.weight then return { now, 6, 3, held.weight } end
    return grant_now(held.token, held.token, now)
  end
  if not has_ready_waiter() and fits(weight) then
    local token, last = next_tokens(reserve)
    if not token then return nil end
    return grant_now(token, last, now)
  end
  if not waits then return { now, 3 } end
  return enqueue()
end

if not begin() then return { now, 13, foreign } end
requester, requester_client = id, request.client
mark_client_alive(request.client)
move_waiter()
grant()
local reply, is_known = acquire()
store()
return reply or redis.error_reply(clock_error), is_known
