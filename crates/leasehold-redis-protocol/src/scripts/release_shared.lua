-- Before the rules in release.lua: a lease is given back that no attempt waits for. Does what the rules would do, at a fraction of their
-- price.
--
-- KEYS, ARGV and replies are those of release.lua; without a reply the rules follow. The lease has no owner. Nothing has expired, and
-- there is no waiter and no tombstone. `header` is what handoff.lua has read.

repeat
  if not header or #header < HEADER_SIZE then break end
  local capacity, in_use, last, leases, tombstones, next_expiry, _, _, _, _, _, _, waiters = struct.unpack(HEADER, header)
  if waiters + tombstones > 0 or next_expiry <= now then break end
  local first, lease = string.sub(header, HEADER_SIZE + 1), nil
  local own, field, last_field, moved = 'i' .. released, nil, nil, nil
  if string.sub(first, LEASE_SIZE + 1, LEASE_SIZE + 24) == released then
    lease, first = first, ''
  else
    field, last_field = call('HMGET', KEYS[1], own)[1] or '', 'l' .. (first == '' and leases or leases - 1)
    if field == '' then break end
    local both = call('HMGET', KEYS[1], field, last_field)
    lease, moved = both[1], both[2]
  end
  -- A lease that is not retained, and has no owner.
  if terms and not is_brief((struct.unpack('<d', lease))) then break end
  if string.byte(lease, LEASE_SIZE) > 0 or string.byte(lease, LEASE_SIZE + 25) % 4 > 1 then break end
  leave_tombstone()
  if leases == 1 then
    call('DEL', KEYS[1])
    return now
  end
  local weight = 1
  if string.byte(lease, LEASE_SIZE + 25) % 16 > 7 then weight = struct.unpack('>I4', lease, LEASE_SIZE + 38) end
  local changed = struct.pack('<dddd', capacity, in_use - weight, last, leases - 1) .. string.sub(header, 33, HEADER_SIZE) .. first
  -- Should memory be full, the rules know what to do. The last lease stays in its field: its next renewal makes it plain.
  local set
  if not field then
    set = redis.pcall('HSET', KEYS[1], 'h', changed)
  elseif field == last_field then
    set = redis.pcall('HSET', KEYS[1], 'h', changed, own, '', last_field, '')
  else
    local its = 'i' .. string.sub(moved, LEASE_SIZE + 1, LEASE_SIZE + 24)
    set = redis.pcall('HSET', KEYS[1], 'h', changed, own, '', last_field, '', field, moved, its, field)
  end
  if type(set) ~= 'number' then break end
  if field then call('HDEL', KEYS[1], own, last_field) end
  return now
until true
