-- Keep several leases of one client, of which nothing is asked but that they run on.
--
-- KEYS  the state of each resource
-- ARGV  1 'c16': client; then '>I8I8' for each resource: sequence number, ttl
-- Returns the time alone when that is what `renew.lua` returns for each; otherwise a list of what it returns for each, with
-- false for those that have to be asked for alone.
--
-- `renew` is `renew_fast.lua` as a function: for anything else the rules have to be read, with the rows.

local client, replies, is_usual = string.sub(ARGV[1], 1, 16), {}, true

for i, state in ipairs(KEYS) do
  local sequence, ttl = struct.unpack('>c8I8', ARGV[1], 16 * i + 1)
  local reply = renew(state, client .. sequence, ttl) or false
  replies[i] = reply
  is_usual = is_usual and reply == now
end

if is_usual then return now end
return replies
