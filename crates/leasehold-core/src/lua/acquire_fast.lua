-- The usual case of `acquire.lua`, before the rules are even read: nobody holds it and nobody waits, so there is a header
-- at most. It does and returns what the rules would.

if (not raw or #raw == 96) and ARGV[3] == '0' and ARGV[13] == '' then
  local in_header = '>dddddddddddd'
  local last_token, next_place, head, leases, waiters, tombstones, latest = 0, 1, 0, 0, 0, 0, 0
  local _
  if raw then
    _, _, last_token, next_place, head, leases, waiters, _, tombstones, _, _, latest = struct.unpack(in_header, raw)
  end
  local capacity, weight, ttl = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
  if leases == 0 and waiters == 0 and tombstones == 0 and weight > 0 and weight <= capacity then
    local token = math.max(last_token + 1, now)
    local last = token + tonumber(ARGV[8])
    local remember_until = math.max(last + 1, now + 3600000000)
    local expires_at = now + ttl
    latest = math.max(latest, remember_until, expires_at)
    redis.call('SET', KEYS[1], struct.pack('>ddddddddddddc24ddddBBBI2c0I2c0', capacity, weight, last, next_place, head, 1,
      0, 0, 0, expires_at, remember_until, latest, ARGV[2], weight, token, now, expires_at, 1, 0, 0, 0, '', #ARGV[12],
      ARGV[12]), 'PXAT', string.format('%.0f', math.ceil(latest / 1000) + 1000))
    return { now, 1, token, last, ttl }
  end
end
