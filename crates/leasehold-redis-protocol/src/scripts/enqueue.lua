-- Before the rules in acquire.lua: a new attempt goes to the end of the queue of an exclusive lock. Does what the rules would
-- do, at a third of their price, which is mostly that of their definitions.
--
-- KEYS, ARGV and replies are those of acquire.lua; without a reply the rules follow. Nothing has expired, no client is parked,
-- the attempt was not released before, and memory is not full, since an id was drawn.

-- Two headers are of a step that failed half-way, which the rules repair.
local headers = drawn and not raw and redis.call('ZRANGEBYLEX', KEYS[1], '[h', '(i', 'LIMIT', '0', '2') or {}
local row = not headers[2] and headers[1]
if row and #row >= struct.size(HEADER) then
  local _, serial, capacity, in_use, last, next_place, head, leases, waiters, parked, tombstones, next_expiry, stays, length,
    at = struct.unpack(HEADER, row)
  local id, flags, ttl, requested_capacity, weight, reserve, rest_at = unpack_request(ARGV[1])
  if flags % 8 == 0 and ARGV[3] ~= '' and leases == 1 and length > 0 and parked + tombstones == 0 and next_expiry > now and requested_capacity == capacity
    and weight > 0 and weight <= capacity and weight > capacity - in_use and (waiters == 0 or in_use >= capacity) then
    local secret, entry_ttl, max_queue = unpack_wait(ARGV[3])
    local _, holder, _, token, _, ends = struct.unpack(LEASE, row, at)
    local client, sequence = struct.unpack('c16c8', id)
    local deadline = now + entry_ttl
    local others = count_rows('q' .. client)
    -- A holder with reserved tokens must be notified of the first waiter.
    if holder ~= id and waiters < max_queue and stays > deadline + 1000000 and (waiters > 0 or token == last)
      and (others == 0 or count_rows('w' .. id) == 0) then
      local place, metadata = FIRST_WAITER_PLACE + next_place, string.sub(ARGV[1], rest_at)
      if waiters == 0 then head = place end
      local changed = struct.pack(HEADER, 'h', serial - 1, capacity, in_use, last, next_place + 1, head, leases, waiters + 1,
        0, 0, math.min(next_expiry, deadline), stays, length) .. string.sub(row, at, at + length - 1)
      local rows = {
        '0', changed,
        '0', struct.pack(WAITER, 'w', id, place, weight, ttl, reserve, now, deadline, 0, 0, '', #metadata, metadata, 0, '', secret),
        '0', struct.pack(BY_DEADLINE, 'd', deadline, place, id),
        '0', struct.pack(BY_CLIENT, 'q', client, place, sequence),
      }
      -- The first of its client's waiters stands for the others.
      if others == 0 then rows[9], rows[10] = '0', struct.pack(BY_TIME, 'i', place, id) end
      redis.call('ZADD', KEYS[1], unpack(rows))
      redis.call('ZREM', KEYS[1], row)
      if waiters == 0 then return { now, 2, 1, ends } end
      return { now, 2, 0, follower_repoll_at(id, ends, count_rows('i'), others + 1) }
    end
  end
end
