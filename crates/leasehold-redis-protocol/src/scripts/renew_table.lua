-- Before the rules in renew.lua: a lease of a contended or shared lock is extended. Does what the rules would do, at a fraction of
-- their price, which is mostly that of their definitions.
--
-- KEYS, ARGV and replies are those of renew.lua; without a reply the rules follow. Nothing has expired, no client is parked, nothing
-- that waits fits, and the lease does not become plain. Should memory be full, the rules know what to do.

repeat
  if raw or floor > 0 or reserve > 0 or ttl == 0 then break end
  local found = call('HMGET', KEYS[1], 'h', 'i' .. id)
  local field = found[2] or ''
  header = found[1]
  if not header or #header < HEADER_SIZE then break end
  local capacity, in_use, _, leases, tombstones, next_expiry, stays, _, parked, _, _, _, waiters, _, next_deadline =
    struct.unpack(HEADER, header)
  local ends = now + ttl
  if parked > 0 or next_expiry <= now or next_deadline <= now or stays <= ends + 1000000 or waiters > 0 and in_use < capacity
    or waiters + tombstones == 0 and leases == 1 then break end
  local first = string.sub(header, HEADER_SIZE + 1)
  local lease, is_first = first, string.sub(first, LEASE_SIZE + 1, LEASE_SIZE + 24) == id
  if not is_first then
    if string.byte(field) ~= 108 then break end -- an l
    lease = call('HMGET', KEYS[1], field)[1]
  end
  local token, granted_at, _, _, retained = struct.unpack(LEASE, lease)
  if retained > 0 or mark and string.format('%.0f-%.0f', math.floor(token / TOKENS_PER_MS), token % TOKENS_PER_MS) ~= string.match(mark, '%d+%-%d+') then break end
  lease = struct.pack(LEASE, token, math.min(granted_at, now), ends, 1, 0) .. string.sub(lease, LEASE_SIZE + 1)
  next_expiry = leases + tombstones == 1 and ends or math.min(next_expiry, ends)
  local changed = string.sub(header, 1, 40) .. struct.pack('<d', next_expiry) .. string.sub(header, 49, HEADER_SIZE)
  local set
  if is_first then
    set = redis.pcall('HSET', KEYS[1], 'h', changed .. lease)
  else
    set = redis.pcall('HSET', KEYS[1], 'h', changed .. first, field, lease)
  end
  if type(set) ~= 'number' then break end
  return { now, 7, ttl, waiters > 0 and 1 or 0, 0, 0 }
until true
