-- Extends several plain leases of one client.
--
-- KEYS  the key of each resource
-- ARGV  1 'c16': client; then '>c8I8' for each resource: sequence number, ttl
--       2 on a quorum node: see floor.lua
-- Returns the time alone if renew.lua would return it for each; otherwise a list of the replies of renew.lua, with false for a
--       lease that must be renewed by itself.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local client, at = struct.unpack('c16', ARGV[1])
local replies, is_usual = {}, true
for i, raw in ipairs(floor == 0 and redis.call('MGET', unpack(KEYS)) or KEYS) do
  local sequence, ttl
  sequence, ttl, at = struct.unpack('>c8I8', ARGV[1], at)
  local id = client .. sequence
  if floor == 0 and raw and string.sub(raw, 1, #id) == id then
    redis.call('PEXPIRE', KEYS[i], math.ceil(ttl / 1000))
    replies[i] = now
  else
    replies[i], is_usual = false, false
  end
end
if is_usual then return now end
return replies
