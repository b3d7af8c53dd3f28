-- The fast path of release.lua, for an argument that is the acquisition alone: there is one lease and no waiter; or the first
-- waiter does not fit yet; or the first waiters are subscribed, and get what becomes free. Does what the rules would do.
--
-- KEYS, ARGV and replies are those of release.lua; without a reply the rules follow.
--
-- A lease that has not expired in form 1 was granted less than an hour ago, so its token must still be remembered.

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
  local is_usual = (waiters > 0 or leases > 2) and parked == 0 and next_expiry > now
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
  local _, weighed, kept, is_named
  if given_back then weighed, _, _, _, _, kept, is_named = struct.unpack('>ddddBBB', given_back, 25) end
  if given_back and kept + is_named == 0 then
    -- Those who wait get what is free, in their order, as long as it fits. One with an owner, or that is to take the place of a
    -- lease, may have a part of what it waits for; and one may be away: the rules know.
    local free, grants, is_usual = capacity - in_use + weighed, {}, true
    local ready = waiters > 0 and redis.call('ZRANGEBYLEX', KEYS[2], '[r', '(s', 'LIMIT', '0', '2') or {}
    for i = 1, math.min(waiters, 65) do
      if not ready[i] then ready = redis.call('ZRANGEBYLEX', KEYS[2], '[r', '(s', 'LIMIT', '0', '65') end
      local place = ready[i]
      if free == 0 then
        is_usual = leases == 1 or redis.call('ZLEXCOUNT', KEYS[2], '[o', '(p') == 0
        break
      end
      local id = string.sub(place, -24)
      local row = redis.call('ZRANGEBYLEX', KEYS[2], '[w' .. id, '(w' .. id .. '\255', 'LIMIT', '0', '1')[1]
      local _, weight, ttl, reserve, _, deadline, waits_named, _, metadata, replaces =
        struct.unpack('>ddddddBI4c0I4c0Bc0', row, 26)
      is_usual = i < 65 and waits_named == 0 and replaces == '' and reserve < 3600000000
      if not is_usual or weight > free then break end
      -- Another one of its client's waiters comes to stand for the others: the rules know where.
      local client = string.sub(id, 1, 16)
      is_usual = redis.call('ZLEXCOUNT', KEYS[2], '[q' .. client, '(q' .. client .. '\255') == 1
      if not is_usual then break end
      local inbox = INBOX .. string.format('%08x%08x%08x%08x', struct.unpack('>I4I4I4I4', id))
      is_usual = redis.call('PUBSUB', NUMSUB, inbox)[2] > 0
      if not is_usual then break end
      local token, lasts = math.max(last + 1, now), math.min(ttl, 3000000)
      last = token + reserve
      free = free - weight
      grants[i] = { id = id, inbox = inbox, weight = weight, token = token, last = last, lasts = lasts, metadata = metadata,
        reserve = reserve, rows = { row, struct.pack('>c1dc32', 'd', deadline, string.sub(place, 2)), place,
          'q' .. client .. string.sub(place, 2, 9) .. string.sub(id, 17) } }
    end

    if is_usual and #grants == 0 then
      if #gone > 0 then redis.call('ZREM', KEYS[2], unpack(gone)) end
      -- Should memory be full, the rules know what to do, if nothing is done yet. Once something was taken out, this can be.
      local done = redis.pcall('SET', KEYS[1], struct.pack('>Bdddddddddddd', 2, capacity, in_use - weighed, last, next_place,
        head, leases - 1, waiters, 0, tombstones, next_expiry, remember_until, stays) .. first, 'KEEPTTL')
      if done.ok then return now end
    elseif is_usual and stays > math.max(last + 1, now + 3600000000) + 1000000 then
      remember_until = math.max(last + 1, now + 3600000000)
      leases, waiters = leases - 1 + #grants, waiters - #grants
      local added = {}
      for _, grant in ipairs(grants) do
        local ends = now + grant.lasts
        local lease = struct.pack('>c24ddddBBBI4I4', grant.id, grant.weight, grant.token, now, ends, 0, 0, 0, 0,
          #grant.metadata) .. grant.metadata
        next_expiry = math.min(next_expiry, ends)
        if first == '' then
          first = lease
        else
          for _, row in ipairs({ 'l' .. lease, struct.pack('>c1dc24', 'e', ends, grant.id) }) do
            added[#added + 1] = '0'
            added[#added + 1] = row
          end
        end
        for _, row in ipairs(grant.rows) do gone[#gone + 1] = row end
      end
      -- Should memory be full, the rules know what to do.
      if #added == 0 or redis.pcall('ZADD', KEYS[2], unpack(added)) == #added / 2 then
        redis.call('ZREM', KEYS[2], unpack(gone))
        local next_head, next_id = 0, nil
        if waiters == 0 and leases == 1 and tombstones == 0 then
          local grant = grants[1]
          redis.call('SET', KEYS[1], struct.pack('>Bdddc24BI4I4I8I4', 1, last, stays, now + grant.lasts, grant.id, 8,
            capacity, grant.weight, grant.lasts, grant.reserve) .. grant.metadata, 'KEEPTTL')
        else
          if waiters > 0 then next_head, next_id = struct.unpack('>dc24', ready[#grants + 1], 2) end
          redis.call('SET', KEYS[1], struct.pack('>Bdddddddddddd', 2, capacity, capacity - free, last, next_place, next_head,
            leases, waiters, 0, tombstones, next_expiry, remember_until, stays) .. first, 'KEEPTTL')
        end
        for _, grant in ipairs(grants) do
          redis.call(PUBLISH, grant.inbox, struct.pack('>Bc24dddd', 1, grant.id, now, grant.token, grant.last, grant.lasts))
        end
        if next_id and next_head ~= head then
          local soonest = struct.unpack('>d', first, 49)
          local further = leases > 1 and redis.call('ZRANGEBYLEX', KEYS[2], '[e', '(f', 'LIMIT', '0', '1')[1]
          if further then soonest = math.min(soonest, (struct.unpack('>d', further, 2))) end
          local inbox = INBOX .. string.format('%08x%08x%08x%08x', struct.unpack('>I4I4I4I4', next_id))
          redis.call(PUBLISH, inbox, struct.pack('>Bc24dddd', 2, next_id, now, soonest, 0, 0))
        end
        return now
      end
    end
  end
end
