-- Keep several leases of one client, of which nothing is asked but that they run on.
--
-- KEYS  the state of each resource
-- ARGV  1 'c16': client; then '>I8I8' for each resource: sequence number, ttl
-- Returns the time alone when that is what `renew.lua` returns for each; otherwise a list of what it returns for each, with
-- false for those that have to be asked for alone.
--
-- `renew` is `renew_fast.lua` as a function: for anything else the rules have to be read, with the rows.

local client, said = string.sub(ARGV[1], 1, 16), string.sub(ARGV[1], 17)
local replies, is_usual = {}, true

for i = 1, #KEYS do
  local renewal = client .. string.sub(said, 16 * i - 15, 16 * i) .. '\0\0\0\0'
  replies[i] = renew({ KEYS[i] }, { renewal, ARGV[2] }) or false
  is_usual = is_usual and replies[i] == now
end

if is_usual then return now end
return replies
