-- The fast path of acquire.lua: the attempt is granted at once, or goes to the end of the queue. Does what the rules would do.
--
-- KEYS, ARGV and replies are those of acquire.lua; without a reply the rules follow.
--
-- The state is the attempt's argument with a few numbers before it, because calls cost a script most of its time, and then
-- strings. For the same reason the keys' expiry, which must be an hour ahead at least, is set once an hour only. (The last
-- token is less than an hour ahead.)

local form, last, stays = 0, 0, 0
if raw then form, last, stays = struct.unpack('>Bdd', raw) end
local token = now
if floor > now then token = floor end
if form == 0 and last < token and token < now + 60000000 then
  local flags, capacity, weight, ttl, reserve = struct.unpack('>BI4I4I8I4', ARGV[1], 25)
  if flags < 2 and weight > 0 and weight <= capacity and ttl <= 3600000000 and reserve < 3540000000 then
    if stays > now + 3601000000 then
      redis.call('SET', KEYS[1], struct.pack('>Bdddc0', 1, token + reserve, stays, now + ttl, ARGV[1]), 'KEEPTTL')
    else
      redis.call('SET', KEYS[1], struct.pack('>Bdddc0', 1, token + reserve, now + 7200000000, now + ttl, ARGV[1]),
        'PXAT', math.ceil(now / 1000) + 7200000)
    end
    return now
  end
end

-- It is held, with nothing due and nobody passed over, by others than this attempt, which was not given back before. Then it is
-- granted if nobody waits and it fits, or goes to the end of the queue.
if form ~= 0 and string.byte(ARGV[1], 25) < 2 then
  local state = raw
  if form == 1 then
    local ends, id, flags, capacity, weight, ttl, reserve, at = struct.unpack('>dc24BI4I4I8I4', raw, 18)
    local metadata = string.sub(raw, flags == 1 and at + 12 or at)
    local granted_at = ends - ttl
    state = struct.pack('>Bddddddddddddc24ddddBBBI4I4c0', 2, capacity, weight, last, 1, 0, 1, 0, 0, 0, ends,
      math.max(last + 1, granted_at + 3600000000), stays, id, weight, last - reserve, granted_at, ends,
      flags == 8 and 0 or 1, 0, 0, 0, #metadata, metadata)
  end
  local id, waits, capacity, weight, ttl, reserve, at = struct.unpack('>c24BI4I4I8I4', ARGV[1])
  local common, in_use, last, next_place, head, leases, waiters, parked, tombstones, next_expiry, remember_until, stays =
    struct.unpack('>dddddddddddd', state, 2)
  local has_first = #state > 97
  local is_usual = leases > 0 and parked == 0 and next_expiry > now
    and capacity == common and weight > 0 and weight <= capacity and not (has_first and string.sub(state, 98, 121) == id)
  local is_new = is_usual and (leases == 1 and has_first
    or redis.call('ZLEXCOUNT', KEYS[2], '[l' .. id, '(l' .. id .. '\255') == 0)
    and (tombstones == 0 or redis.call('ZLEXCOUNT', KEYS[2], '[t' .. id, '(t' .. id .. '\255') == 0)

  if is_new and waiters == 0 and weight <= capacity - in_use then
    local token, ends = math.max(last + 1, now, floor), now + ttl
    last = token + reserve
    remember_until = math.max(last + 1, now + 3600000000)
    local metadata = string.sub(ARGV[1], waits == 1 and at + 12 or at)
    local lease = struct.pack('>c24ddddBBBI4I4c0', id, weight, token, now, ends, 1, 0, 0, 0, #metadata, metadata)
    local is_in = stays > math.max(remember_until, ends) + 1000000
    local first = has_first and string.sub(state, 98) or lease
    if is_in and has_first then
      -- Should memory be full, the rules know what to say.
      is_in = redis.pcall('ZADD', KEYS[2], '0', 'l' .. lease, '0', struct.pack('>c1dc24', 'e', ends, id)) == 2
        and redis.call('PEXPIREAT', KEYS[2], math.ceil(stays / 1000))
    end
    if is_in then
      redis.call('SET', KEYS[1], struct.pack('>Bdddddddddddd', 2, capacity, in_use + weight, last, next_place, head,
        leases + 1, 0, 0, tombstones, math.min(next_expiry, ends), remember_until, stays) .. first, 'KEEPTTL')
      return { now, 1, token, last, ttl }
    end
  end

  if is_new and waits == 1 and (waiters > 0 or weight > capacity - in_use) then
    local entry_ttl, longest_queue, at = struct.unpack('>I8I4', ARGV[1], at)
    local deadline = now + entry_ttl
    -- A holder with tokens set aside has to be told of the first one that waits.
    local is_told = waiters > 0 or leases == 1 and has_first and struct.unpack('>d', state, 130) == last
    local place = 1099511627776 + next_place
    local ready = struct.pack('>c1dc24', 'r', place, id)
    local others = 0
    if waiters > 0 then
      -- The first of its client's waiters stands for the others.
      local client = string.sub(id, 1, 16)
      others = redis.call('ZLEXCOUNT', KEYS[2], '[q' .. client, '(q' .. client .. '\255')
      if others > 0 then
        ready = nil
        is_told = redis.call('ZLEXCOUNT', KEYS[2], '[w' .. id, '(w' .. id .. '\255') == 0
      end
    end
    if is_told and waiters < longest_queue and stays > deadline + 1000000 then
      local metadata = string.sub(ARGV[1], at)
      -- Should memory be full, the rules know what to say.
      local rows = {
        '0', struct.pack('>c1c24ddddddBI4I4c0B', 'w', id, place, weight, ttl, reserve, now, deadline, 0, 0, #metadata,
          metadata, 0),
        '0', struct.pack('>c1ddc24', 'd', deadline, place, id),
        '0', struct.pack('>c1c16dc8', 'q', id, place, string.sub(id, 17)),
      }
      if ready then rows[7], rows[8] = '0', ready end
      if redis.pcall('ZADD', KEYS[2], unpack(rows)) == #rows / 2 then
        if waiters == 0 then
          head = place
          redis.call('PEXPIREAT', KEYS[2], math.ceil(stays / 1000))
        end
        redis.call('SET', KEYS[1], struct.pack('>Bdddddddddddd', 2, common, in_use, last, next_place + 1, head, leases,
          waiters + 1, 0, tombstones, math.min(next_expiry, deadline), remember_until, stays) .. string.sub(state, 98), 'KEEPTTL')
        local ends = has_first and struct.unpack('>d', state, 146)
        if waiters == 0 then return { now, 2, 1, ends } end
        if leases > (has_first and 1 or 0) then
          local further = redis.call('ZRANGEBYLEX', KEYS[2], '[e', '(f', 'LIMIT', '0', '1')[1]
          further = struct.unpack('>d', further, 2)
          ends = math.min(ends or further, further)
        end
        if ends - now > 3000000 then ends = ends + 3000000 end
        ends = ends + struct.unpack('>I4', id, 13) % 1500000
        return { now, 2, 0, math.max(ends, now + 25000 * redis.call('ZLEXCOUNT', KEYS[2], '[r', '(s') * (others + 1)) }
      end
    end
  end
end
