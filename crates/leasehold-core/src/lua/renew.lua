-- Keep a lease, or claim a pushed one.
--
-- ARGV  2 acquisition  3 ttl  4 reserve
-- Returns the time, and
--       7 lasts, wanted (0, 1), first token, last token   it runs on; the tokens are 0 where none were asked for
--       8                                                 not held

may_exceed_memory = true
begin(raw)
hear(ARGV[2])
grant()
local reply = { now, 8 }
local l = held_lease(ARGV[2])
if l then
  local ttl, reserve = tonumber(ARGV[3]), tonumber(ARGV[4])
  l.claimed = 1
  l.expires_at = now + ttl
  soonest_expiry(l.expires_at)
  put_lease(l)
  local token, last = 0, 0
  if reserve > 0 then token, last = next_tokens(reserve) end
  reply = { now, 7, ttl, h.waiters > 0 and 1 or 0, token, last }
end
store(raw)
return reply
