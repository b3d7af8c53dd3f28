-- Before the rules in acquire.lua: a new attempt joins the holders of a shared lock. Does what the rules would do, at a fraction of
-- their price, which is mostly that of their definitions.
--
-- KEYS, ARGV and replies are those of acquire.lua; without a reply the rules follow. Nothing has expired, there is no waiter and no
-- tombstone, and memory is not full, since an id was drawn. `found` is what enqueue.lua has read.

repeat
  if plain_ttl == '' or plain_ttl == '-' or string.byte(ARGV[1], 25) ~= 8 then break end
  local ttl, capacity, weight = struct.unpack('>I8I4I4', ARGV[1], 26)
  if not drawn and header then
    local id = redis.pcall('XADD', KEYS[2], 'MAXLEN', '0', '*', 't', '')
    if not id.err then drawn = id end
  end
  if not drawn then break end
  local ms, sequence = string.match(drawn, '(%d+)%-(%d+)')
  local token, ends = ms * TOKENS_PER_MS + sequence, now + ttl
  if tonumber(sequence) >= TOKENS_PER_MS or token > NEVER then break end
  local lease = struct.pack(LEASE, token, now, ends, 1, 0) .. ARGV[1]
  local changed, first, more, stays
  if raw then
    local request, first_ms, first_sequence, granted_at, last = string.match(raw, PLAIN)
    if not request or #request < 45 or string.byte(request, 25) % 16 < 8 then break end
    local of_lock, in_use = struct.unpack('>I4I4', request, 34)
    local first_token = first_ms * TOKENS_PER_MS + first_sequence
    local left = of_lock == capacity and weight <= capacity - in_use and call('PTTL', KEYS[1]) or 0
    if left <= 0 or string.sub(request, 1, 24) == id or token <= (tonumber(last) or first_token) then break end
    local first_ends = math.floor(now / 1000) * 1000 + left * 1000
    first = struct.pack(LEASE, first_token, tonumber(granted_at) or first_ms * 1000, first_ends, 1, 0) .. request
    stays, more = math.max(first_ends, ends) + SPARE, 'l1'
    changed = struct.pack(HEADER, capacity, in_use + weight, token, 2, 0, math.min(first_ends, ends), stays, 0, 0, 1, 1, 0, 0, 0, NEVER, NO_CLIENT)
  else
    if not header or #header < HEADER_SIZE or own ~= '' then break end
    local of_lock, in_use, last, leases, tombstones, next_expiry, until_when, _, _, _, _, _, waiters = struct.unpack(HEADER, header)
    first = string.sub(header, HEADER_SIZE + 1)
    if of_lock ~= capacity or weight > capacity - in_use or leases == 0 or waiters + tombstones > 0 or next_expiry <= now
      or until_when <= ends + 1000000 or token <= last or string.sub(first, LEASE_SIZE + 1, LEASE_SIZE + 24) == id then break end
    changed = struct.pack('<dddddd', capacity, in_use + weight, token, leases + 1, 0, math.min(next_expiry, ends))
      .. string.sub(header, 49, HEADER_SIZE)
    more = 'l' .. leases
  end
  drawn = nil
  if raw then
    create_table(function(run) done_or_undone(run()) end, { 'h', changed .. first, more, lease, own_field, more }, stays)
  elseif first == '' then
    call('HSET', KEYS[1], 'h', changed .. lease)
  else
    call('HSET', KEYS[1], 'h', changed .. first, more, lease, own_field, more)
  end
  return { now, 1, token, token, ttl }
until true
