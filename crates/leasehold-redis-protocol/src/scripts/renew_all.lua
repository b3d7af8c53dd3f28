-- Extends several leases of one client, on the fast path only.
--
-- KEYS  the state of each resource
-- ARGV  1 'c16': client; then '>I8I8' for each resource: sequence number, ttl
--       2 on a quorum node: see floor.lua
-- Returns the time alone if renew.lua would return it for each; otherwise a list of the replies of renew.lua, with false for a
--       lease that must be renewed by itself.
--
-- `renew` is renew_fast.lua as a function. Any other case needs the rules and the rows.

local client, replies, is_usual = string.sub(ARGV[1], 1, 16), {}, true

for i, state in ipairs(KEYS) do
  local sequence, ttl = struct.unpack('>c8I8', ARGV[1], 16 * i + 1)
  local reply = renew(state, client .. sequence, ttl) or false
  replies[i] = reply
  is_usual = is_usual and reply == now
end

if is_usual then return now end
return replies
