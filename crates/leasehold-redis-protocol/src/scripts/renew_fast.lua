-- The fast path of renew.lua: the lease is the one in the state, nothing has expired, no waiter is skipped, no tokens are
-- requested, and the clock was not set back since the grant. Does what the rules would do, in place.
--
-- KEYS  `state` is the key, and `raw` its content
-- ARGV  `id`, `ttl` and `reserve` are the command's
-- Returns what renew.lua returns; without a reply the rules follow.
--
-- In forms 0 and 1 the lease ends within an hour of its grant, so the key stays long enough.

if raw and reserve == 0 then
  local ends = now + ttl
  local form, last, _, ended, holder, flags, capacity, weight, before = struct.unpack('>Bdddc24BI4I4I8', raw)
  if form == 2 and floor > 0 then last = struct.unpack('>d', raw, 18) end
  if floor > last then
    -- The rules know how.
  elseif form == 1 and holder == id and ended > now then
    local granted_at = ended - before
    before = ends - granted_at
    if granted_at <= now and before <= 3600000000 then
      local renewed = struct.pack('>dc24BI4I4I8', ends, id, flags % 8, capacity, weight, before)
      -- Should memory be full, the rules know what to do.
      if redis.pcall('SETRANGE', state, '17', renewed) == #raw then return now end
    end
  elseif form == 2 and #raw > 97 then
    local waiters, parked, _, next_expiry, remember_until, stays, holder, weight, token, granted_at, _, _, kept =
      struct.unpack('>ddddddc24ddddBB', raw, 50)
    if holder == id and kept == 0 and granted_at <= now and parked == 0 and next_expiry > now and stays >= ends + 1000000 then
      local renewed = struct.pack('>dddc24ddddB', math.min(next_expiry, ends), remember_until, stays, id, weight, token,
        granted_at, ends, 1)
      if redis.pcall('SETRANGE', state, '73', renewed) == #raw then
        if waiters == 0 then return now end
        return { now, 7, ttl, 1, 0, 0 }
      end
    end
  end
end
