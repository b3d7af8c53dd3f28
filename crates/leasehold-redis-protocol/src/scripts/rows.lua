-- The storage of one resource's lease table: the counterpart of `model/rows.rs`. Every rule is in `model.lua`.
--
-- KEYS  1 state  a string, in one of three forms (see below)
--       2 rows   a sorted set whose scores are all 0: a table in the order of its members. The first byte of a member
--                says what it is:
--                l  a further lease, by acquisition
--                e  such a lease's acquisition, by expiry
--                o  any lease's acquisition, by named owner and weight
--                w  a waiter, by acquisition, so that a client's are a range
--                q  a waiter's sequence number, by client and place
--                r  the acquisition of a waiter, by place: of each client that is not parked the first one
--                p  a client that is parked, and has waiters
--                d  any waiter's acquisition, by deadline and place
--                t  the end of a tombstone, by acquisition
--                b  a tombstone's acquisition, by end
--
-- Times are microseconds of the server's clock, acquisitions are 24 bytes: client and sequence number, the higher bytes
-- first, so that they sort as the numbers do. So do the numbers in rows, as doubles that are never negative.
--
-- ARGV  none
-- Returns nothing: it defines the functions that model.lua and the commands use.
--
-- The state's first byte is its form. 0 (free) and 1 (held) are the usual ones: last token, until when the key stays, end
-- of the lease, then what the `Acquire` said that took it, or would have: the lease was granted its ttl before its end,
-- with its reserve before the last token. There are no rows then, the holder has no name, and the ttl is an hour at
-- most. A release makes a 0 of the 1, and nothing more. Form 2 is any other state: a header, and the first lease.

local REMEMBER_TOKEN = 3600000000
-- How much longer than they have to the keys stay, so that their expiry is seldom moved.
local SPARE = 3600000000
local NEVER = 9007199254740991

local USUAL = '>Bddd'
local USUAL_BYTES = 25
local HEADER = '>Bdddddddddddd'
local HEADER_BYTES = 97
local ACQUIRE = '>c24BI4I4I8I4'
local LEASE = '>c24ddddBBBI4c0I4c0'
local WAITER = '>c24ddddddBI4c0I4c0Bc0'

-- More than can follow a prefix of a row's text: after at most 28 bytes comes a number's first byte, or the end.
local BEYOND = string.rep('\255', 32)

local rows_grew = false

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

local h = {
  capacity = 0, in_use = 0, last_token = 0, next_place = 1, head = 0, leases = 0, waiters = 0, parked = 0,
  tombstones = 0, next_expiry = NEVER, remember_until = 0, stays = 0,
}
local first = nil -- the lease that is kept with the header
local before = nil -- the state as it was, in form 2
local stayed = 0 -- how long the keys have stayed so far

local function outlive(moment)
  if h.stays < moment + 1000000 then h.stays = moment + SPARE end
end

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
    waiter.deadline, waiter.has_owner, #waiter.owner, waiter.owner, #waiter.metadata, waiter.metadata,
    #waiter.replaces, waiter.replaces)
end

local function unpack_waiter(text, at)
  local w = {}
  w.id, w.place, w.weight, w.ttl, w.reserve, w.since, w.deadline, w.has_owner, w.owner, w.metadata,
    w.replaces = struct.unpack(WAITER, text, at)
  return w
end

local function place_of_waiter(w)
  return struct.pack('>c1c16dc8', 'q', w.id, w.place, string.sub(w.id, 17))
end

local function ready_row(place, id)
  return struct.pack('>c1dc24', 'r', place, id)
end

local function rows_of_waiter(w)
  return { 'w' .. pack_waiter(w), struct.pack('>c1ddc24', 'd', w.deadline, w.place, w.id), place_of_waiter(w) }
end

local function pack_state()
  local packed = struct.pack(HEADER, 2, h.capacity, h.in_use, h.last_token, h.next_place, h.head, h.leases, h.waiters,
    h.parked, h.tombstones, h.next_expiry, h.remember_until, h.stays)
  if first then packed = packed .. pack_lease(first) end
  return packed
end

-- In a usual form, if that tells it all.
local function pack_usual()
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
  return struct.pack(USUAL, form, h.last_token, h.stays, l.expires_at)
    .. struct.pack(ACQUIRE, l.id, l.claimed == 1 and 0 or 8, h.capacity, l.weight, ttl, reserve) .. l.metadata
end

local function load_usual(raw)
  local form, ends
  form, h.last_token, h.stays, ends = struct.unpack(USUAL, raw)
  local a = unpack_acquire(raw, USUAL_BYTES + 1)
  local granted_at = ends - a.ttl
  h.capacity = a.capacity
  h.remember_until = math.max(h.last_token + 1, granted_at + REMEMBER_TOKEN)
  if form == 1 then
    h.leases = 1
    h.in_use = a.weight
    h.next_expiry = ends
    first = { id = a.id, has_owner = 0, owner = '', weight = a.weight, token = h.last_token - a.reserve,
      granted_at = granted_at, expires_at = ends, claimed = a.claimed, kept = 0, metadata = a.metadata }
  end
end

local function load_header(raw)
  local _
  _, h.capacity, h.in_use, h.last_token, h.next_place, h.head, h.leases, h.waiters, h.parked, h.tombstones, h.next_expiry,
    h.remember_until, h.stays = struct.unpack(HEADER, raw)
  if #raw > HEADER_BYTES then
    first = unpack_lease(raw, HEADER_BYTES + 1)
    first.rows = rows_of_lease(first)
  end
end

local function load(raw)
  if not raw then return end
  if string.byte(raw) == 2 then
    load_header(raw)
    before = raw
  else
    load_usual(raw)
    before = pack_state()
  end
  stayed = h.stays
end

-- Both keys have one expiry, so that whoever looks at the state knows how long the rows stay.
local function store_state()
  local packed = pack_state()
  local expiry = math.ceil(h.stays / 1000)
  if h.stays ~= stayed then
    write('SET', KEYS[1], pack_usual() or packed, 'PXAT', expiry)
  elseif packed ~= before then
    write('SET', KEYS[1], pack_usual() or packed, 'KEEPTTL')
  end
  if rows_grew or h.stays ~= stayed then redis.call('PEXPIREAT', KEYS[2], expiry) end
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
  outlive(l.expires_at)
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

local function is_parked(client)
  return h.parked > 0 and first_row_with('p' .. client) ~= nil
end

local function waiter(id)
  local found = first_row_with('w' .. id)
  if found then
    local w = unpack_waiter(found, 2)
    w.rows = rows_of_waiter(w)
    w.parked = is_parked(string.sub(id, 1, 16)) and 1 or 0
    return w
  end
end

-- The row by which a client's first waiter stands for it among the others; nothing if it has none.
local function ready_row_of(client)
  local found = first_row_with('q' .. client)
  if found then return ready_row((struct.unpack('>d', found, 18)), client .. string.sub(found, -8)) end
end

-- Changes which waiters a client has, and with that which one stands for it.
local function change_waiters(w, change)
  local client = string.sub(w.id, 1, 16)
  local before = ready_row_of(client)
  change()
  local after = ready_row_of(client)
  if w.parked == 1 then
    if not after then redis.call('ZREM', KEYS[2], 'p' .. client) end
  elseif before ~= after then
    if before then redis.call('ZREM', KEYS[2], before) end
    if after then write('ZADD', KEYS[2], '0', after) end
  end
end

local function put_waiter(w)
  outlive(w.deadline)
  change_waiters(w, function() put_in(w, rows_of_waiter(w)) end)
end

local function drop_waiter(w)
  change_waiters(w, function() take_out(w) end)
end

local function waiters_of(client)
  return redis.call('ZLEXCOUNT', KEYS[2], '[q' .. client, '(q' .. client .. BEYOND)
end

local function ready_clients()
  return redis.call('ZLEXCOUNT', KEYS[2], '[r', '(s')
end

-- Says how many waiters that changes.
local function park(client, parked)
  local place = ready_row_of(client)
  if not place or is_parked(client) == (parked == 1) then return 0 end
  local add, remove = place, 'p' .. client
  if parked == 1 then add, remove = remove, place end
  redis.call('ZREM', KEYS[2], remove)
  write('ZADD', KEYS[2], '0', add)
  rows_grew = true
  return waiters_of(client)
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
  outlive(ends)
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
