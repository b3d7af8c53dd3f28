-- The first lines of acquire.lua on a quorum node, after clock.lua and restart_guard.lua: grants a free lock, with no token below the
-- floor.
--
-- KEYS, ARGV and replies are those of acquire.lua; without a reply the rules follow. As on a single server, the key expires up to a
-- millisecond before the end of the lease, because PX counts from the millisecond in which the script began. No client trusts a
-- lease for that long.

if ARGV[2] ~= '' and redis.call('EXISTS', KEYS[1]) == 0 then
  -- Should the clock refuse, for example because memory is full, the rules know what to do.
  local id = redis.pcall('XADD', KEYS[2], 'MAXLEN', '0', '*', 't', '')
  if not id.err then
    local token, is_token = token_of(id)
    if is_token and token <= NEVER then
      if token < floor then
        token, id = floor, id_of(floor)
        redis.call('XADD', KEYS[2], 'MAXLEN', '0', id, 't', '')
      end
      local value = ARGV[1] .. string.format(' leasehold:4@%s %.0f %.0f', id, now, token)
      redis.call('SET', KEYS[1], value, 'NX', 'PX', ARGV[2])
      return { now, 1, token, token, (select(3, struct.unpack('>c24BI8', ARGV[1]))) }
    end
    drawn = id
  end
end
local has_ended = false -- no request is made of a quorum
local raw = redis.call('MGET', KEYS[1])[1]
