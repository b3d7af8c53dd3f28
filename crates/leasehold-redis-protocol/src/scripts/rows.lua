-- Looks up and changes the rows of table.lua: the counterpart of `model/rows.rs`.
--
-- KEYS  1 the resource, 2 the clock: see table.lua
-- ARGV  none
-- Returns nothing: it defines the functions that model.lua and the commands use.

local first = plain or first_at and unpack_lease(row, first_at) -- the lease that is kept with the header
local stayed = row and stays or 0

local function note_expiry(expiry)
  next_expiry = math.min(next_expiry, expiry)
  if stays < expiry + MARGIN then stays = expiry + SPARE end
end

local function change(is_added, ...)
  for _, text in ipairs({ ... }) do changes[text] = is_added end
end

local function rows_with(prefix)
  flush()
  return has_rows and redis.call('ZRANGEBYLEX', KEYS[1], '[' .. prefix, '(' .. prefix .. BEYOND) or {}
end

local function store_rows()
  local text = pack_header(first and pack_lease(first) or '')
  if text ~= row then
    change(true, text)
    if row then change(false, row) end
  end
  flush()
  if stays ~= stayed then redis.call('PEXPIREAT', KEYS[1], math.ceil(stays / 1000)) end
end

-- Of the only lease, if that tells all.
local function pack_plain(l)
  if l.claimed == 0 or l.retained == 1 or l.has_owner == 1 then return nil end
  local more = ''
  if l.granted_at ~= math.floor(l.token / TOKENS_PER_MS) * 1000 or last_token ~= l.token then
    more = string.format(' %.0f %.0f', l.granted_at, last_token)
  end
  return struct.pack(ACQUIRE, l.id, 0, capacity, l.weight, l.expires_at - math.min(l.granted_at, now), 0) .. l.metadata
    .. ' leasehold:3@' .. id_of(l.token) .. more
end

local function lease(id)
  if first and first.id == id then return first end
  local found = leases > (first and 1 or 0) and first_row('l' .. id)
  return found and unpack_lease(found)
end

local function rows_of_lease(l)
  local by_owner = l.has_owner == 1 and struct.pack(BY_OWNER, 'o', #l.owner, l.owner, l.weight, l.id) or nil
  if l == first then return by_owner end
  return pack_lease(l), struct.pack(BY_TIME, 'e', l.expires_at, l.id), by_owner
end

local function put_lease(l)
  note_expiry(l.expires_at)
  first = first or l
  is_changed = true
  change(true, rows_of_lease(l))
end

-- A lease as it was found: it is changed after this.
local function drop_lease(l)
  change(false, rows_of_lease(l))
  if l == first then first = nil end
end

local function first_expiring_lease()
  local found = leases > (first and 1 or 0) and first_row('e')
  local other = found and lease((select(3, struct.unpack(BY_TIME, found))))
  if first and other and other.expires_at < first.expires_at then return other end
  return first or other
end

local function heaviest_lease_of(owner)
  flush()
  local prefix = struct.pack('>c1I4c0', 'o', #owner, owner)
  local found = has_rows and redis.call('ZREVRANGEBYLEX', KEYS[1], '(' .. prefix .. BEYOND, '[' .. prefix, 'LIMIT', '0', '1')[1]
  return found and lease((select(4, struct.unpack(BY_OWNER, found))))
end

local function each_lease()
  local all = rows_with('l')
  for i = 1, #all do all[i] = unpack_lease(all[i]) end
  if first then all[#all + 1] = first end
  return all
end

local function waiter(id)
  local found = first_row('w' .. id)
  if not found then return nil end
  local w = unpack_waiter(found)
  w.is_parked = parked > 0 and first_row('p' .. client_of(id))
  return w
end

local function first_ready_waiter()
  local found = first_row('r')
  return found and waiter((select(3, struct.unpack(BY_TIME, found))))
end

local function first_expiring_waiter()
  local found = first_row('d')
  return found and waiter((select(4, struct.unpack(BY_DEADLINE, found))))
end

-- The row by which a client's first waiter stands for it among the others; nothing if it has none.
local function ready_row_of(client)
  local found = first_row('q' .. client)
  if not found then return nil end
  local _, _, place, sequence = struct.unpack(BY_CLIENT, found)
  return struct.pack(BY_TIME, 'r', place, client .. sequence)
end

-- Adds or removes a waiter, and with that changes which one stands for its client.
local function change_waiter(is_added, w)
  local client = client_of(w.id)
  local before = ready_row_of(client)
  change(is_added, rows_of_waiter(w))
  local after = ready_row_of(client)
  if w.is_parked then
    if not after then change(false, 'p' .. client) end
  elseif before ~= after then
    if before then change(false, before) end
    if after then change(true, after) end
  end
end

local function rows_of_tombstone(id, ends)
  return struct.pack(BY_ID, 't', id, ends), struct.pack(BY_TIME, 'b', ends, id)
end

-- The acquisition and the end of the first tombstone that ends.
local function first_tombstone()
  local found = first_row('b')
  if not found then return nil end
  local _, ends, id = struct.unpack(BY_TIME, found)
  return id, ends
end
