-- Loads one resource's lease table, and has its clock of tokens.
--
-- KEYS  1 the resource, in one of three forms:
--         no key      free
--         string      plain: one claimed lease without an owner, and nothing else. The key's expiry is the lease's end.
--         sorted set  rows whose scores are all 0: a table in the order of its members
--       2 the clock   a stream without entries, whose last id is the last token of the server
-- ARGV  none
-- Returns nothing: it sets the locals that the shortcuts and the rules use.
--
-- INBOX is the name of a client's inbox without its id in hex; NUMSUB and PUBLISH are the commands for it.
--
-- A plain value is the argument of the `Acquire`, ` leasehold:3@`, and the stream id that is the token; after it, where they
-- differ from the token, when the lease was granted and the last token that was reserved. Any other string is another program's.
--
-- The first byte of a row says what it is:
--   h  the header, and the first lease       l  a further lease, by acquisition
--   e  its acquisition, by expiry            o  any lease's acquisition, by named owner and weight
--   w  a waiter, by acquisition              q  its acquisition, by client and place
--   d  its acquisition, by deadline          r  the acquisition of the first waiter of a client that is not parked, by place
--   t  a tombstone's end, by acquisition     p  a client that is parked, and has waiters
--   b  its acquisition, by end
--
-- Times are microseconds of the server's clock, acquisitions are 24 bytes: client and sequence number, the higher bytes
-- first, so that they sort as the numbers do. So do the numbers in rows, as doubles that are never negative.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

-- How much longer than they have to the rows stay, so that their expiry is seldom moved.
local SPARE, MARGIN = 3600000000, 1000000
local NEVER = 9007199254740991
local TOKENS_PER_MS = 2048
local CLAIM_WINDOW, REPOLL_JITTER, REPOLL_SPACING = 3000000, 1500000, 25000
local FIRST_WAITER_PLACE = 1099511627776
local MAX_LEAD = 100 -- milliseconds

local PLAIN = '^(.*) leasehold:3@(%d+)%-(%d+) ?(%d*) ?(%d*)$'
local ACQUIRE = '>c24BI4I4I8I4'
local HEADER = '>c1ddddddddddd'
local LEASE = '>c1c24ddddBBBI4c0I4c0'
local WAITER = '>c1c24ddddddBI4c0I4c0Bc0'
local BY_TIME, BY_DEADLINE, BY_ID = '>c1dc24', '>c1ddc24', '>c1c24d'
local BY_CLIENT, BY_OWNER = '>c1c16dc8', '>c1I4c0I4c24'

-- More than can follow a prefix of a row's text: after at most 28 bytes comes a number's first byte, or the end.
local BEYOND = string.rep('\255', 32)

local capacity, in_use, last_token, next_place, head, leases, waiters = 0, 0, 0, 1, 0, 0, 0
local parked, tombstones, next_expiry, stays = 0, 0, NEVER, 0
local row = nil -- the header's, as it was
local first_at, first_id = nil, nil -- where in it the first lease is, and its acquisition
local plain = nil -- the plain lease
local is_changed = false -- the plain form tells something else
local foreign = nil -- how many milliseconds another program's value stays, or -1 for ever
local changes = {} -- rows that are not written yet: true for one to add, false for one to remove
local has_rows = false
local clock_error = nil -- why the clock gave no token: nothing more is granted in this step, and everything else is stored

local function client_of(id)
  return (struct.unpack('c16', id))
end

local function inbox_of(id)
  return INBOX .. string.format('%08x%08x%08x%08x', struct.unpack('>I4I4I4I4', id))
end

local function is_reachable(id)
  return redis.call('PUBSUB', NUMSUB, inbox_of(id))[2] > 0
end

local function publish(id, kind, a, b, c)
  redis.call(PUBLISH, inbox_of(id), struct.pack('>Bc24dddd', kind, id, now, a, b, c))
end

-- The stream id that is this token.
local function id_of(token)
  return string.format('%.0f-%.0f', math.floor(token / TOKENS_PER_MS), token % TOKENS_PER_MS)
end

-- The token that an id of the clock stands for, and whether it does: a clock that stands still, or was set back, gives more ids in
-- one millisecond than there are tokens.
local function token_of(id)
  local ms, sequence = string.match(id, '(%d+)%-(%d+)')
  return ms * TOKENS_PER_MS + sequence, tonumber(sequence) < TOKENS_PER_MS
end

-- The clock's next id, which follows the server's time and never falls, or this later one; nothing if the clock refuses, for
-- example because memory is full.
local function draw(id)
  local reply = redis.pcall('XADD', KEYS[2], 'MAXLEN', '0', id, 't', '')
  if not reply.err then return reply end
  clock_error = reply.err
end

-- Takes the next token, but none below `floor`, and those up to `reserve` behind it; moves the clock behind the last. Returns
-- nothing if the clock gives none. It is called before anything is changed that depends on the token.
local function next_tokens(reserve)
  local id = drawn or draw('*')
  drawn = nil
  if not id then return nil end
  local next_one, is_token = token_of(id)
  local token = math.max(next_one, last_token + 1, floor)
  local last = token
  -- All locks share the clock, so it does not run far ahead for tokens that may never be used.
  if token <= (now / 1000 + MAX_LEAD) * TOKENS_PER_MS then last = token + reserve end
  if last > NEVER then
    clock_error = 'CLOCKAHEAD ' .. KEYS[2] .. ' is too far ahead for tokens below 2^53'
    return nil
  end
  if (last > next_one or not is_token) and not draw(id_of(last)) then return nil end
  last_token = last
  return token, last
end

-- To release and to renew must always work: once something was written that takes no memory, a full memory refuses nothing.
local function exceed_memory()
  redis.pcall('XTRIM', KEYS[2], 'MAXLEN', '0')
end

local function pack_lease(l)
  return struct.pack(LEASE, 'l', l.id, l.weight, l.token, l.granted_at, l.expires_at, l.claimed, l.retained, l.has_owner,
    #l.owner, l.owner, #l.metadata, l.metadata)
end

local function unpack_lease(text, from)
  local l, _ = {}, nil
  _, l.id, l.weight, l.token, l.granted_at, l.expires_at, l.claimed, l.retained, l.has_owner, l.owner,
    l.metadata = struct.unpack(LEASE, text, from or 1)
  return l
end

local function unpack_waiter(text)
  local w, _ = {}, nil
  _, w.id, w.place, w.weight, w.ttl, w.reserve, w.since, w.deadline, w.has_owner, w.owner, w.metadata,
    w.replaces = struct.unpack(WAITER, text)
  return w
end

local function rows_of_waiter(w)
  local client, sequence = struct.unpack('c16c8', w.id)
  return struct.pack(WAITER, 'w', w.id, w.place, w.weight, w.ttl, w.reserve, w.since, w.deadline, w.has_owner, #w.owner, w.owner,
      #w.metadata, w.metadata, #w.replaces, w.replaces),
    struct.pack(BY_DEADLINE, 'd', w.deadline, w.place, w.id),
    struct.pack(BY_CLIENT, 'q', client, w.place, sequence)
end

-- The header, and the text of the first lease if there is one.
local function pack_header(first)
  return struct.pack(HEADER, 'h', capacity, in_use, last_token, next_place, head, leases, waiters, parked, tombstones,
    next_expiry, stays) .. first
end

-- The arguments of an `Acquire`, with what else a waiter and a claimed lease have.
local function unpack_acquire(text)
  local a, flags, at = { owner = '', has_owner = 0, replaces = '', claimed = 1, retained = 0 }, nil, nil
  a.id, flags, a.capacity, a.weight, a.ttl, a.reserve, at = struct.unpack(ACQUIRE, text)
  if flags % 2 == 1 then a.entry_ttl, a.max_queue, at = struct.unpack('>I8I4', text, at) end
  if flags % 4 > 1 then
    a.has_owner = 1
    a.owner, at = struct.unpack('>I4c0', text, at)
  end
  if flags > 3 then a.replaces, at = struct.unpack('c8', text, at) end
  a.metadata = string.sub(text, at)
  return a
end

-- Writes the changes of rows. The additions are first, because an empty sorted set is deleted, and its expiry with it.
local function flush()
  if not next(changes) then return end
  local added, removed = {}, {}
  for text, is_added in pairs(changes) do
    if is_added then
      added[#added + 1] = '0'
      added[#added + 1] = text
    else
      removed[#removed + 1] = text
    end
  end
  changes = {}
  if #added > 0 then
    -- A plain lease is in memory already, so its key can go before the first row comes. Once something was deleted, a full memory
    -- would refuse nothing any more.
    if raw and not has_rows then
      redis.call('APPEND', KEYS[1], '')
      redis.call('DEL', KEYS[1])
    end
    has_rows = true
    redis.call('ZADD', KEYS[1], unpack(added))
  end
  if #removed > 0 and has_rows then redis.call('ZREM', KEYS[1], unpack(removed)) end
end

local function first_row(prefix)
  flush()
  return has_rows and redis.call('ZRANGEBYLEX', KEYS[1], '[' .. prefix, '(' .. prefix .. BEYOND, 'LIMIT', '0', '1')[1]
end

local function count_rows(prefix)
  flush()
  return has_rows and redis.call('ZLEXCOUNT', KEYS[1], '[' .. prefix, '(' .. prefix .. BEYOND) or 0
end

if raw then
  local request, ms, sequence, granted_at, last = string.match(raw, PLAIN)
  local left = redis.call('PTTL', KEYS[1])
  if request and #request >= struct.size(ACQUIRE) then
    plain = unpack_acquire(request)
    plain.token, plain.expires_at = ms * TOKENS_PER_MS + sequence, math.floor(now / 1000) * 1000 + left * 1000
    plain.granted_at = tonumber(granted_at) or ms * 1000
    -- Another program took the key's expiry away. The last renewal is not known, so the lease gets its ttl from now on.
    if left < 0 then plain.expires_at, is_changed = now + plain.ttl, true end
    if plain.expires_at > now then
      capacity, in_use, last_token, leases = plain.capacity, plain.weight, tonumber(last) or plain.token, 1
      next_expiry, stays, first_id = plain.expires_at, plain.expires_at + SPARE, plain.id
    else
      plain = nil
    end
  else
    foreign = left
  end
else
  row = redis.call('ZRANGEBYLEX', KEYS[1], '[h', '(i', 'LIMIT', '0', '1')[1]
  if row and #row >= struct.size(HEADER) then
    local _, at = nil, nil
    _, capacity, in_use, last_token, next_place, head, leases, waiters, parked, tombstones, next_expiry, stays,
      at = struct.unpack(HEADER, row)
    has_rows = true
    if at <= #row then
      first_at = at
      _, first_id = struct.unpack('c1c24', row, at)
    end
  elseif redis.call('EXISTS', KEYS[1]) == 1 then
    error('WRONGTYPE ' .. KEYS[1] .. ' is a sorted set of another program', 0)
  else
    row = nil
  end
end
