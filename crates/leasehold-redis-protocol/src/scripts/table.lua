-- The storage of one resource's lease table. Every rule is in `model.lua`.
--
-- KEYS  1 the resource, whose type is its form:
--         no key  free
--         string  plain: one claimed lease without an owner, and nothing else. The key's expiry is the lease's end.
--         hash    a table of leases, waiters and tombstones
--       2 the clock   a stream without entries, whose last id is the last token of the server
-- ARGV  none
-- Returns nothing: it defines the functions that model.lua and the commands use.
--
-- Words in capitals that are not defined here stand for what a variant of the scripts has in their place (variant.rs): the server's time,
-- the commands of inboxes, the key in which a new hash is built, and the key of the tombstone of `attempt`.
-- The names of channels are public, and ids are not.
--
-- A plain value is the argument of the `Acquire`, ` leasehold:4@`, and the stream id that is the token; after it, if they differ from
-- the token, and always on a quorum node, when the lease was granted and the last token that was reserved. Any other string is
-- another program's.
--
-- The fields of a hash, of which an empty one is none:
--   h          the header, and the first lease
--   e          the places of the waiters that come before those in line
--   1, 2, …    a waiter in line, by its number; u1, u2, … an upgrade, which comes before all others
--   l1, l2, …  the further leases
--   i ID       where an acquisition is: the field of a waiter or of a further lease
--   o OWNER    weight and acquisition of each lease of a named owner
--   c CLIENT   how many waiters a client has
--   p CLIENT   the client is parked: a hyphen, and the places of its waiters that were passed over
--   t ID       when the tombstone of an acquisition ends
-- A lease is five numbers and the argument of its `Acquire`, a waiter two numbers, its secret, its inbox and that argument. Its CLIENT is
-- the one that speaks for the attempt: that of the acquisition, unless the `Acquire` names another one.
--
-- The server does not undo a script that fails half-way, for example because the user lacks a right. So each step takes effect by
-- one command, and what follows only tidies up or tells others:
--   the table changes  one HSET of all changed fields, in which removed ones are empty; later, one HDEL of these
--   a new table        a hash with an expiry is built in the scratch key, and replaces the key by RENAME
--   plain, free        SET, DEL
-- Until then a step only collects changes: what it reads is what is stored, with these changes.
--
-- Times are microseconds of the server's clock, acquisitions are 24 bytes: client and sequence number. Numbers are doubles that are
-- never negative.

-- How much longer than it has to a table stays, so that its expiry is seldom moved.
local SPARE = 3600000000

--@use constants
local MAX_LEAD = 100 -- milliseconds
local USUAL_ENTRY_TTL, USUAL_MAX_QUEUE = 80000000, 100000

local PLAIN = '^(.*) leasehold:4@(%d+)%-(%d+) ?(%d*) ?(%d*)$'
local ACQUIRE, EXTENT, WAIT = '>c24BI8', '>I4I4I4', '>c8c40I8I4'
-- Capacity, weight in use, last token, leases, tombstones, the next expiry of these two, until when the key stays, waiters before those
-- in line, parked clients; and of the queue the number of the next waiter, that of the first one in line, the place of the head,
-- all waiters, clients that are not parked, the next deadline, and the client of the head.
local HEADER, HEADER_SIZE = '<dddddddddddddddc16', 136
local NO_CLIENT = '----------------'
-- Token, when it was granted, when it ends, whether it is claimed, whether it is retained.
local LEASE, LEASE_SIZE = '<dddBB', 26
-- A header with a lease, and with the lease's acquisition and flags.
local TABLE, LAYOUT = '<dddddddddddddddc16dddBB', '<dddddddddddddddc16dddBBc24B'
-- Since when it waits, until when, the secret, and the digest in its inbox's name.
local WAITER, WAITER_SIZE = '<ddc8c40', 64

local call = redis.call
local header = nil -- as it is stored, or false; nil if it was not read
--@use shortcut

-- Leaves nothing of a new hash that could not be finished: the user may lack a right.
local function done_or_undone(reply)
  if type(reply) ~= 'table' or not reply.err then return end
  redis.call('DEL', SCRATCH)
  error(reply.err, 0)
end

-- Lets the key be a hash of these fields and values, at once and with an expiry. `write` runs what it is given: see below.
local function create_table(write, fields, stays)
  -- Only if a step failed between these commands, and so did the DEL. Nothing is deleted in vain: once something was, full memory refuses nothing more.
  if redis.call('EXISTS', SCRATCH) == 1 then redis.call('DEL', SCRATCH) end
  write(function() return redis.pcall('HSET', SCRATCH, unpack(fields)) end)
  done_or_undone(redis.pcall('PEXPIREAT', SCRATCH, math.ceil(stays / 1000)))
  done_or_undone(redis.pcall('RENAME', SCRATCH, KEYS[1]))
end
--@use shared
--@use tokens

-- The digest in the name of a client's inbox.
local function inbox_of(client)
  return redis.sha1hex(client)
end

local function is_reachable(inbox)
  return NUMSUB(inbox)[2] > 0
end

-- Any user may publish the same. With the secret of a waiter the message proves that this script sends it, and does not tell the
-- secret.
local function publish(push)
  local numbers = struct.pack('>dddd', now, push.a, push.b, push.c)
  local proof = push.secret and redis.sha1hex(push.secret .. numbers) or ''
  local message = struct.pack('>Bc8', push.kind, string.sub(push.id, 17)) .. numbers .. proof
  PUBLISH((push.inbox or inbox_of(push.client)), message)
end

-- When a waiter looks again that is not the head: after the time that a head may need once the lease ends, in case that it is
-- gone too. With many clients that wait each looks the more seldom, and so does each of a client's many waiters.
local function follower_repoll_at(client, ends, clients, waiters_of_client)
  if ends - now > CLAIM_WINDOW then ends = ends + CLAIM_WINDOW end
  ends = ends + struct.unpack('>I4', client, 13) % REPOLL_JITTER
  return math.max(ends, now + REPOLL_SPACING * clients * waiters_of_client)
end

-- The acquisition, flags, ttl, capacity, weight and reserve of an `Acquire`, and where the rest of it begins.
local function unpack_request(text)
  local id, flags, ttl, rest = struct.unpack(ACQUIRE, text)
  if flags % 16 < 8 then return id, flags, ttl, 1, 1, 0, rest end
  return id, flags, ttl, struct.unpack(EXTENT, text, rest)
end

-- The secret, the inbox, the entry's ttl and the longest queue of an `Acquire` that waits.
local function unpack_wait(text, client)
  if #text > 48 then return struct.unpack(WAIT, text) end
  local inbox = #text > 8 and string.sub(text, 9) or inbox_of(client)
  return string.sub(text, 1, 8), inbox, USUAL_ENTRY_TTL, USUAL_MAX_QUEUE
end

-- The fields of the hash: a failed attempt to read them is an error, as for a key of another type.
local function read(...)
  return redis.call('HMGET', KEYS[1], ...)
end
--@layer

-- An `Acquire` as a table, with its argument as `text`.
local function unpack_acquire(text)
  local a = { text = text, owner = '', has_owner = 0, replaces = '' }
  local flags, at
  a.id, flags, a.ttl, a.capacity, a.weight, a.reserve, at = unpack_request(text)
  a.names_client = flags > 15
  a.client = string.sub(a.id, 1, 16)
  if a.names_client then a.client, at = struct.unpack('c16', text, at) end
  if flags % 4 > 1 then
    a.has_owner = 1
    a.owner, at = struct.unpack('>I4c0', text, at)
  end
  if flags % 8 > 3 then a.replaces, at = struct.unpack('c8', text, at) end
  a.metadata = string.sub(text, at)
  return a
end

local h = {
  capacity = 0, in_use = 0, last_token = 0, leases = 0, tombstones = 0, next_expiry = NEVER, stays = 0, next_place = 1, first = 1,
  head = 0, waiters = 0, early = 0, parked = 0, clients = 0, next_deadline = NEVER, head_client = NO_CLIENT,
}
local first, further = nil, 0 -- the lease that is kept with the header, and how many others there are
-- The places of the waiters before those in line, in order, as they are stored, from the one of the number `first` on; and what has become of
-- the queue in this step: these places have changed, some of those who left had one of them, the head may be another one, and what has
-- expired was removed.
local queue = { early = '', first = 1, is_changed = false, has_gaps = false, has_moved = false, is_current = false }
local passed, touched = {}, {} -- by client, if it is parked, the places of its waiters that were passed over, else false; which changed
-- Whether the key is a hash, until when it stays, whether all of its fields are known, and how many are to change.
local key = { is_table = false, stays = 0, is_complete = false, changes = 0 }
local stored, changed = {}, {} -- what is known of the hash, and what is to change
local foreign = nil -- how many milliseconds another program's value stays, or -1 for ever
local is_unbounded = false -- the plain form has lost its expiry

-- A server whose memory is full lets nothing be written, unless the script has written something that takes no memory. To
-- release or to renew must always work.
local may_exceed_memory = false

local function write(run)
  local done = run()
  if type(done) == 'table' and done.err and may_exceed_memory and string.find(done.err, 'OOM') then
    redis.call('XTRIM', KEYS[2], 'MAXLEN', '0')
    done = run()
  end
  if type(done) == 'table' and done.err then error(done.err, 0) end
  return done
end

local function outlive(moment)
  if h.stays < moment + 1000000 then h.stays = moment + SPARE end
end

-- Reads fields that are needed together.
local function fetch(fields)
  if not key.is_table then return end
  local values = read(unpack(fields))
  for i = 1, #fields do stored[fields[i]] = values[i] or '' end
end

local function get(field)
  local value = changed[field] or stored[field]
  if not value and not key.is_complete then
    fetch({ field })
    value = stored[field]
  end
  if value and value ~= '' then return value end
end

local function set(field, value)
  if not changed[field] then key.changes = key.changes + 1 end
  changed[field] = value or ''
end

-- Reads all fields.
local function read_all()
  if key.is_table and not key.is_complete then
    key.is_complete = true
    local all, empty = redis.call('HGETALL', KEYS[1]), {}
    for i = 1, #all, 2 do
      if all[i + 1] == '' then empty[#empty + 1] = all[i] else stored[all[i]] = all[i + 1] end
    end
    -- The HDEL of a step has failed.
    for i = 1, #empty, 1000 do redis.call('HDEL', KEYS[1], unpack(empty, i, math.min(i + 999, #empty))) end
  end
end

-- All fields as they will be.
local function all_fields()
  read_all()
  local fields = {}
  for field, value in pairs(stored) do fields[field] = value end
  for field, value in pairs(changed) do fields[field] = value end
  return fields
end

local function unpack_places(text, at)
  local places = {}
  while at <= #text do places[#places + 1], at = struct.unpack('<d', text, at) end
  return places
end

local function pack_places(places)
  local packed = {}
  for i = 1, #places do packed[i] = struct.pack('<d', places[i]) end
  return table.concat(packed)
end

-- The first of the early places, if there is one.
local function early_place()
  local at = 8 * queue.first - 7
  if #queue.early > at then return (struct.unpack('<d', queue.early, at)) end
end

local function early_places()
  return unpack_places(queue.early, 8 * queue.first - 7)
end

local function set_early_places(places)
  queue.early, queue.first, queue.is_changed = pack_places(places), 1, true
end

-- A waiter's field, and the place that it stands for.
local function field_at(place)
  if place > FIRST_WAITER_PLACE then return string.format('%.0f', place - FIRST_WAITER_PLACE) end
  return 'u' .. place
end

local function place_of(field)
  return tonumber(field) and FIRST_WAITER_PLACE + field or tonumber(string.sub(field, 2))
end

-- These places without those whose waiters have left in this step.
local function still_there(places)
  local there = {}
  for i = 1, #places do
    local field = field_at(places[i])
    if (changed[field] or stored[field]) ~= '' then there[#there + 1] = places[i] end
  end
  return there
end

local function pack_lease(l)
  return struct.pack(LEASE, l.token, l.granted_at, l.expires_at, l.claimed, l.retained) .. l.text
end

local function unpack_lease(text, at)
  local l = unpack_acquire(string.sub(text, at + LEASE_SIZE))
  l.token, l.granted_at, l.expires_at, l.claimed, l.retained = struct.unpack(LEASE, text, at)
  return l
end

--@layer
-- The lease of a plain value without its expiry, and the last token; nothing if the value is another program's.
local function plain_lease()
  local request, ms, sequence, granted_at, last = string.match(raw, PLAIN)
  if not request or #request < struct.size(ACQUIRE) then return nil end
  local l, token = unpack_acquire(request), ms * TOKENS_PER_MS + sequence
  l.token, l.granted_at, l.claimed, l.retained = token, tonumber(granted_at) or ms * 1000, 1, 0
  return l, tonumber(last) or token
end

local function load_plain()
  local l, last = plain_lease()
  local left = redis.call('PTTL', KEYS[1])
  if not l then
    foreign = left
    return
  end
  l.expires_at = math.floor(now / 1000) * 1000 + left * 1000
  -- Another program took the key's expiry away. The last renewal is not known, so the lease gets its ttl from now on.
  if left < 0 then
    l.expires_at = now + l.ttl
    is_unbounded = true
  end
  if l.expires_at <= now then return end
  outlive(l.expires_at)
  h.capacity, h.in_use, h.last_token, h.leases, h.next_expiry = l.capacity, l.weight, last, 1, l.expires_at
  first = l
end

local function load()
  if raw then return load_plain() end
  if header == nil then header = read('h')[1] end
  if not header or #header < HEADER_SIZE then
    if redis.call('EXISTS', KEYS[1]) == 1 then error('WRONGTYPE the key has a hash of another program', 0) end
    return
  end
  key.is_table, stored.h = true, header
  h.capacity, h.in_use, h.last_token, h.leases, h.tombstones, h.next_expiry, h.stays, h.early, h.parked, h.next_place,
    h.first, h.head, h.waiters, h.clients, h.next_deadline, h.head_client = struct.unpack(HEADER, header)
  if #header > HEADER_SIZE then first = unpack_lease(header, HEADER_SIZE + 1) end
  further, key.stays = h.leases - (first and 1 or 0), h.stays
  if h.early > 0 then queue.early = get('e') end
end

-- Of the only lease, if that tells all.
local function pack_plain(l)
  if l.claimed == 0 or l.retained == 1 or l.has_owner == 1 then return nil end
  local more = ''
  if l.granted_at ~= math.floor(l.token / TOKENS_PER_MS) * 1000 or h.last_token ~= l.token then
    more = string.format(' %.0f %.0f', l.granted_at, h.last_token)
  end
  -- The ttl from the grant to the end.
  local ttl = struct.pack('>I8', l.expires_at - math.min(l.granted_at, now))
  return string.sub(l.text, 1, 25) .. ttl .. string.sub(l.text, 34) .. ' leasehold:4@' .. id_of(l.token) .. more
end

-- The header, and which waiters come before the line or were passed over, among the changes.
local function collect()
  if h.leases == 1 and h.tombstones == 0 and first then h.next_expiry = first.expires_at end
  if queue.has_gaps then
    set_early_places(still_there(early_places()))
    queue.has_gaps = false
  end
  if queue.is_changed then
    queue.early, queue.first, queue.is_changed = string.sub(queue.early, 8 * queue.first - 7), 1, false
    if h.early + #queue.early > 0 then set('e', queue.early) end
    h.early = #queue.early / 8
  end
  local header = struct.pack(HEADER, h.capacity, h.in_use, h.last_token, h.leases, h.tombstones, h.next_expiry, h.stays,
    h.early, h.parked, h.next_place, h.first, h.head, h.waiters, h.clients, h.next_deadline, h.head_client)
  set('h', header .. (first and pack_lease(first) or ''))
  for client in pairs(touched) do
    local places = passed[client]
    set('p' .. client, places and '-' .. pack_places(still_there(places)))
  end
  touched = {}
end

-- Makes the collected changes, calls `publish_all` as soon as they are made, and then removes the fields that are empty.
local function store_table(publish_all)
  collect()
  if key.is_table and h.stays ~= key.stays then redis.call('PEXPIREAT', KEYS[1], math.ceil(h.stays / 1000)) end
  key.stays = h.stays
  local fields, removed = {}, {}
  for field, value in pairs(changed) do
    if value ~= (stored[field] or not key.is_table and '') then
      fields[#fields + 1], fields[#fields + 2] = field, value
      if value == '' then removed[#removed + 1] = field end
      stored[field] = value
    end
  end
  changed, key.changes = {}, 0
  if not key.is_table then
    create_table(write, fields, h.stays)
    return publish_all()
  end
  if #fields > 0 then write(function() return redis.pcall('HSET', KEYS[1], unpack(fields)) end) end
  publish_all()
  if #removed > 0 then redis.call('HDEL', KEYS[1], unpack(removed)) end
end

-- A command has a limited number of arguments, so a step of very many changes takes effect in parts. It calls this where a part
-- may end: each is a step of its own.
local function store_part()
  if key.changes > 1000 and key.is_table then store_table(function() end) end
end

--@layer
-- The field of a further lease.
local function field_of_lease(id)
  local field = further > 0 and get('i' .. id)
  return field and string.byte(field) == 108 and field or nil -- an l
end

local function lease(id)
  if first and first.id == id then return first end
  local field = field_of_lease(id)
  if field then return unpack_lease(get(field), 1) end
end

-- The leases of an owner without one of them, as they are stored.
local function owned_without(owner, id)
  local owned, others = get('o' .. owner) or '', {}
  for at = 1, #owned, 28 do
    if string.sub(owned, at + 4, at + 27) ~= id then others[#others + 1] = string.sub(owned, at, at + 27) end
  end
  return table.concat(others)
end

local function put_lease(l)
  outlive(l.expires_at)
  local field = field_of_lease(l.id)
  if not field and (not first or first.id == l.id) then
    first = l
  else
    if not field then
      further = further + 1
      field = 'l' .. further
      set('i' .. l.id, field)
    end
    set(field, pack_lease(l))
  end
  if l.has_owner == 1 then
    set('o' .. l.owner, owned_without(l.owner, l.id) .. struct.pack('>I4c24', l.weight, l.id))
  end
end

-- The last of the further leases takes its field.
local function drop_lease(l)
  if first and first.id == l.id then
    first = nil
  else
    local field, last = field_of_lease(l.id), 'l' .. further
    if field ~= last then
      local moved = get(last)
      set(field, moved)
      set('i' .. string.sub(moved, LEASE_SIZE + 1, LEASE_SIZE + 24), field)
    end
    set(last, nil)
    set('i' .. l.id, nil)
    further = further - 1
  end
  if l.has_owner == 1 then set('o' .. l.owner, owned_without(l.owner, l.id)) end
end

local function each_lease()
  local all = {}
  for from = 1, further, 1000 do
    local fields = {}
    for number = from, math.min(from + 999, further) do
      local field = 'l' .. number
      if not changed[field] then fields[#fields + 1] = field end
    end
    if fields[1] then fetch(fields) end
  end
  for number = 1, further do all[number] = unpack_lease(get('l' .. number), 1) end
  all[#all + 1] = first
  return all
end

local function only_lease()
  if h.leases == 1 then return first or unpack_lease(get('l1'), 1) end
end

-- Whether one text sorts before another of its length. The operator of Lua follows the server's locale.
local function precedes(a, b)
  for at = 1, #a do
    local x, y = string.byte(a, at), string.byte(b, at)
    if x ~= y then return x < y end
  end
  return false
end

-- Of equally heavy ones the one with the greatest acquisition.
local function heaviest_lease_of(owner)
  local owned, heaviest = get('o' .. owner) or '', string.rep('\0', 28)
  for at = 1, #owned, 28 do
    local one = string.sub(owned, at, at + 27)
    if precedes(heaviest, one) then heaviest = one end
  end
  return owned ~= '' and lease(string.sub(heaviest, 5))
end

--@layer
local function waiter_in(field)
  local text = get(field)
  if not text then return nil end
  local w = unpack_acquire(string.sub(text, WAITER_SIZE + 1))
  w.since, w.deadline, w.secret, w.inbox = struct.unpack(WAITER, text)
  w.place = place_of(field)
  return w
end

local function waiter(id)
  local field = h.waiters > 0 and get('i' .. id)
  if field and string.byte(field) ~= 108 then return waiter_in(field) end
end

local function waiters_in(fields)
  local all = {}
  for field in pairs(fields) do
    if string.find(field, '^u?%d+$') then all[#all + 1] = waiter_in(field) end
  end
  table.sort(all, function(a, b) return a.place < b.place end)
  return all
end

-- Where a place is in a list in order, or would be.
local function index_of(places, place)
  local low, high = 1, #places + 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    if places[middle] < place then low = middle + 1 else high = middle end
  end
  return low
end

-- Notes that the client's list changes.
local function touch(client)
  if not touched[client] then
    touched[client] = true
    key.changes = key.changes + 1
  end
end

-- The places of a parked client's waiters that were passed over; nothing if it is not parked.
local function passed_of(client)
  if passed[client] == nil and h.parked > 0 then
    local text = get('p' .. client)
    passed[client] = text and unpack_places(text, 2) or false
  end
  return passed[client]
end

local function waiters_of(client)
  return h.waiters > 0 and tonumber(get('c' .. client) or '') or 0
end

-- One waiter more, or less. A client without waiters is not parked.
local function count_waiter(client, by)
  local before = waiters_of(client)
  local count = before + by
  set('c' .. client, count > 0 and string.format('%.0f', count))
  local is_parked = passed_of(client)
  if count == 0 and is_parked then
    touch(client)
    passed[client] = false
    h.parked = h.parked - 1
  elseif not is_parked and before * count == 0 then
    h.clients = h.clients + by
  end
  h.waiters = h.waiters + by
end

local function put_waiter(w)
  outlive(w.deadline)
  h.next_deadline = math.min(h.next_deadline, w.deadline)
  local field = field_at(w.place)
  if w.place < FIRST_WAITER_PLACE and not get(field) then
    local places = early_places()
    table.insert(places, index_of(places, w.place), w.place)
    set_early_places(places)
  end
  if not get('i' .. w.id) then count_waiter(w.client, 1) end
  set(field, struct.pack(WAITER, w.since, w.deadline, w.secret, w.inbox) .. w.text)
  set('i' .. w.id, field)
end

local function drop_waiter(w)
  if passed_of(w.client) then touch(w.client) end
  if w.place == early_place() then
    queue.first, queue.is_changed = queue.first + 1, true
  else
    queue.has_gaps = queue.has_gaps or w.place < FIRST_WAITER_PLACE + h.first
  end
  set(field_at(w.place), nil)
  set('i' .. w.id, nil)
  count_waiter(w.client, -1)
end

-- This client speaks for the lease or the waiter from now on.
local function change_client(moved, client, metadata)
  local _, flags, _, _, _, _, at = unpack_request(moved.text)
  local head = string.sub(moved.text, 1, 24) .. string.char(flags % 16 + 16) .. string.sub(moved.text, 26, at - 1)
  if flags > 15 then at = at + 16 end
  moved.text = head .. client .. string.sub(moved.text, at, #moved.text - #moved.metadata) .. metadata
  moved.client, moved.metadata = client, metadata
end

-- As `change_client`, for a waiter and the `Acquire` of that client. Says whether its client was parked. The new one is not.
local function put_moved_waiter(w, a)
  local places = passed_of(w.client)
  if places then
    touch(w.client)
    local at = index_of(places, w.place)
    if places[at] == w.place then
      table.remove(places, at)
      local early = early_places()
      table.insert(early, index_of(early, w.place), w.place)
      set_early_places(early)
    end
  end
  count_waiter(w.client, -1)
  change_client(w, a.client, a.metadata)
  count_waiter(w.client, 1)
  set(field_at(w.place), struct.pack(WAITER, w.since, w.deadline, w.secret, w.inbox) .. w.text)
  return places and true
end

-- Says whether that changes anything.
local function park(client, parked)
  local places = passed_of(client)
  if (places and 1 or 0) == parked or waiters_of(client) == 0 then return false end
  touch(client)
  if parked == 1 then
    passed[client] = {}
    h.parked, h.clients = h.parked + 1, h.clients - 1
  else
    if places[1] then
      local both = early_places()
      for i = 1, #places do both[#both + 1] = places[i] end
      table.sort(both)
      set_early_places(both)
    end
    passed[client] = false
    h.parked, h.clients = h.parked - 1, h.clients + 1
  end
  return true
end

-- Moves the line's beginning to the first waiter in it, if there is one. Many places are read together, and all fields instead of very
-- many places that are empty.
local read_to, width = 0, 1
local function first_in_line()
  while h.first < h.next_place do
    if h.first <= read_to or key.is_complete then
      if get(string.format('%.0f', h.first)) then return FIRST_WAITER_PLACE + h.first end
      h.first = h.first + 1
    elseif width > 64 and h.next_place - h.first > 8 * h.waiters then
      read_all()
    else
      local fields = {}
      for number = h.first, math.min(h.first + width, h.next_place) - 1 do fields[#fields + 1] = string.format('%.0f', number) end
      fetch(fields)
      read_to, width = h.first + width - 1, math.min(2 * width, 1000)
    end
  end
end

-- The first waiter whose client is not parked. Those before it are passed over, and removed if their deadline has passed.
local function first_ready_waiter()
  while h.waiters > 0 do
    local is_early = early_place()
    local place = is_early or first_in_line()
    if not place then return nil end
    local w = waiter_in(field_at(place))
    local places = w and passed_of(w.client)
    if w and not places and (w.deadline > now or not queue.is_current) then return w end
    store_part()
    if is_early then queue.first, queue.is_changed = queue.first + 1, true else h.first = h.first + 1 end
    if places then
      touch(w.client)
      table.insert(places, index_of(places, place), place)
    elseif w then
      drop_waiter(w)
      queue.has_moved = true
    end
  end
end

-- The waiters whose deadline has passed, and when that of the next one will have.
local function expired_waiters()
  read_all()
  local expired, next_deadline = {}, NEVER
  for field, value in pairs(stored) do
    local first = string.byte(field)
    if value ~= '' and changed[field] ~= '' and (first < 58 or first == 117 and #field < 17) and string.find(field, '^u?%d+$') then -- a digit, or a u
      local deadline = struct.unpack('<d', value, 9)
      if deadline > now then
        next_deadline = math.min(next_deadline, deadline)
      else
        expired[#expired + 1] = field
      end
    end
  end
  return expired, next_deadline
end

local function tombstone(id)
  local ends = h.tombstones > 0 and get('t' .. id)
  return ends and tonumber(ends) > now
end

local function put_tombstone(id, ends)
  outlive(ends)
  if not get('t' .. id) then h.tombstones = h.tombstones + 1 end
  set('t' .. id, string.format('%.0f', ends))
end

-- Removes the tombstones that have ended, and says when to look again: of more than 100 after a second for each thousand, since all of them are read.
local function end_tombstones()
  if h.tombstones == 0 then return NEVER end
  local next_end = NEVER
  for field, value in pairs(all_fields()) do
    if string.byte(field) == 116 and value ~= '' then -- a t
      local ends = tonumber(value)
      if ends > now then
        next_end = math.min(next_end, ends)
      else
        store_part()
        set(field, nil)
        h.tombstones = h.tombstones - 1
      end
    end
  end
  return h.tombstones > 100 and math.max(next_end, now + 1000000 + 1000 * h.tombstones) or next_end
end
