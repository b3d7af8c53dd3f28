-- Keep a lease, or claim a pushed one.
--
-- ARGV  1 '>c24I8I4': acquisition, ttl, reserve
-- Returns the time alone when it runs on for that ttl, nobody waits and no tokens were asked for; otherwise the time, and
--       7 lasts, wanted (0, 1), first token, last token   it runs on; the tokens are 0 where none were asked for
--       8                                                 not held

may_exceed_memory = true
begin(raw)
hear(id)
grant()
local reply = { now, 8 }
local l = held_lease(id)
if l then
  l.claimed = 1
  l.granted_at = held_since(l)
  l.expires_at = now + ttl
  soonest_expiry(l.expires_at)
  if floor > h.last_token then
    -- It is one lease at several stores, with one token.
    remember_token(floor)
    l.token = floor
  end
  put_lease(l)
  local token, last = 0, 0
  if reserve > 0 then token, last = next_tokens(reserve) end
  reply = { now, 7, ttl, is_awaited() and 1 or 0, token, last }
end
store(raw)
return reply
