-- The lease table of one resource: the twin of `model/mod.rs`, rule by rule and name by name.
--
-- KEYS  1 state  a string, in one of two forms (see below)
--       2 rows   a sorted set of texts, all with score 0, so that it is a table in the order of its texts. The first
--                byte says what a text is:
--                l  a further lease, by acquisition
--                e  such a lease's acquisition, by expiry
--                o  any lease's acquisition, by named owner and weight
--                w  a waiter, by acquisition, so that a client's are a range
--                r  the acquisition of a waiter that is not parked, by place
--                d  any waiter's acquisition, by deadline and place
--                t  the end of a tombstone, by acquisition
--                b  a tombstone's acquisition, by end
-- ARGV  1 what the command says, as one text of bytes
-- INBOX is the name of a client's inbox, less its id in hex; NUMSUB and PUBLISH are the commands that reach it.
--
-- First time passes, then the speaker's entries come back, then the head of the queue is granted what fits, then the
-- command does what it does; finally the state is stored, and each key that was written gets an expiry that none of its
-- rows outlives. Times are microseconds of the server's clock, acquisitions are 24 bytes: client and sequence number,
-- the higher bytes first, so that they sort as the numbers do. So do the numbers in rows, as doubles that are never
-- negative.
--
-- The state's first byte is its form. 0 (free) and 1 (held) are the usual ones: last token, until when the key stays, end
-- of the lease, then what the `Acquire` said that took it, or would have: the lease was granted its ttl before its end,
-- with its reserve before the last token. There are no rows then, the holder has no name, and the ttl is an hour at
-- most. A release makes a 0 of the 1, and nothing more. Form 2 is any other state: a header, and the first lease.

local CLAIM_WINDOW = 3000000
local REMEMBER_TOKEN = 3600000000
local NEVER = 9007199254740991
local BEHIND_HOLDERS = 1099511627776

local USUAL = '>Bddd'
local USUAL_BYTES = 25
local HEADER = '>Bdddddddddddd'
local HEADER_BYTES = 97
local ACQUIRE = '>c24BI4I4I8I4'
local LEASE = '>c24ddddBBBI4c0I4c0'
local WAITER = '>c24ddddddBBI4c0I4c0Bc0'

-- More than can follow a prefix of a row's text: after at most 28 bytes comes a number's first byte, or the end.
local BEYOND = string.rep('\255', 32)

local asker = nil
local queue_moved = false
local rows_grew = false
local pushes = {}

-- A server whose memory is full lets nothing be written, unless the script has deleted something before. To give back or
-- to keep must always work, so these pretend to.
local may_exceed_memory = false

local function write(...)
  local done = redis.pcall(...)
  if type(done) == 'table' and done.err then
    if not may_exceed_memory or not string.find(done.err, 'OOM', 1, true) then error(done.err, 0) end
    redis.call('ZREM', KEYS[2], '')
    redis.call(...)
  end
end

-- Rows ---------------------------------------------------------------------------------------------------------------

local h = {
  capacity = 0, in_use = 0, last_token = 0, next_place = 1, head = 0, leases = 0, waiters = 0, parked = 0,
  tombstones = 0, next_expiry = NEVER, remember_until = 0, latest = 0,
}
local first = nil -- the lease that is kept with the header
local before = nil -- the state as it was, in the form that it is stored in

local function rows_with(prefix)
  return redis.call('ZRANGEBYLEX', KEYS[2], '[' .. prefix, '(' .. prefix .. BEYOND)
end

local function first_row_with(prefix)
  return redis.call('ZRANGEBYLEX', KEYS[2], '[' .. prefix, '(' .. prefix .. BEYOND, 'LIMIT', '0', '1')[1]
end

-- What a lease or a waiter has in the table is remembered with it, so that it can be taken out when it has changed.
local function take_out(entry)
  if entry.rows and #entry.rows > 0 then redis.call('ZREM', KEYS[2], unpack(entry.rows)) end
  entry.rows = nil
end

local function put_in(entry, rows)
  take_out(entry)
  entry.rows = rows
  if #rows == 0 then return end
  local scored = {}
  for i = 1, #rows do
    scored[2 * i - 1] = '0'
    scored[2 * i] = rows[i]
  end
  write('ZADD', KEYS[2], unpack(scored))
  rows_grew = true
end

-- What an `Acquire` says, from `at` on. Flag 8 is never said: in a state it means that the lease is not claimed yet.
local function unpack_acquire(text, at)
  local a = { owner = '', has_owner = 0, replaces = '', waits = false, claimed = 1 }
  local flags
  a.id, flags, a.capacity, a.weight, a.ttl, a.reserve, at = struct.unpack(ACQUIRE, text, at)
  if flags % 2 == 1 then
    a.waits = true
    a.entry_ttl, a.longest_queue, at = struct.unpack('>I8I4', text, at)
  end
  if flags % 4 > 1 then
    a.has_owner = 1
    a.owner, at = struct.unpack('>I4c0', text, at)
  end
  if flags % 8 > 3 then a.replaces, at = struct.unpack('c8', text, at) end
  if flags > 7 then a.claimed = 0 end
  a.metadata = string.sub(text, at)
  return a
end

local function pack_lease(lease)
  return struct.pack(LEASE, lease.id, lease.weight, lease.token, lease.granted_at, lease.expires_at,
    lease.claimed, lease.kept, lease.has_owner, #lease.owner, lease.owner, #lease.metadata, lease.metadata)
end

local function unpack_lease(text, at)
  local l = {}
  l.id, l.weight, l.token, l.granted_at, l.expires_at, l.claimed, l.kept, l.has_owner, l.owner,
    l.metadata = struct.unpack(LEASE, text, at)
  return l
end

local function rows_of_lease(l)
  local rows = {}
  if l.is_further then
    rows[1] = 'l' .. pack_lease(l)
    rows[2] = struct.pack('>c1dc24', 'e', l.expires_at, l.id)
  end
  if l.has_owner == 1 then
    rows[#rows + 1] = struct.pack('>c1I4c0I4c24', 'o', #l.owner, l.owner, l.weight, l.id)
  end
  return rows
end

local function pack_waiter(waiter)
  return struct.pack(WAITER, waiter.id, waiter.place, waiter.weight, waiter.ttl, waiter.reserve, waiter.since,
    waiter.deadline, waiter.parked, waiter.has_owner, #waiter.owner, waiter.owner, #waiter.metadata, waiter.metadata,
    #waiter.replaces, waiter.replaces)
end

local function unpack_waiter(text, at)
  local w = {}
  w.id, w.place, w.weight, w.ttl, w.reserve, w.since, w.deadline, w.parked, w.has_owner, w.owner, w.metadata,
    w.replaces = struct.unpack(WAITER, text, at)
  return w
end

local function rows_of_waiter(w)
  local rows = { 'w' .. pack_waiter(w), struct.pack('>c1ddc24', 'd', w.deadline, w.place, w.id) }
  if w.parked == 0 then rows[3] = struct.pack('>c1dc24', 'r', w.place, w.id) end
  return rows
end

local function pack_state()
  local packed = struct.pack(HEADER, 2, h.capacity, h.in_use, h.last_token, h.next_place, h.head, h.leases, h.waiters,
    h.parked, h.tombstones, h.next_expiry, h.remember_until, h.latest)
  if first then packed = packed .. pack_lease(first) end
  return packed
end

-- In a usual form, if that tells it all.
local function pack_usual(stays)
  if h.waiters > 0 or h.tombstones > 0 or h.leases > 1 then return nil end
  local form, l = h.leases, first
  if form == 0 then
    local ends = h.remember_until - REMEMBER_TOKEN
    l = { id = string.rep('\0', 24), has_owner = 0, weight = 0, token = h.last_token, granted_at = ends,
      expires_at = ends, claimed = 1, kept = 0, metadata = '' }
  end
  if not l or l.has_owner == 1 or l.kept == 1 then return nil end
  local ttl, reserve = l.expires_at - l.granted_at, h.last_token - l.token
  if h.remember_until ~= math.max(h.last_token + 1, l.granted_at + REMEMBER_TOKEN) then return nil end
  if ttl > REMEMBER_TOKEN or reserve >= REMEMBER_TOKEN then return nil end
  return struct.pack(USUAL, form, h.last_token, stays, l.expires_at)
    .. struct.pack(ACQUIRE, l.id, l.claimed == 1 and 0 or 8, h.capacity, l.weight, ttl, reserve) .. l.metadata
end

local function load_usual(raw)
  local form, stays, ends
  form, h.last_token, stays, ends = struct.unpack(USUAL, raw)
  local a = unpack_acquire(raw, USUAL_BYTES + 1)
  local granted_at = ends - a.ttl
  h.capacity = a.capacity
  h.remember_until = math.max(h.last_token + 1, granted_at + REMEMBER_TOKEN)
  h.latest = h.remember_until
  if form == 1 then
    h.leases = 1
    h.in_use = a.weight
    h.next_expiry = ends
    h.latest = math.max(h.latest, ends)
    first = { id = a.id, has_owner = 0, owner = '', weight = a.weight, token = h.last_token - a.reserve,
      granted_at = granted_at, expires_at = ends, claimed = a.claimed, kept = 0, metadata = a.metadata }
  end
  before = pack_state()
end

local function load(raw)
  if not raw then return end
  if string.byte(raw) ~= 2 then return load_usual(raw) end
  local _
  _, h.capacity, h.in_use, h.last_token, h.next_place, h.head, h.leases, h.waiters, h.parked, h.tombstones, h.next_expiry,
    h.remember_until, h.latest = struct.unpack(HEADER, raw)
  if #raw > HEADER_BYTES then
    first = unpack_lease(raw, HEADER_BYTES + 1)
    first.rows = rows_of_lease(first)
  end
  before = raw
end

local function lease(id)
  if first and first.id == id then return first end
  if h.leases > (first and 1 or 0) then
    local found = first_row_with('l' .. id)
    if found then
      local l = unpack_lease(found, 2)
      l.is_further = true
      l.rows = rows_of_lease(l)
      return l
    end
  end
end

local function put_lease(l)
  if h.latest < l.expires_at then h.latest = l.expires_at end
  -- One that has a row keeps it, though the place with the header has become free.
  if not l.is_further and (not first or first.id == l.id) then
    first = l
  else
    l.is_further = true
  end
  put_in(l, rows_of_lease(l))
end

local function drop_lease(l)
  if first and first.id == l.id then first = nil end
  take_out(l)
  l.is_further = nil
end

local function first_expiring_lease()
  local other = nil
  if h.leases > (first and 1 or 0) then
    local found = first_row_with('e')
    if found then other = lease(string.sub(found, -24)) end
  end
  if not first then return other end
  if not other or first.expires_at < other.expires_at then return first end
  if first.expires_at == other.expires_at and first.id < other.id then return first end
  return other
end

local function heaviest_lease_of(owner)
  local prefix = struct.pack('>c1I4c0', 'o', #owner, owner)
  local found = redis.call('ZREVRANGEBYLEX', KEYS[2], '(' .. prefix .. BEYOND, '[' .. prefix, 'LIMIT', '0', '1')
  if found[1] then return lease(string.sub(found[1], -24)) end
end

local function each_lease()
  local all = {}
  if first then all[1] = first end
  if h.leases > #all then
    local found = rows_with('l')
    for i = 1, #found do all[#all + 1] = lease(string.sub(found[i], 2, 25)) end
  end
  return all
end

local function waiter(id)
  local found = first_row_with('w' .. id)
  if found then
    local w = unpack_waiter(found, 2)
    w.rows = rows_of_waiter(w)
    return w
  end
end

local function put_waiter(w)
  if h.latest < w.deadline then h.latest = w.deadline end
  put_in(w, rows_of_waiter(w))
end

local function first_ready_waiter()
  local found = first_row_with('r')
  if found then return waiter(string.sub(found, -24)) end
end

local function first_expiring_waiter()
  local found = first_row_with('d')
  if found then return waiter(string.sub(found, -24)) end
end

local function rows_of_tombstone(id, ends)
  return { struct.pack('>c1c24d', 't', id, ends), struct.pack('>c1dc24', 'b', ends, id) }
end

local function put_tombstone(id, ends)
  if h.latest < ends then h.latest = ends end
  local tombstone = {}
  local old = first_row_with('t' .. id)
  if old then tombstone.rows = rows_of_tombstone(id, (struct.unpack('>d', old, 26))) end
  put_in(tombstone, rows_of_tombstone(id, ends))
end

-- Removes those that end at `now` or before, and says how many, and when the next ends.
local function remove_tombstones()
  local removed = 0
  while true do
    local found = first_row_with('b')
    if not found then return removed, NEVER end
    local ends = struct.unpack('>d', found, 2)
    if ends > now then return removed, ends end
    take_out({ rows = rows_of_tombstone(string.sub(found, -24), ends) })
    removed = removed + 1
  end
end

-- Rules --------------------------------------------------------------------------------------------------------------

local function soonest_expiry(expiry)
  if expiry < h.next_expiry then h.next_expiry = expiry end
end

local function push(id, kind, a, b, c)
  pushes[#pushes + 1] = { id = id, kind = kind, a = a or 0, b = b or 0, c = c or 0 }
end

local function client_of(id)
  return string.sub(id, 1, 16)
end

local function inbox_of(id)
  return INBOX .. string.format('%08x%08x%08x%08x', struct.unpack('>I4I4I4I4', id))
end

local function is_there(id)
  return redis.call('PUBSUB', NUMSUB, inbox_of(id))[2] > 0
end

local function weight_of(owner)
  local l = heaviest_lease_of(owner)
  return l and l.weight or 0
end

local function add_lease(l)
  local before = 0
  if l.has_owner == 1 and h.leases > 0 then before = weight_of(l.owner) end
  soonest_expiry(l.expires_at)
  put_lease(l)
  h.leases = h.leases + 1
  h.in_use = h.in_use + math.max(l.weight, before) - before
end

local function remove_lease(l)
  drop_lease(l)
  h.leases = h.leases - 1
  local after = 0
  if l.has_owner == 1 then after = weight_of(l.owner) end
  h.in_use = h.in_use - (math.max(l.weight, after) - after)
end

local function remove_waiter(w)
  take_out(w)
  h.waiters = h.waiters - 1
  h.parked = h.parked - w.parked
  queue_moved = true
end

local function set_parked(id, parked)
  local client = client_of(id)
  local all = rows_with('w' .. client)
  for i = 1, #all do
    local w = waiter(string.sub(all[i], 2, 25))
    if w.parked ~= parked then
      w.parked = parked
      put_waiter(w)
      h.parked = h.parked + (parked == 1 and 1 or -1)
      queue_moved = true
    end
  end
end

local function unpark_asker(id)
  if asker and client_of(asker) == client_of(id) then
    local w = waiter(asker)
    if w and w.parked == 1 then
      w.parked = 0
      put_waiter(w)
      h.parked = h.parked - 1
    end
  end
end

local function expire()
  if h.next_expiry > now then return end
  local next_expiry = NEVER
  while h.leases > 0 do
    local l = first_expiring_lease()
    if not l then break end
    if l.expires_at > now then
      next_expiry = math.min(next_expiry, l.expires_at)
      break
    end
    remove_lease(l)
    if l.claimed == 0 then set_parked(l.id, 1) end
  end
  while h.waiters > 0 do
    local w = first_expiring_waiter()
    if not w then break end
    if w.deadline > now then
      next_expiry = math.min(next_expiry, w.deadline)
      break
    end
    remove_waiter(w)
  end
  if h.tombstones > 0 then
    local removed, next_end = remove_tombstones()
    h.tombstones = h.tombstones - removed
    next_expiry = math.min(next_expiry, next_end)
  end
  h.next_expiry = next_expiry
end

local function fits(weight)
  return weight <= h.capacity - h.in_use
end

local function held_by(has_owner, owner)
  if has_owner == 1 and h.leases > 0 then
    local l = heaviest_lease_of(owner)
    if l and l.kept == 0 then return l end
  end
end

local function held_lease(id)
  if h.leases == 0 then return nil end
  local l = lease(id)
  if l and l.kept == 0 then return l end
end

local function take_back_grant(id)
  for i = 1, #pushes do
    local p = pushes[i]
    if p.id == id and p.kind == 1 then
      table.remove(pushes, i)
      return p
    end
  end
end

local function make_way(l)
  take_back_grant(l.id)
  remove_lease(l)
end

local function replaceable(id, sequence)
  local l = held_lease(client_of(id) .. sequence)
  if l and l.has_owner == 0 then return l end
end

local function head_was_told_wrong()
  h.head = 0
  queue_moved = true
end

local function next_tokens(reserve)
  local token = math.max(h.last_token + 1, now)
  h.last_token = token + reserve
  h.remember_until = math.max(h.last_token + 1, now + REMEMBER_TOKEN)
  return token, h.last_token
end

-- What a waiter holds already, if anything; and whether it was to take the place of a lease that is gone.
local function held_already(w)
  if w.replaces == '' then return held_by(w.has_owner, w.owner), false end
  local held = replaceable(w.id, w.replaces)
  return held, not held
end

local function lease_to_waiter(w, held)
  local lasts = math.min(w.ttl, CLAIM_WINDOW)
  local granted_at = now
  local token, last
  if held and w.replaces == '' then
    token, last = held.token, held.token
  else
    token, last = next_tokens(w.reserve)
  end
  if held and w.replaces ~= '' then
    make_way(held)
    granted_at = held.granted_at
  end
  add_lease({ id = w.id, has_owner = w.has_owner, owner = w.owner, weight = w.weight, token = token,
    granted_at = granted_at, expires_at = now + lasts, claimed = 0, kept = 0, metadata = w.metadata })
  return token, last, lasts
end

local function grant()
  while h.waiters > h.parked do
    local w = first_ready_waiter()
    if not w then break end
    local held, is_gone = held_already(w)
    if not is_gone and not fits(math.max(w.weight - (held and held.weight or 0), 0)) then break end
    if is_gone then
      remove_waiter(w)
      push(w.id, 3)
    elseif asker ~= w.id and not is_there(w.id) then
      set_parked(w.id, 1)
      unpark_asker(w.id)
    else
      remove_waiter(w)
      push(w.id, 1, lease_to_waiter(w, held))
    end
  end
end

local function head_hint()
  local l = first_expiring_lease()
  return l and l.expires_at or now
end

local function tell_head()
  local w = nil
  if h.waiters > h.parked then w = first_ready_waiter() end
  if not w then
    h.head = 0
  elseif w.place ~= h.head then
    h.head = w.place
    push(w.id, 2, head_hint())
  end
end

-- A client that takes or keeps something is awake.
local function hear(id)
  if h.parked > 0 then set_parked(id, 0) end
end

local function store(raw)
  if queue_moved then tell_head() end
  local is_idle = h.leases == 0 and h.waiters == 0 and h.tombstones == 0
  if is_idle and h.remember_until <= now then
    if raw then redis.call('DEL', KEYS[1]) end
  else
    h.latest = math.max(h.latest, h.remember_until)
    local packed = pack_state()
    local ends = math.ceil(h.latest / 1000) + 1000
    if packed ~= before then
      write('SET', KEYS[1], pack_usual(ends * 1000) or packed, 'PXAT', ends)
    end
    if rows_grew then redis.call('PEXPIREAT', KEYS[2], ends) end
  end
  for i = 1, #pushes do
    local p = pushes[i]
    redis.call(PUBLISH, inbox_of(p.id), struct.pack('>Bc24dddd', p.kind, p.id, now, p.a, p.b, p.c))
  end
end

local function begin(raw)
  load(raw)
  expire()
end
