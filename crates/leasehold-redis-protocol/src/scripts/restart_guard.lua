-- Runs after clock.lua and before acquire_voter.lua, on a quorum node that abstains: whether the server may have lost leases.
--
-- A server that lost its data has no `born` key. A server that was restarted, or that took over from another one, finds the
-- key of another run id or replication id: each promotion makes a new one of these, also of a server that was the master before. Either
-- may have lost its last writes. It abstains until the maximum ttl has passed, because every lost lease has expired by then.
--
-- A server also makes a new replication id with its first replica, for example a backup, and `repl-backlog-ttl` (an hour by default) after
-- its last one has left. It was not promoted then, and does not abstain: a promotion keeps the old id as master_replid2, and these two make
-- that all zeros. They can hide a promotion only if it is as long ago as `repl-backlog-ttl`, when the leases that it lost have expired,
-- unless the maximum ttl is longer. The script can't read that setting, and takes it for an hour.
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
  local run_id, born = string.sub(ARGV[4], at), redis.call('GET', KEYS[3])
  local info = redis.call('INFO', 'replication')
  local life = run_id .. (string.match(info, 'master_replid:(%x+)') or '')
  local since, written = now, nil
  if born then
    local known_since, written_at, at = struct.unpack('>dd', born)
    local known = string.sub(born, at)
    -- Later than now: its clock was set back.
    if known_since <= now then
      if known == life then
        since, written = known_since, written_at
      elseif longest <= 3600000000 and string.sub(known, 1, #run_id) == run_id and string.find(info, 'role:master', 1, true)
        and string.find(info, 'master_replid2:0+%s') then
        since = known_since
      end
    end
  end
  if not written or written > now or written < now - 3600000000 then
    redis.call('SET', KEYS[3], struct.pack('>dd', since, now) .. life, 'PXAT', math.ceil(now / 1000) + 7776000000)
  end
  if now < since + longest then return { now, 12, since + longest } end
end
