-- Before the rules in release.lua: an exclusive lease without an owner goes to the first waiter. Does what the rules would do,
-- at a third of their price, which is mostly that of their definitions.
--
-- KEYS, ARGV and replies are those of release.lua; without a reply the rules follow. Nothing has expired, no client is parked, and
-- the waiter is subscribed, is its client's only one and has no owner.

local row = floor == 0 and not raw and first_row('h')
if row and #row >= struct.size(HEADER) then
  local _, capacity, _, last, next_place, head, leases, waiters, parked, tombstones, next_expiry, stays, at =
    struct.unpack(HEADER, row)
  local _, holder, retained, is_named
  if at <= #row then _, holder, _, _, _, _, _, retained, is_named = struct.unpack(LEASE, row, at) end
  if holder == ARGV[1] and retained + is_named == 0 and leases == 1 and waiters > 0 and parked + tombstones == 0
    and next_expiry > now and stays > now + CLAIM_WINDOW + 1000000 then
    local ready = redis.call('ZRANGEBYLEX', KEYS[1], '[r', '(s', 'LIMIT', '0', '2')
    local _, place, id = struct.unpack(BY_TIME, ready[1])
    local client, sequence = struct.unpack('c16c8', id)
    local waiter = first_row('w' .. id)
    local _, _, _, weight, ttl, reserve, _, deadline, has_owner, _, metadata, replaces = struct.unpack(WAITER, waiter)
    if weight == capacity and has_owner == 0 and replaces == '' and count_rows('q' .. client) == 1
      and is_reachable(id) then
      -- Should memory be full, the rules know what to do.
      local drawn_id = redis.pcall('XADD', KEYS[2], 'MAXLEN', '0', '*', 't', '')
      local token, is_token
      if not drawn_id.err then token, is_token = token_of(drawn_id) end
      if is_token and token > last and token <= NEVER then
        local last_token = token
        if reserve > 0 and token <= (now / 1000 + MAX_LEAD) * TOKENS_PER_MS then
          last_token = token + reserve
          redis.call('XADD', KEYS[2], 'MAXLEN', '0', id_of(last_token), 't', '')
        end
        local valid_for = math.min(ttl, CLAIM_WINDOW)
        local ends, next_head, next_id, _ = now + valid_for, 0, nil, nil
        if ready[2] then _, next_head, next_id = struct.unpack(BY_TIME, ready[2]) end
        redis.call('ZADD', KEYS[1], '0', struct.pack(HEADER, 'h', capacity, capacity, last_token, next_place, next_head, 1,
          waiters - 1, 0, 0, math.min(next_expiry, ends), stays) .. struct.pack(LEASE, 'l', id, weight, token, now, ends, 0, 0,
          0, 0, '', #metadata, metadata))
        redis.call('ZREM', KEYS[1], row, waiter, ready[1], struct.pack('>c1ddc24', 'd', deadline, place, id),
          struct.pack(BY_CLIENT, 'q', client, place, sequence))
        publish(id, 1, token, last_token, valid_for)
        if next_id and next_head ~= head then publish(next_id, 2, ends, 0, 0) end
        return now
      end
      if token then drawn = drawn_id end
    end
  end
end
