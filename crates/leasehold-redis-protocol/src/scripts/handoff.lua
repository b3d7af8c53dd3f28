-- Before the rules in release.lua: an exclusive lease without an owner goes to the first waiter. Does what the rules would do,
-- at a fraction of their price, which is mostly that of their definitions.
--
-- KEYS, ARGV and replies are those of release.lua; without a reply the rules follow. Nothing has expired, no client is parked, and
-- the waiter is subscribed and has no owner.

-- Whether the terms leave nothing but a tombstone in a key of its own, and mean the lease with this token.
local function is_brief(token)
  if not terms.is_brief or not terms.mark then return terms.is_brief end
  local ms, sequence = string.match(terms.mark, '(%d+)%-(%d+)')
  return ms * TOKENS_PER_MS + sequence == token
end

if floor == 0 and not raw and not found then found = call('HMGET', KEYS[1], 'h') end
if found then header = found[1] end
repeat
  if not header or #header <= HEADER_SIZE + LEASE_SIZE then break end
  local capacity, _, last, leases, tombstones, next_expiry, stays, early, parked, next_place, _, head, waiters, clients, next_deadline,
    head_client, held_token, _, _, _, retained, holder, holder_flags = struct.unpack(LAYOUT, header)
  if leases ~= 1 or tombstones + parked + early + retained > 0 or head == 0 or next_expiry <= now or next_deadline <= now
    or holder ~= released or terms and not is_brief(held_token) or holder_flags % 4 > 1 or stays <= now + CLAIM_WINDOW + 1000000 then break end
  local number = head - FIRST_WAITER_PLACE
  local field = string.format('%d', number)
  local client_field = 'c' .. head_client
  local waiter, count, following, following_number = nil, nil, '', number + 1
  if waiters > 1 then
    local three = call('HMGET', KEYS[1], field, client_field, string.format('%d', following_number))
    waiter, count, following = three[1], three[2], three[3] or ''
    -- Those right behind it have left.
    local ahead, fields = {}, {}
    if following == '' then
      for i = 1, 50 do fields[i] = string.format('%d', number + 1 + i) end
      ahead = call('HMGET', KEYS[1], unpack(fields))
    end
    while following == '' and following_number <= number + #ahead do
      following = ahead[following_number - number] or ''
      following_number = following_number + 1
    end
    if following == '' then break end
  else
    local both = call('HMGET', KEYS[1], field, client_field)
    waiter, count = both[1], both[2]
  end
  if not waiter or waiter == '' or not count or count == '' then break end
  local _, deadline, secret, inbox, client, sequence, flags, ttl, at = struct.unpack('<ddc8c40c16c8>BI8', waiter)
  local weight, reserve = 1, 0
  if flags % 16 > 7 then _, weight, reserve = struct.unpack(EXTENT, waiter, at) end
  if weight ~= capacity or flags % 8 > 1 or deadline <= now then break end
  -- It is asked for before, since PUBLISH also counts subscribers to patterns, and is heard at replicas.
  if NUMSUB(inbox)[2] == 0 then break end
  -- Should memory be full, the rules know what to do.
  local drawn_id = redis.pcall('XADD', KEYS[2], 'MAXLEN', '0', '*', 't', '')
  if drawn_id.err then break end
  local ms, number_in_ms = string.match(drawn_id, '(%d+)%-(%d+)')
  local token = ms * TOKENS_PER_MS + number_in_ms
  if tonumber(number_in_ms) >= TOKENS_PER_MS or token <= last or token > NEVER then
    drawn = drawn_id
    break
  end
  local last_token, valid_for = token, ttl < CLAIM_WINDOW and ttl or CLAIM_WINDOW
  if reserve > 0 and token <= (now / 1000 + MAX_LEAD) * TOKENS_PER_MS then
    last_token = token + reserve
    local last_id = string.format('%.0f-%.0f', math.floor(last_token / TOKENS_PER_MS), last_token % TOKENS_PER_MS)
    call('XADD', KEYS[2], 'MAXLEN', '0', last_id, 't', '')
  end
  local ends, own_field, next_inbox, next_client, next_sequence = now + valid_for, 'i' .. client .. sequence, nil, NO_CLIENT, nil
  if following ~= '' then
    next_inbox, next_client, next_sequence, flags = struct.unpack('c40c16c8B', following, 25)
    if flags > 15 then next_client = struct.unpack('c16', following, flags % 16 < 8 and 98 or 110) end
  end
  local is_last = count == '1'
  if is_last then clients, count = clients - 1, '' else count = count - 1 .. '' end
  local lease = struct.pack(TABLE, capacity, capacity, last_token, 1, 0, ends, stays, 0, 0, next_place, following_number,
    waiters > 1 and FIRST_WAITER_PLACE + following_number or 0, waiters - 1, clients, next_deadline, next_client, token, now, ends, 0, 0) .. string.sub(waiter, WAITER_SIZE + 1)
  leave_tombstone()
  call('HSET', KEYS[1], 'h', lease, field, '', own_field, '', client_field, count)
  -- As `publish` does.
  local message = struct.pack('>Bc8dddd', 1, sequence, now, token, last_token, valid_for)
  local proof = redis.sha1hex(secret .. string.sub(message, 10))
  PUBLISH(inbox, message .. proof)
  if following ~= '' then
    PUBLISH(next_inbox, struct.pack('>Bc8dddd', 2, next_sequence, now, ends, 0, 0))
  end
  if is_last then call('HDEL', KEYS[1], field, own_field, client_field) else call('HDEL', KEYS[1], field, own_field) end
  return now
until true
