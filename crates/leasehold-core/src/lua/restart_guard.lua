-- Whether a store may vote that may have forgotten what it granted: before `acquire.lua`, where that is asked for.
--
-- A store that lost its data has no `born` key, and one that was started again, or that took over from another, has one of
-- another life. Both forget what was written last, and what that was nobody knows: it is over once the longest ttl has
-- passed. Until then the store abstains.
--
-- The key expires 90 days after the last vote: nothing that was granted before is held by then, and the next vote abstains as
-- that of a new store. Votes renew the expiry once an hour, so that few of them cost a write.
--
-- KEYS  3 born   '>dd': since when the server of that life can be trusted to know its leases; when this was written; then
--                which life that is
-- ARGV  3 '>d': the longest ttl there is; then which life of which server this is
-- Returns the time, and
--       12 until   abstains

if KEYS[3] then
  local longest = struct.unpack('>d', ARGV[3])
  local life, born = string.sub(ARGV[3], 9), redis.call('GET', KEYS[3])
  local since, written = now, nil
  if born and string.sub(born, 17) == life then
    local known_since, written_at = struct.unpack('>dd', born)
    -- Later than now: its clock was set back.
    if known_since <= now then since, written = known_since, written_at end
  end
  if not written or written > now or written < now - 3600000000 then
    redis.call('SET', KEYS[3], struct.pack('>dd', since, now) .. life, 'PXAT', math.ceil(now / 1000) + 7776000000)
  end
  if now < since + longest then return { now, 12, since + longest } end
end
