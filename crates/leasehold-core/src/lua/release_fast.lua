-- The usual cases of `release.lua`, before the rules are even read, for a command that says nothing but its acquisition: it
-- is held by nobody else, and nobody waits; or the first in the queue is there, and takes all of it. They do what the rules
-- would. (A lease that has not ended in form 1 was granted less than an hour ago, so its token still has to be remembered.)

if raw then
  local form, _, _, ends, id = struct.unpack('>Bdddc24', raw)
  -- Should memory be full, the rules know what to do.
  if form == 1 and id == ARGV[1] and ends > now and redis.pcall('SETRANGE', KEYS[1], '0', '\0') == #raw then
    return now
  end
end

-- Who waits, if that is all that the release is about: nothing has expired, nobody is passed over, and the lease is the only
-- one. Whatever waits longest then waits for this lease.
local ready = nil
if raw and string.byte(raw) == 2 and floor == 0 and string.sub(raw, 98, 121) == ARGV[1] then
  local leases, waiters, parked, tombstones, next_expiry = struct.unpack('>ddddd', raw, 42)
  local kept, is_named = struct.unpack('>BB', raw, 155)
  if leases == 1 and waiters > 0 and parked == 0 and tombstones == 0 and next_expiry > now and kept + is_named == 0 then
    ready = redis.call('ZRANGEBYLEX', KEYS[2], '[r', '(s', 'LIMIT', '0', '2')
  end
end
local id = ready and ready[1] and string.sub(ready[1], -24)
local row = id and redis.call('ZRANGEBYLEX', KEYS[2], '[w' .. id, '(w' .. id .. '\255', 'LIMIT', '0', '1')[1]
if row then
  local capacity, _, last, next_place, head, _, waiters, _, _, next_expiry, _, stays = struct.unpack('>dddddddddddd', raw, 2)
  local place, weight, ttl, reserve, _, deadline, _, is_named, _, metadata, replaces =
    struct.unpack('>ddddddBBI4c0I4c0Bc0', row, 26)
  local token, lasts = math.max(last + 1, now), math.min(ttl, 3000000)
  local ends, last = now + lasts, token + reserve
  local remember_until = math.max(last + 1, now + 3600000000)
  local takes_all = (weight == capacity or waiters == 1) and is_named == 0 and replaces == '' and reserve < 3600000000
  local inbox = INBOX .. string.format('%08x%08x%08x%08x', struct.unpack('>I4I4I4I4', id))
  if takes_all and stays > remember_until + 1000000 and redis.call('PUBSUB', NUMSUB, inbox)[2] > 0 then
    redis.call('ZREM', KEYS[2], row, struct.pack('>c1ddc24', 'd', deadline, place, id), ready[1])
    local next_id, next_head = nil, 0
    if waiters == 1 then
      redis.call('SET', KEYS[1], struct.pack('>Bdddc24BI4I4I8I4', 1, last, stays, ends, id, 8, capacity, weight, lasts,
        reserve) .. metadata, 'KEEPTTL')
    else
      next_head, next_id = struct.unpack('>dc24', ready[2], 2)
      redis.call('SET', KEYS[1], struct.pack('>Bddddddddddddc24ddddBBBI4I4', 2, capacity, weight, last, next_place,
        next_head, 1, waiters - 1, 0, 0, math.min(next_expiry, ends), remember_until, stays, id, weight, token, now, ends,
        0, 0, 0, 0, #metadata) .. metadata, 'KEEPTTL')
    end
    redis.call(PUBLISH, inbox, struct.pack('>Bc24dddd', 1, id, now, token, last, lasts))
    if next_id and next_head ~= head then
      inbox = INBOX .. string.format('%08x%08x%08x%08x', struct.unpack('>I4I4I4I4', next_id))
      redis.call(PUBLISH, inbox, struct.pack('>Bc24dddd', 2, next_id, now, ends, 0, 0))
    end
    return now
  end
end
