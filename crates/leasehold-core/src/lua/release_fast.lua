-- The usual cases of `release.lua`, before the rules are even read, for a command that says nothing but its acquisition: it
-- is held by nobody else, and nobody waits; or nobody can have it yet; or the first in the queue is there, and takes what is
-- free. They do what the rules would. (A lease that has not ended in form 1 was granted less than an hour ago, so its token still has to be remembered.)

if raw then
  local form, _, _, ends, id = struct.unpack('>Bdddc24', raw)
  -- Should memory be full, the rules know what to do.
  if form == 1 and id == ARGV[1] and ends > now and redis.pcall('SETRANGE', KEYS[1], '0', '\0') == #raw then
    return now
  end
end

-- One of several leases, or one for which others wait: nothing is due, nobody is passed over, and it is its holder's own.
if raw and string.byte(raw) == 2 and floor == 0 and #ARGV[1] == 24 then
  local capacity, in_use, last, next_place, head, leases, waiters, parked, tombstones, next_expiry, remember_until, stays =
    struct.unpack('>dddddddddddd', raw, 2)
  local is_usual = (waiters > 0 or leases > 2) and parked == 0 and tombstones == 0 and next_expiry > now
    and stays > remember_until + 1000000
  local first, given_back, gone = string.sub(raw, 98), nil, {}
  if is_usual and string.sub(first, 1, 24) == ARGV[1] then
    given_back, first = first, ''
  elseif is_usual and leases > (first == '' and 0 or 1) then
    local row = redis.call('ZRANGEBYLEX', KEYS[2], '[l' .. ARGV[1], '(l' .. ARGV[1] .. '\255', 'LIMIT', '0', '1')[1]
    if row then
      given_back = string.sub(row, 2)
      gone = { row, 'e' .. string.sub(row, 50, 57) .. ARGV[1] }
    end
  end
  local _, weighed, granted_at, kept, is_named
  if given_back then weighed, _, granted_at, _, _, kept, is_named = struct.unpack('>ddddBBB', given_back, 25) end
  if given_back and kept + is_named == 0 and granted_at <= now then
    local free = capacity - in_use + weighed
    local heads = waiters > 0 and redis.call('ZRANGEBYLEX', KEYS[2], '[r', '(s', 'LIMIT', '0', '2')
    local id = heads and string.sub(heads[1], -24)
    local row = id and redis.call('ZRANGEBYLEX', KEYS[2], '[w' .. id, '(w' .. id .. '\255', 'LIMIT', '0', '1')[1]
    local place, weight, ttl, reserve, deadline, waits_named, metadata, replaces = 0, 0, 0, 0, 0, 0, '', ''
    if row then
      place, weight, ttl, reserve, _, deadline, _, waits_named, _, metadata, replaces =
        struct.unpack('>ddddddBBI4c0I4c0Bc0', row, 26)
    end

    if waits_named == 1 or replaces ~= '' then
      -- It may have a part of what it waits for: the rules know.
    elseif not row or weight > free then
      if #gone > 0 then redis.call('ZREM', KEYS[2], unpack(gone)) end
      -- Should memory be full, the rules know what to do, if nothing is done yet. Once something was taken out, this can be.
      local done = redis.pcall('SET', KEYS[1], struct.pack('>Bdddddddddddd', 2, capacity, in_use - weighed, last, next_place,
        head, leases - 1, waiters, 0, 0, next_expiry, remember_until, stays) .. first, 'KEEPTTL')
      if done.ok then return now end
    elseif reserve < 3600000000 and (waiters == 1 or weight == free
      -- Owners that hold already need nothing that is free.
      and (leases == 1 or redis.call('ZLEXCOUNT', KEYS[2], '[o', '(p') == 0)) then
      local token, lasts = math.max(last + 1, now), math.min(ttl, 3000000)
      local ends = now + lasts
      last = token + reserve
      remember_until = math.max(last + 1, now + 3600000000)
      local inbox = INBOX .. string.format('%08x%08x%08x%08x', struct.unpack('>I4I4I4I4', id))
      local lease = struct.pack('>c24ddddBBBI4I4', id, weight, token, now, ends, 0, 0, 0, 0, #metadata) .. metadata
      local is_granted = stays > remember_until + 1000000 and redis.call('PUBSUB', NUMSUB, inbox)[2] > 0
      if is_granted and first ~= '' then
        -- Should memory be full, the rules know what to do.
        is_granted = redis.pcall('ZADD', KEYS[2], '0', 'l' .. lease, '0', struct.pack('>c1dc24', 'e', ends, id)) == 2
      end
      if is_granted then
        redis.call('ZREM', KEYS[2], row, struct.pack('>c1ddc24', 'd', deadline, place, id), heads[1], unpack(gone))
        local next_head, next_id = 0, nil
        if waiters == 1 and leases == 1 then
          redis.call('SET', KEYS[1], struct.pack('>Bdddc24BI4I4I8I4', 1, last, stays, ends, id, 8, capacity, weight, lasts,
            reserve) .. metadata, 'KEEPTTL')
        else
          if waiters > 1 then next_head, next_id = struct.unpack('>dc24', heads[2], 2) end
          redis.call('SET', KEYS[1], struct.pack('>Bdddddddddddd', 2, capacity, in_use - weighed + weight, last, next_place,
            next_head, leases, waiters - 1, 0, 0, math.min(next_expiry, ends), remember_until, stays)
            .. (first == '' and lease or first), 'KEEPTTL')
        end
        redis.call(PUBLISH, inbox, struct.pack('>Bc24dddd', 1, id, now, token, last, lasts))
        if next_id and next_head ~= head then
          local soonest = first == '' and ends or struct.unpack('>d', first, 49)
          local further = leases > 1 and redis.call('ZRANGEBYLEX', KEYS[2], '[e', '(f', 'LIMIT', '0', '1')[1]
          if further then soonest = math.min(soonest, (struct.unpack('>d', further, 2))) end
          inbox = INBOX .. string.format('%08x%08x%08x%08x', struct.unpack('>I4I4I4I4', next_id))
          redis.call(PUBLISH, inbox, struct.pack('>Bc24dddd', 2, next_id, now, soonest, 0, 0))
        end
        return now
      end
    end
  end
end
