-- Before the rules in release.lua: a shared lease is given back, or an exclusive one goes to the first waiter. Does what the rules
-- would do, at a third of their price, which is mostly that of their definitions.
--
-- KEYS, ARGV and replies are those of release.lua; without a reply the rules follow. Nothing has expired, no client is parked, there
-- is no tombstone, and the lease has no owner. The waiter is subscribed, is its client's only one and has no owner.

if floor == 0 and row and parked + tombstones == 0 and next_expiry > now then
  local is_first, text = first_id == ARGV[1], nil
  if not is_first and leases > 1 and waiters == 0 then text = first_row('l' .. ARGV[1]) end
  local l = is_first and unpack_lease(row, first_at) or text and unpack_lease(text)
  if not l or l.retained + l.has_owner > 0 then
    l = nil
  elseif leases > 1 and waiters == 0 then
    exceed_memory()
    leases, in_use = leases - 1, in_use - l.weight
    -- The other leases stay in their rows, also the last one: its next renewal makes it plain.
    redis.call('ZADD', KEYS[1], '0', pack_header(is_first and '' or string.sub(row, first_at or #row + 1)))
    redis.call('ZREM', KEYS[1], row, text or row, struct.pack(BY_TIME, 'e', l.expires_at, l.id))
    return now
  elseif leases == 1 and waiters > 0 and stays > now + CLAIM_WINDOW + MARGIN then
    local ready = redis.call('ZRANGEBYLEX', KEYS[1], '[r', '(s', 'LIMIT', '0', '2')
    local _, _, id = struct.unpack(BY_TIME, ready[1])
    local w, token, last = unpack_waiter(first_row('w' .. id)), nil, nil
    if w.weight == capacity and w.has_owner == 0 and w.replaces == '' and count_rows('q' .. client_of(id)) == 1
      and is_reachable(id) then
      exceed_memory()
      token, last = next_tokens(w.reserve)
    end
    if token then
      local waiter, by_deadline, by_client = rows_of_waiter(w)
      local valid_for, told, next_id, _ = math.min(w.ttl, CLAIM_WINDOW), head, nil, nil
      w.token, w.granted_at, w.expires_at, w.claimed, w.retained = token, now, now + valid_for, 0, 0
      in_use, waiters, head, next_expiry = capacity, waiters - 1, 0, math.min(next_expiry, w.expires_at)
      if ready[2] then _, head, next_id = struct.unpack(BY_TIME, ready[2]) end
      redis.call('ZADD', KEYS[1], '0', pack_header(pack_lease(w)))
      redis.call('ZREM', KEYS[1], row, waiter, ready[1], by_deadline, by_client)
      publish(id, 1, token, last, valid_for)
      if next_id and head ~= told then publish(next_id, 2, w.expires_at, 0, 0) end
      return now
    end
  end
end
