-- Before the rules in acquire.lua: a new attempt joins the holders of a shared lock, or goes to the end of the queue of an exclusive
-- one. Does what the rules would do, at a third of their price, which is mostly that of their definitions.
--
-- KEYS, ARGV and replies are those of acquire.lua; without a reply the rules follow. Nothing has expired, no client is parked, the
-- attempt was not released before, and memory is not full, since an id was drawn.

local a = unpack_acquire(ARGV[1])

-- When a waiter looks again that is not the head: after the time that a head may need once the lease ends, in case that it is
-- gone too. With many clients each looks the more seldom, and so does each of a client's many waiters.
local function follower_repoll_at(ends, waiters_of_client)
  if ends - now > CLAIM_WINDOW then ends = ends + CLAIM_WINDOW end
  ends = ends + select(4, struct.unpack('>I4I4I4I4', a.id)) % REPOLL_JITTER
  return math.max(ends, now + REPOLL_SPACING * count_rows('r') * waiters_of_client)
end

if drawn and ARGV[2] ~= '' and leases > 0 and parked + tombstones == 0 and next_expiry > now and a.capacity == capacity and a.id ~= first_id then
  local token, is_token = token_of(drawn)
  a.token, a.granted_at, a.expires_at = token, now, now + a.ttl
  if waiters == 0 and a.weight <= capacity - in_use then
    if is_token and token > last_token and token <= NEVER and stays > a.expires_at + MARGIN
      and (leases == 1 and first_id or count_rows('l' .. a.id) == 0) then
      drawn = nil
      in_use, last_token, leases, next_expiry = in_use + a.weight, token, leases + 1, math.min(next_expiry, a.expires_at)
      if plain then redis.call('DEL', KEYS[1]) end
      redis.call('ZADD', KEYS[1], '0', pack_header(plain and pack_lease(plain) or string.sub(row, first_at or #row + 1)),
        '0', pack_lease(a), '0', struct.pack(BY_TIME, 'e', a.expires_at, a.id))
      if plain then redis.call('PEXPIREAT', KEYS[1], math.ceil(stays / 1000)) else redis.call('ZREM', KEYS[1], row) end
      return { now, 1, token, token, a.ttl }
    end
  elseif a.max_queue and leases == 1 and first_at and a.weight > capacity - in_use and waiters < a.max_queue then
    local holder, client = unpack_lease(row, first_at), client_of(a.id)
    local others = count_rows('q' .. client)
    a.place, a.since, a.deadline = FIRST_WAITER_PLACE + next_place, now, now + a.entry_ttl
    -- A holder with reserved tokens must be notified of the first waiter.
    if stays > a.deadline + MARGIN and (waiters > 0 or holder.token == last_token)
      and (others == 0 or count_rows('w' .. a.id) == 0) then
      if waiters == 0 then head = a.place end
      next_place, waiters, next_expiry = next_place + 1, waiters + 1, math.min(next_expiry, a.deadline)
      local waiter, by_deadline, by_client = rows_of_waiter(a)
      local added = { '0', pack_header(string.sub(row, first_at)), '0', waiter, '0', by_deadline, '0', by_client }
      -- The first of its client's waiters stands for the others.
      if others == 0 then added[9], added[10] = '0', struct.pack(BY_TIME, 'r', a.place, a.id) end
      redis.call('ZADD', KEYS[1], unpack(added))
      redis.call('ZREM', KEYS[1], row)
      if waiters == 1 then return { now, 2, 1, holder.expires_at } end
      return { now, 2, 0, follower_repoll_at(holder.expires_at, others + 1) }
    end
  end
end
