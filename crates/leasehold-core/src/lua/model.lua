-- The lease table of one resource: the twin of `model/mod.rs`, rule by rule and name by name.
--
-- KEYS  1 state       a string: the header, and the first lease (all that an uncontended lock needs)
--       2 leases      a hash of further leases, by acquisition
--       3 expiries    a sorted set of those, by expiry
--       4 owners      a sorted set of all leases with a named owner, in the order of owner, weight, acquisition
--       5 waiters     a hash, by acquisition
--       6 ready       a sorted set of the waiters that are not parked, by place
--       7 deadlines   a sorted set of all waiters, by deadline
--       8 clients     a sorted set of all waiters, in the order of their acquisitions, so that a client's are a range
--       9 tombstones  a sorted set, by end
-- ARGV  1 the name of a client's inbox, less its id in hex
--       what the command adds
-- NUMSUB and PUBLISH are the commands that reach it: those of plain or of sharded channels.
--
-- First time passes, then the speaker's entries come back, then the head of the queue is granted what fits, then the
-- command does what it does; finally the state is stored, and each key that was written gets an expiry that none of its
-- rows outlives. Times are microseconds of the server's clock, acquisitions are 24 bytes: client and sequence number,
-- the higher bytes first, so that they sort as the numbers do.

local CLAIM_WINDOW = 3000000
local REMEMBER_TOKEN = 3600000000
local NEVER = 9007199254740991
local BEHIND_HOLDERS = 1099511627776

local HEADER = '>dddddddddddd'
local HEADER_BYTES = 96
local LEASE = '>c24ddddBBBI2c0I2c0'
local WAITER = '>c24ddddddBBI2c0I2c0Bc0'

local asker = nil
local queue_moved = false
local pushes = {}
local touched = {}

-- Rows ---------------------------------------------------------------------------------------------------------------

local function touch(key)
  touched[key] = true
end

local h = {
  capacity = 0, in_use = 0, last_token = 0, next_place = 1, head = 0, leases = 0, waiters = 0, parked = 0,
  tombstones = 0, next_expiry = NEVER, remember_until = 0, latest = 0,
}
local first = nil -- the lease that is kept with the header

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

local function pack_waiter(waiter)
  return struct.pack(WAITER, waiter.id, waiter.place, waiter.weight, waiter.ttl, waiter.reserve, waiter.since,
    waiter.deadline, waiter.parked, waiter.has_owner, #waiter.owner, waiter.owner, #waiter.metadata, waiter.metadata,
    #waiter.replaces, waiter.replaces)
end

local function unpack_waiter(text)
  local w = {}
  w.id, w.place, w.weight, w.ttl, w.reserve, w.since, w.deadline, w.parked, w.has_owner, w.owner, w.metadata,
    w.replaces = struct.unpack(WAITER, text)
  return w
end

local function load(raw)
  if not raw then return end
  h.capacity, h.in_use, h.last_token, h.next_place, h.head, h.leases, h.waiters, h.parked, h.tombstones, h.next_expiry,
    h.remember_until, h.latest = struct.unpack(HEADER, raw)
  if #raw > HEADER_BYTES then first = unpack_lease(raw, HEADER_BYTES + 1) end
end

-- A number that sorts as text, as part of a member.
local function owner_member(lease)
  return struct.pack('>I2c0I4c24', #lease.owner, lease.owner, lease.weight, lease.id)
end

local function lease(id)
  if first and first.id == id then return first end
  if h.leases > (first and 1 or 0) then
    local found = redis.call('HGET', KEYS[2], id)
    if found then
      local l = unpack_lease(found)
      l.is_further = true
      return l
    end
  end
end

local function put_lease(l)
  if h.latest < l.expires_at then h.latest = l.expires_at end
  -- One that is in the hash stays there, though the place with the header has become free.
  if not l.is_further and (not first or first.id == l.id) then
    first = l
  else
    redis.call('HSET', KEYS[2], l.id, pack_lease(l))
    redis.call('ZADD', KEYS[3], l.expires_at, l.id)
    touch(KEYS[2])
    touch(KEYS[3])
  end
  if l.has_owner == 1 then
    redis.call('ZADD', KEYS[4], 0, owner_member(l))
    touch(KEYS[4])
  end
end

local function drop_lease(l)
  if first and first.id == l.id then
    first = nil
  else
    redis.call('HDEL', KEYS[2], l.id)
    redis.call('ZREM', KEYS[3], l.id)
  end
  if l.has_owner == 1 then redis.call('ZREM', KEYS[4], owner_member(l)) end
end

local function first_expiring_lease()
  local other = nil
  if h.leases > (first and 1 or 0) then
    local found = redis.call('ZRANGE', KEYS[3], 0, 0)
    if found[1] then other = unpack_lease(redis.call('HGET', KEYS[2], found[1])) end
  end
  if not first then return other end
  if not other or first.expires_at < other.expires_at then return first end
  if first.expires_at == other.expires_at and first.id < other.id then return first end
  return other
end

local function heaviest_lease_of(owner)
  local from = struct.pack('>I2c0', #owner, owner)
  local found = redis.call('ZREVRANGEBYLEX', KEYS[4], '(' .. from .. string.rep('\255', 29), '[' .. from, 'LIMIT', 0, 1)
  if found[1] then return lease(string.sub(found[1], -24)) end
end

local function each_lease()
  local all = {}
  if first then all[1] = first end
  if h.leases > #all then
    local found = redis.call('HVALS', KEYS[2])
    for i = 1, #found do all[#all + 1] = unpack_lease(found[i]) end
  end
  return all
end

local function waiter(id)
  local found = redis.call('HGET', KEYS[5], id)
  if found then return unpack_waiter(found) end
end

local function put_waiter(w)
  if h.latest < w.deadline then h.latest = w.deadline end
  redis.call('HSET', KEYS[5], w.id, pack_waiter(w))
  if w.parked == 0 then
    redis.call('ZADD', KEYS[6], w.place, w.id)
    touch(KEYS[6])
  else
    redis.call('ZREM', KEYS[6], w.id)
  end
  redis.call('ZADD', KEYS[7], w.deadline, w.id)
  redis.call('ZADD', KEYS[8], 0, w.id)
  touch(KEYS[5])
  touch(KEYS[7])
  touch(KEYS[8])
end

local function drop_waiter(w)
  redis.call('HDEL', KEYS[5], w.id)
  redis.call('ZREM', KEYS[6], w.id)
  redis.call('ZREM', KEYS[7], w.id)
  redis.call('ZREM', KEYS[8], w.id)
end

local function first_ready_waiter()
  local found = redis.call('ZRANGE', KEYS[6], 0, 0)
  if found[1] then return waiter(found[1]) end
end

local function first_expiring_waiter()
  -- Of those with one deadline the first in the queue, as in the twin: they are few.
  local found = redis.call('ZRANGE', KEYS[7], 0, 0, 'WITHSCORES')
  if not found[1] then return nil end
  local same = redis.call('ZRANGEBYSCORE', KEYS[7], found[2], found[2])
  local earliest = waiter(found[1])
  for i = 2, #same do
    local other = waiter(same[i])
    if other.place < earliest.place then earliest = other end
  end
  return earliest
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
  return ARGV[1] .. (string.gsub(client_of(id), '.', function(c) return string.format('%02x', string.byte(c)) end))
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
  drop_waiter(w)
  h.waiters = h.waiters - 1
  h.parked = h.parked - w.parked
  queue_moved = true
end

local function set_parked(id, parked)
  local client = client_of(id)
  local all = redis.call('ZRANGEBYLEX', KEYS[8], '[' .. client, '[' .. client .. string.rep('\255', 8))
  for i = 1, #all do
    local w = waiter(all[i])
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
    h.tombstones = h.tombstones - redis.call('ZREMRANGEBYSCORE', KEYS[9], '-inf', string.format('%.0f', now))
    local found = redis.call('ZRANGE', KEYS[9], 0, 0, 'WITHSCORES')
    if found[1] then next_expiry = math.min(next_expiry, tonumber(found[2])) end
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

-- A server whose memory is full lets nothing be written, unless the script has deleted something before. To give back or
-- to keep must always work, so these pretend to.
local may_exceed_memory = false

local function put_state(packed, ends)
  local put = redis.pcall('SET', KEYS[1], packed, 'PXAT', ends)
  if type(put) == 'table' and put.err then
    if not may_exceed_memory or not string.find(put.err, 'OOM', 1, true) then error(put.err, 0) end
    redis.call('HDEL', KEYS[2], '')
    redis.call('SET', KEYS[1], packed, 'PXAT', ends)
  end
end

local function store(raw)
  if queue_moved then tell_head() end
  local is_idle = h.leases == 0 and h.waiters == 0 and h.tombstones == 0
  if is_idle and h.remember_until <= now then
    if raw then redis.call('DEL', KEYS[1]) end
  else
    h.latest = math.max(h.latest, h.remember_until)
    local ends = string.format('%.0f', math.ceil(h.latest / 1000) + 1000)
    local packed = struct.pack(HEADER, h.capacity, h.in_use, h.last_token, h.next_place, h.head, h.leases, h.waiters,
      h.parked, h.tombstones, h.next_expiry, h.remember_until, h.latest)
    if first then packed = packed .. pack_lease(first) end
    if packed ~= raw then put_state(packed, ends) end
    for key in pairs(touched) do redis.call('PEXPIREAT', key, ends) end
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
