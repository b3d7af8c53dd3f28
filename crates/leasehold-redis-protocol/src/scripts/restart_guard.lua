-- Runs after clock.lua and before acquire_voter.lua, on a quorum node that abstains: whether the server may have lost leases.
--
-- A server that lost its data has no `born` key. A server that was restarted, or that took over from another one, finds the
-- key of another run id or replication id: each promotion makes a new one of these, also of a server that was the master before. Either
-- may have lost its last writes. It abstains until the maximum ttl has passed, because every lost lease has expired by then.
--
-- The key expires 90 days after the last vote. Every earlier lease has expired by then, and the next vote abstains like that of
-- a new server. Votes extend the expiry once an hour, so that few of them cost a write.
--
-- KEYS  3 born   '>dd': since when the memory of the server with that run id is complete; when this was written; then the
--                run id and the replication id
-- ARGV  4 '>d': the maximum ttl in use; then the server's run id
-- Returns the time, and
--       12 until   abstains

if KEYS[3] then
  local longest, at = struct.unpack('>d', ARGV[4])
  local life, born = string.sub(ARGV[4], at), redis.call('GET', KEYS[3])
  life = life .. (string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or '')
  local since, written = now, nil
  if born then
    local known_since, written_at, at = struct.unpack('>dd', born)
    -- Later than now: its clock was set back.
    if string.sub(born, at) == life and known_since <= now then since, written = known_since, written_at end
  end
  if not written or written > now or written < now - 3600000000 then
    redis.call('SET', KEYS[3], struct.pack('>dd', since, now) .. life, 'PXAT', math.ceil(now / 1000) + 7776000000)
  end
  if now < since + longest then return { now, 12, since + longest } end
end
