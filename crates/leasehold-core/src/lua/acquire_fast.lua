-- The usual case of `acquire.lua`, before the rules are even read: nobody holds it and nobody waits, and the attempt is
-- nothing special. It does what the rules would.
--
-- The state is what was said with a few numbers before it: what costs a script its time is calls, and then texts. For the
-- same reason the key's expiry, which has to be an hour from now at least, is only set once an hour.

local form, last, stays = 0, 0, 0
if raw then form, last, stays = struct.unpack('>Bdd', raw) end
if form == 0 and last < now then
  local flags, capacity, weight, ttl, reserve = struct.unpack('>BI4I4I8I4', ARGV[1], 25)
  if flags < 2 and weight > 0 and weight <= capacity and ttl <= 3600000000 and reserve < 3600000000 then
    if stays > now + 3601000000 then
      redis.call('SET', KEYS[1], struct.pack('>Bdddc0', 1, now + reserve, stays, now + ttl, ARGV[1]), 'KEEPTTL')
    else
      redis.call('SET', KEYS[1], struct.pack('>Bdddc0', 1, now + reserve, now + 7200000000, now + ttl, ARGV[1]),
        'PX', '7200000')
    end
    return now
  end
end
