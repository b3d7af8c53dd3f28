-- Whether a store may vote that may have forgotten what it granted: before `acquire.lua`, where that is asked for.
--
-- A store that lost its data has no `born` key, and one that was started again, or that took over from another, has one of
-- another life. Both forget what was written last, and what that was nobody knows: it is over once the longest ttl has
-- passed. Until then the store abstains.
--
-- KEYS  3 born   '>d': since when the server of that life can be trusted to know its leases; then which life that is
-- ARGV  3 '>d': the longest ttl there is; then which life of which server this is, as far as its clients know
-- Returns the time, and
--       12 until   abstains

if KEYS[3] then
  local longest = struct.unpack('>d', ARGV[3])
  local life, born = string.sub(ARGV[3], 9), redis.call('GET', KEYS[3])
  -- A client that may not ask which life it is believes the others, who can't agree with it about that.
  local is_same = born and (life == '' or string.sub(born, 9) == life)
  local since = is_same and struct.unpack('>d', born)
  -- Later than now: its clock was set back.
  if not since or since > now then
    since = now
    redis.call('SET', KEYS[3], struct.pack('>d', now) .. life)
  end
  if now < since + longest then return { now, 12, since + longest } end
end
