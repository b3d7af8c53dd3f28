-- The usual case of `release.lua`, before the rules are even read: it is held by nobody else, nobody waits, and the lease
-- need not be kept. It does and returns what the rules would.

if raw and #raw > 96 and ARGV[4] == '0' and string.sub(raw, 97, 120) == ARGV[2] then
  local capacity, _, last_token, next_place, head, leases, waiters, parked, tombstones, next_expiry, remember_until, latest,
    _, _, _, granted_at, expires_at, _, kept, has_owner = struct.unpack('>ddddddddddddc24ddddBBB', raw)
  if leases == 1 and waiters == 0 and tombstones == 0 and kept == 0 and has_owner == 0 and expires_at > now
    and granted_at + tonumber(ARGV[3]) <= now and remember_until > now then
    local put = redis.pcall('SET', KEYS[1], struct.pack('>dddddddddddd', capacity, 0, last_token, next_place, head, 0, 0,
      parked, 0, next_expiry, remember_until, latest), 'PXAT', string.format('%.0f', math.ceil(latest / 1000) + 1000))
    -- The rules know what to do when memory is full.
    if not put.err then return { now, 9 } end
  end
end
