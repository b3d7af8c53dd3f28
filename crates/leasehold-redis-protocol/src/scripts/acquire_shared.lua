-- Before the rules in acquire.lua: a new attempt joins the holders of a shared lock. Does what the rules would do, at a third of
-- their price, which is mostly that of their definitions.
--
-- KEYS, ARGV and replies are those of acquire.lua; without a reply the rules follow. The first lines could have granted the attempt.
-- Nothing has expired, there is no waiter and no tombstone, and memory is not full, since an id was drawn. `row` is the header's, if
-- there is one.

local function acquire_shared()
  local a, s, first = unpack_acquire(ARGV[1]), nil, nil
  if raw then
    local l, last = plain_lease()
    local left = l and a.weight <= a.capacity - l.weight and redis.call('PTTL', KEYS[1]) or 0
    if left <= 0 then return end
    l.expires_at = plain_end(left)
    first = pack_lease('l', l)
    s = { serial = NEVER, capacity = l.capacity, in_use = l.weight, last_token = last, next_place = 1, head = 0, leases = 1, waiters = 0,
      parked = 0, tombstones = 0, next_expiry = l.expires_at, stays = l.expires_at + SPARE }
  elseif row and #row >= struct.size(HEADER) then
    s, first = unpack_header(row)
  else
    return
  end
  local token, is_token = token_of(drawn)
  local ends = now + a.ttl
  if s.capacity ~= a.capacity or a.weight > s.capacity - s.in_use or s.leases == 0 or s.waiters + s.tombstones > 0
    or s.next_expiry <= now or s.stays <= ends + 1000000 or #first > 0 and unpack_lease(first).id == a.id
    or (s.leases > 1 or #first == 0) and count_rows('l' .. a.id) > 0
    or token <= s.last_token or token > NEVER or not is_token then return end
  drawn = nil
  s.in_use, s.last_token, s.leases, s.next_expiry = s.in_use + a.weight, token, s.leases + 1, math.min(s.next_expiry, ends)
  a.token, a.granted_at, a.expires_at, a.claimed, a.retained = token, now, ends, 1, 0
  s.serial = s.serial - 1
  local scored = { '0', pack_header(s, first), '0', pack_lease('l', a), '0', struct.pack(BY_TIME, 'e', ends, a.id) }
  if raw then
    create_rows(redis.call, scored, s.stays)
  else
    redis.call('ZADD', KEYS[1], unpack(scored))
    redis.call('ZREM', KEYS[1], row)
  end
  return { now, 1, token, token, a.ttl }
end

local shared = ARGV[2] ~= '' and drawn and acquire_shared()
if shared then return shared end
