-- The usual case of `release.lua`, before the rules are even read: it is held by nobody else, nobody waits, and the command
-- says nothing but its acquisition. It does what the rules would. (A lease that has not ended was granted less than an hour
-- ago, so its token still has to be remembered.)

if raw then
  local form, _, _, ends, id = struct.unpack('>Bdddc24', raw)
  -- Should memory be full, the rules know what to do.
  if form == 1 and id == ARGV[1] and ends > now and redis.pcall('SETRANGE', KEYS[1], '0', '\0') == #raw then
    return now
  end
end
