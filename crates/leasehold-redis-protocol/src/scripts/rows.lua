-- The storage of one resource's lease table: the counterpart of `model/rows.rs`. Every rule is in `model.lua`.
--
-- KEYS  1 the resource, in one of three forms:
--         no key      free
--         string      plain: one claimed lease without an owner, and nothing else. The key's expiry is the lease's end.
--         sorted set  rows whose scores are all 0: a table in the order of its members
--       2 the clock   a stream without entries, whose last id is the last token of the server
-- ARGV  none
-- Returns nothing: it defines the functions that model.lua and the commands use.
--
-- INBOX is the name of a client's inbox without the digest of its id; NUMSUB and PUBLISH are the commands for it. SCRATCH is the
-- key in which a new sorted set is built.
-- The names of channels are public, and ids are not.
--
-- A plain value is the argument of the `Acquire`, ` leasehold:3@`, and the stream id that is the token; after it, if they differ from
-- the token, and always on a quorum node, when the lease was granted and the last token that was reserved. Any other string is
-- another program's.
--
-- The first byte of a row says what it is:
--   h  the header, and the first lease       l  a further lease, by acquisition
--   e  its acquisition, by expiry            o  any lease's acquisition, by named owner and weight
--   w  a waiter, by acquisition              q  its acquisition, by client and place
--   d  its acquisition, by deadline          i  the acquisition of the first waiter of a client that is not parked, by place
--   t  a tombstone's end, by acquisition     p  a client that is parked, and has waiters
--   b  its acquisition, by end
--
-- The server does not undo a script that fails half-way, for example because the user lacks a right. So each step takes effect by
-- one command, and what follows only tidies up or tells others:
--   rows change    one ZADD of all new rows and a header with a lower serial, which sorts before the old header; later, one ZREM of
--                  the old header and rows. The new header lists those rows. Where there are two headers, the ZREM is missing: the
--                  first one is valid, and the next step does the ZREM before anything else.
--   the first rows a sorted set with an expiry is built in the scratch key, and replaces the key by RENAME
--   plain, free    SET, DEL
-- Until then a step only collects rows: those that it reads are the stored ones with these changes.
--
-- Times are microseconds of the server's clock, acquisitions are 24 bytes: client and sequence number, the higher bytes
-- first, so that they sort as the numbers do. So do the numbers in rows, as doubles that are never negative.

-- How much longer than they have to the rows stay, so that their expiry is seldom moved.
local SPARE = 3600000000

local CLAIM_WINDOW = 3000000
local REPOLL_JITTER = 1500000
local REPOLL_SPACING = 25000
local FIRST_WAITER_PLACE = 1099511627776
local MAX_LEAD = 100 -- milliseconds
local USUAL_ENTRY_TTL, USUAL_MAX_QUEUE = 80000000, 100000

local PLAIN = '^(.*) leasehold:3@(%d+)%-(%d+) ?(%d*) ?(%d*)$'
local ACQUIRE, EXTENT = '>c24BI8', '>I4I4I4'
-- A serial, 11 numbers, and the length of the first lease. Behind it come the lease and the list of replaced rows.
local HEADER = '>c1ddddddddddddI4'
local LEASE = '>c1c24ddddBBBI4c0I4c0'
local WAITER = '>c1c24ddddddBI4c0I4c0Bc0c8'
local BY_TIME, BY_CLIENT, BY_DEADLINE = '>c1dc24', '>c1c16dc8', '>c1ddc24'

-- More than can follow a prefix of a row's text: after at most 28 bytes comes a number's first byte, or the end.
local BEYOND = string.rep('\255', 32)

local function inbox_of(id)
  return INBOX .. redis.sha1hex(string.sub(id, 1, 16))
end

local function is_reachable(id)
  return redis.call('PUBSUB', NUMSUB, inbox_of(id))[2] > 0
end

-- Any user may publish the same. With the secret of a waiter the message proves that this script sends it, and does not tell the
-- secret.
local function publish(id, kind, a, b, c, secret)
  local numbers = struct.pack('>dddd', now, a, b, c)
  local proof = secret and string.sub(redis.sha1hex(secret .. numbers), 1, 16) or ''
  redis.call(PUBLISH, inbox_of(id), struct.pack('>Bc8', kind, string.sub(id, 17)) .. numbers .. proof)
end

local function first_row(prefix)
  return redis.call('ZRANGEBYLEX', KEYS[1], '[' .. prefix, '(' .. prefix .. BEYOND, 'LIMIT', '0', '1')[1]
end

local function count_rows(prefix)
  return redis.call('ZLEXCOUNT', KEYS[1], '[' .. prefix, '(' .. prefix .. BEYOND)
end

-- When a waiter looks again that is not the head: after the time that a head may need once the lease ends, in case that it is
-- gone too. With many clients that wait each looks the more seldom, and so does each of a client's many waiters.
local function follower_repoll_at(id, ends, clients, waiters_of_client)
  if ends - now > CLAIM_WINDOW then ends = ends + CLAIM_WINDOW end
  ends = ends + select(4, struct.unpack('>I4I4I4I4', id)) % REPOLL_JITTER
  return math.max(ends, now + REPOLL_SPACING * clients * waiters_of_client)
end

-- The acquisition, flags, ttl, capacity, weight and reserve of an `Acquire`, and where the rest of it begins.
local function unpack_request(text)
  local id, flags, ttl, at = struct.unpack(ACQUIRE, text)
  if flags < 8 then return id, flags, ttl, 1, 1, 0, at end
  return id, flags, ttl, struct.unpack(EXTENT, text, at)
end

-- The secret, the entry's ttl and the longest queue of an `Acquire` that waits.
local function unpack_wait(text)
  if #text > 8 then return struct.unpack('>c8I8I4', text) end
  return text, USUAL_ENTRY_TTL, USUAL_MAX_QUEUE
end
--@use shortcut

local function unpack_acquire(text)
  local a = { owner = '', has_owner = 0, replaces = '' }
  local flags, at
  a.id, flags, a.ttl, a.capacity, a.weight, a.reserve, at = unpack_request(text)
  if flags % 4 > 1 then
    a.has_owner = 1
    a.owner, at = struct.unpack('>I4c0', text, at)
  end
  if flags % 8 > 3 then a.replaces, at = struct.unpack('c8', text, at) end
  a.metadata = string.sub(text, at)
  return a
end

local function pack_lease(kind, l)
  return struct.pack(LEASE, kind, l.id, l.weight, l.token, l.granted_at, l.expires_at, l.claimed, l.retained, l.has_owner,
    #l.owner, l.owner, #l.metadata, l.metadata)
end

local function unpack_lease(text)
  local l, _ = {}, nil
  _, l.id, l.weight, l.token, l.granted_at, l.expires_at, l.claimed, l.retained, l.has_owner, l.owner,
    l.metadata = struct.unpack(LEASE, text)
  return l
end

-- The header, the text of the first lease, which is empty if there is none, and where the list of replaced rows begins.
local function unpack_header(row)
  local s, _, length, at = {}, nil, nil, nil
  _, s.serial, s.capacity, s.in_use, s.last_token, s.next_place, s.head, s.leases, s.waiters, s.parked, s.tombstones,
    s.next_expiry, s.stays, length, at = struct.unpack(HEADER, row)
  return s, string.sub(row, at, at + length - 1), at + length
end

local function pack_header(s, lease)
  return struct.pack(HEADER, 'h', s.serial, s.capacity, s.in_use, s.last_token, s.next_place, s.head, s.leases, s.waiters,
    s.parked, s.tombstones, s.next_expiry, s.stays, #lease) .. lease
end

-- Leaves nothing of a new sorted set that could not be finished: the user may lack a right.
local function done_or_undone(reply)
  if type(reply) ~= 'table' or not reply.err then return end
  redis.call('DEL', SCRATCH)
  error(reply.err, 0)
end

-- Lets the key be a sorted set of these rows, which are the arguments of ZADD, at once and with an expiry. `add` calls ZADD.
local function create_rows(add, scored, stays)
  -- Only if a step failed between these commands, and so did the DEL. Nothing is deleted in vain: once something was, full memory refuses nothing more.
  if redis.call('EXISTS', SCRATCH) == 1 then redis.call('DEL', SCRATCH) end
  add('ZADD', SCRATCH, unpack(scored))
  done_or_undone(redis.pcall('PEXPIREAT', SCRATCH, math.ceil(stays / 1000)))
  done_or_undone(redis.pcall('RENAME', SCRATCH, KEYS[1]))
end

-- The lease of a plain value without its expiry, and the last token; nothing if the value is another program's.
local function plain_lease()
  local request, ms, sequence, granted_at, last = string.match(raw, PLAIN)
  if not request or #request < struct.size(ACQUIRE) then return nil end
  local a, token = unpack_acquire(request), ms * TOKENS_PER_MS + sequence
  return { id = a.id, has_owner = 0, owner = '', weight = a.weight, token = token, granted_at = tonumber(granted_at) or ms * 1000,
    claimed = 1, retained = 0, metadata = a.metadata, capacity = a.capacity, ttl = a.ttl }, tonumber(last) or token
end

-- When a plain lease ends that has this many milliseconds left.
local function plain_end(left)
  return math.floor(now / 1000) * 1000 + left * 1000
end
--@use shared
--@layer

local h = {
  serial = NEVER, capacity = 0, in_use = 0, last_token = 0, next_place = 1, head = 0, leases = 0, waiters = 0, parked = 0,
  tombstones = 0, next_expiry = NEVER, stays = 0,
}
local first = nil -- the lease that is kept with the header
local header, told = nil, nil -- the header's row as it was, and what it says of the table
local has_rows, stayed = false, 0 -- the key is a sorted set, and the expiry that its header tells
local added, removed = {}, {} -- the changes: by bucket the rows to add, and as a set the stored rows to remove
local pending, grown = 0, {} -- how many changes, and how many rows more than the stored ones each bucket has
local known = {} -- by prefix the first stored row that is not removed, or false
local foreign = nil -- how many milliseconds another program's value stays, or -1 for ever
local is_unbounded = false -- the plain form has lost its expiry

-- A server whose memory is full lets nothing be written, unless the script has written something that takes no memory. To
-- release or to renew must always work.
local may_exceed_memory = false

local function write(...)
  local done = redis.pcall(...)
  if type(done) == 'table' and done.err then
    if not may_exceed_memory or not string.find(done.err, 'OOM') then error(done.err, 0) end
    redis.call('XTRIM', KEYS[2], 'MAXLEN', '0')
    done = redis.call(...)
  end
  return done
end

local function outlive(moment)
  if h.stays < moment + 1000000 then h.stays = moment + SPARE end
end

-- How long the first part of a row is by which it is looked up; a row of another kind is looked up by its first byte.
local WIDTHS = { l = 25, w = 25, t = 25, q = 17, p = 17 }

local function bucket_of(row)
  local kind = string.sub(row, 1, 1)
  if kind == 'o' then return string.sub(row, 1, 5 + struct.unpack('>I4', row, 2)) end
  return string.sub(row, 1, WIDTHS[kind] or 1)
end

local function grow(bucket, by)
  grown[bucket] = (grown[bucket] or 0) + by
  pending = pending + 1
end

local function add_row(row)
  local bucket = bucket_of(row)
  grow(bucket, 1)
  if removed[row] then
    removed[row] = nil
    known = {}
    return
  end
  added[bucket] = added[bucket] or {}
  added[bucket][row] = true
end

local function remove_row(row)
  local bucket = bucket_of(row)
  grow(bucket, -1)
  if added[bucket] and added[bucket][row] then
    added[bucket][row] = nil
  else
    removed[row] = true
  end
end

-- Whether one row sorts before another. The operator of Lua follows the server's locale.
local function precedes(a, b)
  for at = 1, math.min(#a, #b) do
    local x, y = string.byte(a, at), string.byte(b, at)
    if x ~= y then return x < y end
  end
  return #a < #b
end

local function first_stored_with(prefix)
  local row = known[prefix]
  if row == nil then row = has_rows and first_row(prefix) or false end
  while row and removed[row] do
    row = redis.call('ZRANGEBYLEX', KEYS[1], '(' .. row, '(' .. prefix .. BEYOND, 'LIMIT', '0', '1')[1] or false
  end
  known[prefix] = row
  return row
end

local function last_stored_with(prefix)
  local before = has_rows and '(' .. prefix .. BEYOND
  while before do
    local row = redis.call('ZREVRANGEBYLEX', KEYS[1], before, '[' .. prefix, 'LIMIT', '0', '1')[1]
    if not row or not removed[row] then return row end
    before = '(' .. row
  end
end

-- The first row with this prefix, which is a bucket.
local function first_row_with(prefix)
  local first = first_stored_with(prefix)
  for row in pairs(added[prefix] or {}) do
    if not first or precedes(row, first) then first = row end
  end
  return first or nil
end

local function last_row_with(prefix)
  local last = last_stored_with(prefix)
  for row in pairs(added[prefix] or {}) do
    if not last or precedes(last, row) then last = row end
  end
  return last
end

-- Those of a kind, in any order.
local function rows_of_kind(kind)
  local stored = has_rows and redis.call('ZRANGEBYLEX', KEYS[1], '[' .. kind, '(' .. kind .. BEYOND) or {}
  local rows = {}
  for i = 1, #stored do
    if not removed[stored[i]] then rows[#rows + 1] = stored[i] end
  end
  for bucket, more in pairs(added) do
    if string.sub(bucket, 1, 1) == kind then
      for row in pairs(more) do rows[#rows + 1] = row end
    end
  end
  return rows
end

-- How many rows a bucket has.
local function count_rows_with(prefix)
  return (has_rows and count_rows(prefix) or 0) + (grown[prefix] or 0)
end

-- What a lease or a waiter has in the table is remembered with it, so that it can be taken out when it has changed.
local function take_out(entry)
  for _, row in ipairs(entry.rows or {}) do remove_row(row) end
  entry.rows = nil
end

local function put_in(entry, rows)
  take_out(entry)
  entry.rows = rows
  for i = 1, #rows do add_row(rows[i]) end
end

--@layer
-- Here, because a function has at most 60 of the locals around it.
local MAX_PENDING = 1000
local BY_ID, BY_OWNER, PARKED = '>c1c24d', '>c1I4c0I4c24', '>c1c16'

local function client_of(id)
  return (struct.unpack('c16c8', id))
end

local function rows_of_lease(l)
  local rows = {}
  if l.is_further then
    rows[1] = pack_lease('l', l)
    rows[2] = struct.pack(BY_TIME, 'e', l.expires_at, l.id)
  end
  if l.has_owner == 1 then
    rows[#rows + 1] = struct.pack(BY_OWNER, 'o', #l.owner, l.owner, l.weight, l.id)
  end
  return rows
end

local function unpack_waiter(text)
  local w, _ = {}, nil
  _, w.id, w.place, w.weight, w.ttl, w.reserve, w.since, w.deadline, w.has_owner, w.owner, w.metadata,
    w.replaces, w.secret = struct.unpack(WAITER, text)
  return w
end

local function rows_of_waiter(w)
  local client, sequence = struct.unpack('c16c8', w.id)
  return {
    struct.pack(WAITER, 'w', w.id, w.place, w.weight, w.ttl, w.reserve, w.since, w.deadline, w.has_owner, #w.owner, w.owner,
      #w.metadata, w.metadata, #w.replaces, w.replaces, w.secret),
    struct.pack(BY_DEADLINE, 'd', w.deadline, w.place, w.id),
    struct.pack(BY_CLIENT, 'q', client, w.place, sequence),
  }
end

local function load_plain()
  local l, last = plain_lease()
  local left = redis.call('PTTL', KEYS[1])
  if not l then
    foreign = left
    return
  end
  l.expires_at = plain_end(left)
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

-- Each row tells by its first byte where it ends.
local FORMATS = { w = WAITER, l = LEASE, o = BY_OWNER, e = BY_TIME, i = BY_TIME, b = BY_TIME, t = BY_ID, d = BY_DEADLINE,
  q = BY_CLIENT, p = PARKED }

-- Removes what the last step replaced and did not remove, because it failed in between: the other header, and the rows that
-- the first one lists from there on.
local function repair(headers, at)
  local rows = { unpack(headers, 2) }
  while at <= #header do
    local values = { struct.unpack(FORMATS[string.sub(header, at, at)], header, at) }
    local behind = values[#values]
    rows[#rows + 1], at = string.sub(header, at, behind - 1), behind
  end
  redis.call('ZREM', KEYS[1], unpack(rows))
end

local function load()
  if raw then return load_plain() end
  local headers = redis.call('ZRANGEBYLEX', KEYS[1], '[h', '(i')
  header = headers[1]
  if not header or #header < struct.size(HEADER) then
    if redis.call('EXISTS', KEYS[1]) == 1 then error('WRONGTYPE the key has a sorted set of another program', 0) end
    return
  end
  has_rows = true
  local lease
  local at
  h, lease, at = unpack_header(header)
  stayed, told = h.stays, string.sub(header, 1, at - 1)
  if headers[2] then repair(headers, at) end
  if #lease > 0 then
    first = unpack_lease(lease)
    first.rows = rows_of_lease(first)
  end
end

-- Of the only lease, if that tells all.
local function pack_plain(l)
  if l.claimed == 0 or l.retained == 1 or l.has_owner == 1 then return nil end
  local more = ''
  if l.granted_at ~= math.floor(l.token / TOKENS_PER_MS) * 1000 or h.last_token ~= l.token then
    more = string.format(' %.0f %.0f', l.granted_at, h.last_token)
  end
  local ttl, extent = l.expires_at - math.min(l.granted_at, now), ''
  if h.capacity > 1 then extent = struct.pack(EXTENT, h.capacity, l.weight, 0) end
  return struct.pack(ACQUIRE, l.id, #extent > 0 and 8 or 0, ttl) .. extent .. l.metadata .. ' leasehold:3@' .. id_of(l.token) .. more
end

local function pack_table()
  return pack_header(h, first and pack_lease('l', first) or '')
end

-- The arguments of ZADD for the new header and rows, and those of ZREM for the old ones.
local function changes()
  h.serial = h.serial - 1
  local gone = {}
  for row in pairs(removed) do gone[#gone + 1] = row end
  told = pack_table()
  local replaced = table.concat(gone)
  gone[#gone + 1] = header
  header = told .. replaced
  local scored = { '0', header }
  for _, rows in pairs(added) do
    for row in pairs(rows) do
      scored[#scored + 1] = '0'
      scored[#scored + 1] = row
    end
  end
  return scored, gone
end

-- Makes the collected changes, calls `publish_all` as soon as they are made, and then removes the rows that are replaced.
local function store_rows(publish_all)
  if has_rows and h.stays ~= stayed then redis.call('PEXPIREAT', KEYS[1], math.ceil(h.stays / 1000)) end
  stayed = h.stays
  if has_rows and pending == 0 and pack_table() == told then return publish_all() end
  local scored, gone = changes()
  if not has_rows then
    create_rows(write, scored, h.stays)
    return publish_all()
  end
  write('ZADD', KEYS[1], unpack(scored))
  publish_all()
  redis.call('ZREM', KEYS[1], unpack(gone))
  added, removed, grown, known, pending = {}, {}, {}, {}, 0
end

-- A command has a limited number of arguments, so a step of very many changes takes effect in parts. It calls this where a part
-- may end: each is a step of its own.
local function store_part()
  if pending > MAX_PENDING and has_rows then store_rows(function() end) end
end

--@layer
local function lease(id)
  if first and first.id == id then return first end
  if h.leases > (first and 1 or 0) then
    local found = first_row_with('l' .. id)
    if found then
      local l = unpack_lease(found)
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
    if found then other = lease((select(3, struct.unpack(BY_TIME, found)))) end
  end
  if not first then return other end
  if not other or first.expires_at < other.expires_at then return first end
  if first.expires_at == other.expires_at and first.id < other.id then return first end
  return other
end

local function heaviest_lease_of(owner)
  local prefix = struct.pack('>c1I4c0', 'o', #owner, owner)
  local found = last_row_with(prefix)
  if found then return lease((select(4, struct.unpack(BY_OWNER, found)))) end
end

local function each_lease()
  local all = rows_of_kind('l')
  for i = 1, #all do all[i] = lease((select(2, struct.unpack('c1c24', all[i])))) end
  if first then all[#all + 1] = first end
  return all
end

local function is_parked(client)
  return h.parked > 0 and first_row_with('p' .. client) ~= nil
end

local function waiter(id)
  local found = first_row_with('w' .. id)
  if found then
    local w = unpack_waiter(found)
    w.rows = rows_of_waiter(w)
    w.parked = is_parked(client_of(id)) and 1 or 0
    return w
  end
end

-- The row by which a client's first waiter stands for it among the others; nothing if it has none.
local function ready_row_of(client)
  local found = first_row_with('q' .. client)
  if not found then return nil end
  local _, _, place, sequence = struct.unpack(BY_CLIENT, found)
  return struct.pack(BY_TIME, 'i', place, client .. sequence)
end

-- Changes which waiters a client has, and with that which one stands for it.
local function change_waiters(w, change)
  local client = client_of(w.id)
  local before = ready_row_of(client)
  change()
  local after = ready_row_of(client)
  if w.parked == 1 then
    if not after then remove_row('p' .. client) end
  elseif before ~= after then
    if before then remove_row(before) end
    if after then add_row(after) end
  end
end

local function put_waiter(w)
  outlive(w.deadline)
  change_waiters(w, function() put_in(w, rows_of_waiter(w)) end)
end

local function drop_waiter(w)
  change_waiters(w, function() take_out(w) end)
end

-- Says how many waiters that changes.
local function park(client, parked)
  local place = ready_row_of(client)
  if not place or is_parked(client) == (parked == 1) then return 0 end
  local add, remove = place, 'p' .. client
  if parked == 1 then add, remove = remove, place end
  remove_row(remove)
  add_row(add)
  return count_rows_with('q' .. client)
end

local function first_ready_waiter()
  local found = first_row_with('i')
  if found then return waiter((select(3, struct.unpack(BY_TIME, found)))) end
end

local function first_expiring_waiter()
  local found = first_row_with('d')
  if found then return waiter((select(4, struct.unpack(BY_DEADLINE, found)))) end
end

local function rows_of_tombstone(id, ends)
  return { struct.pack(BY_ID, 't', id, ends), struct.pack(BY_TIME, 'b', ends, id) }
end

local function put_tombstone(id, ends)
  outlive(ends)
  local tombstone = {}
  local old = first_row_with('t' .. id)
  if old then tombstone.rows = rows_of_tombstone(id, (select(3, struct.unpack(BY_ID, old)))) end
  put_in(tombstone, rows_of_tombstone(id, ends))
end

-- When the first tombstone ends. It is removed if that is at `now` or before.
local function end_tombstone()
  local found = first_row_with('b')
  if not found then return NEVER end
  local _, ends, id = struct.unpack(BY_TIME, found)
  if ends <= now then take_out({ rows = rows_of_tombstone(id, ends) }) end
  return ends
end
