-- Before the rules in acquire.lua: an attempt goes to the end of the queue of an exclusive lock, or looks again; or it is busy, if it does
-- not wait. Does what the rules would do, at a fraction of their price, which is mostly that of their definitions.
--
-- KEYS, ARGV and replies are those of acquire.lua; without a reply the rules follow. Nothing has expired, no client is parked, no
-- attempt was cancelled, and nothing is free. Should memory be full, the rules know what to do.

if not id then
  id = string.sub(ARGV[1], 1, 24)
  own_field, client_field = 'i' .. id, client_field_of(ARGV[1])
end
if not raw and not found then found = call('HMGET', KEYS[1], 'h', own_field, client_field) end
local own = found and found[2] or ''
if found then header = found[1] end
repeat
  if has_ended or not header or #header <= HEADER_SIZE + LEASE_SIZE then break end
  local of_lock, in_use, last, leases, tombstones, next_expiry, stays, _, parked, next_place, first, head, waiters, clients,
    next_deadline, head_client, token, _, ends, _, _, holder = struct.unpack(LAYOUT, header)
  local flags, capacity, weight = string.byte(ARGV[1], 25), 1, 1
  if flags % 16 > 7 then capacity, weight = struct.unpack('>I4I4', ARGV[1], 34) end
  if flags % 8 > 1 or leases ~= 1 or parked + tombstones > 0 or next_expiry <= now or next_deadline <= now or capacity ~= of_lock
    or weight == 0 or weight > capacity or weight <= capacity - in_use or waiters > 0 and (in_use < capacity or head == 0)
    or holder == id then break end
  if ARGV[3] == '' then
    if own ~= '' then break end
    return { now, 3 }
  end
  -- As unpack_wait.
  local secret, inbox, entry_ttl, max_queue = ARGV[3], nil, USUAL_ENTRY_TTL, USUAL_MAX_QUEUE
  if #secret > 48 then
    secret, inbox, entry_ttl, max_queue = struct.unpack(WAIT, secret)
  elseif #secret > 8 then
    secret, inbox = struct.unpack('c8c40', secret)
  else
    inbox = redis.sha1hex(string.sub(client_field, 2))
  end
  local deadline = now + entry_ttl
  if stays <= deadline + 1000000 then break end
  local repoll_at, count, of_client = ends, found[3] or '', 1
  if count ~= '' then of_client = own == '' and count + 1 or tonumber(count) else clients = clients + 1 end
  if waiters > 0 then
    -- As follower_repoll_at.
    if ends - now > CLAIM_WINDOW then repoll_at = ends + CLAIM_WINDOW end
    local spacing = REPOLL_SPACING * clients * of_client
    repoll_at = math.max(repoll_at + struct.unpack('>I4', client_field, 14) % REPOLL_JITTER, now + spacing)
  end
  if own ~= '' then
    -- It has an entry, since the lease is not its own.
    local text = tonumber(own) and deadline >= next_deadline and call('HMGET', KEYS[1], own)[1]
    local known_flags = text and string.byte(text, WAITER_SIZE + 25)
    if not text or known_flags % 4 > 1 then break end
    -- Another client may have spoken for the attempt.
    if flags + known_flags > 15 and string.sub(text, WAITER_SIZE + 1) ~= ARGV[1] then break end
    local looked = struct.pack(WAITER, struct.unpack('<d', text), deadline, secret, inbox) .. string.sub(text, WAITER_SIZE + 1)
    if type(redis.pcall('HSET', KEYS[1], own, looked)) ~= 'number' then break end
    if FIRST_WAITER_PLACE + own == head then return { now, 2, 1, ends } end
    return { now, 2, 0, repoll_at }
  end
  -- A holder with reserved tokens must be notified of the first waiter.
  if waiters >= max_queue or waiters == 0 and token ~= last then break end
  if waiters == 0 then first, head, head_client = next_place, FIRST_WAITER_PLACE + next_place, string.sub(client_field, 2) end
  local field = string.format('%d', next_place)
  local queue = struct.pack('<ddddddc16', next_place + 1, first, head, waiters + 1, clients, math.min(next_deadline, deadline), head_client)
  local changed = string.sub(header, 1, HEADER_SIZE - 64) .. queue .. string.sub(header, HEADER_SIZE + 1)
  local entry = struct.pack(WAITER, now, deadline, secret, inbox) .. ARGV[1]
  if type(redis.pcall('HSET', KEYS[1], 'h', changed, field, entry, own_field, field, client_field, count == '' and '1' or of_client .. '')) ~= 'number' then break end
  return { now, 2, waiters == 0 and 1 or 0, repoll_at }
until true
