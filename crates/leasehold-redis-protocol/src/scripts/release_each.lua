-- Releases several leases, each for itself: what one `release.lua` after the other would do, at less than half of the price.
--
-- KEYS  the key of each resource, then the clock
-- ARGV  the acquisition of each lease
-- Returns 1 if all were plain leases; otherwise for each lease the reply of release.lua.
--
-- `release` is that script as a function.

local find = string.find
local replies, plain = {}, {}
for i, raw in ipairs(redis.call('MGET', unpack(KEYS))) do
  if raw and find(raw, ARGV[i], 1, true) == 1 then
    plain[#plain + 1] = KEYS[i]
    replies[i] = 1
  end
end
if #plain > 0 then redis.call('DEL', unpack(plain)) end
if #plain == #ARGV then return 1 end
for i = 1, #ARGV do
  if not replies[i] then
    drawn = nil
    local is_done, reply = pcall(release, { KEYS[i], KEYS[#KEYS] }, { ARGV[i] })
    replies[i] = (is_done or type(reply) == 'table') and reply or redis.error_reply(reply)
  end
end
return replies
