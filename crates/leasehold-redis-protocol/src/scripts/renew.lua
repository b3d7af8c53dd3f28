-- Extends a lease, or claims a pushed one. With a ttl of 0 it only asks for the lease.
--
-- KEYS  1 the resource, 2 the clock: see table.lua
-- ARGV  1 '>c24I8I4': acquisition, ttl, reserve; then ` leasehold:4@` and a stream id if only the lease with this token is renewed
--       2 in a cluster: the inbox name without the client's digest; on a quorum node: see floor.lua
-- Returns the time alone if the lease is extended by that ttl, there are no waiters, and no tokens were requested; otherwise
--       the time, and
--       7 valid_for, contended (0, 1), first token, last token   extended; the tokens are 0 if none were requested
--       8                                                    not held

local id, ttl, reserve = struct.unpack('>c24I8I4', ARGV[1])
local mark = #ARGV[1] > 36 and string.sub(ARGV[1], 37)
local raw = redis.call('MGET', KEYS[1])[1]
if raw and floor == 0 and reserve == 0 and ttl > 0 and string.sub(raw, 1, #id) == id and (not mark or is_marked(raw, mark)) then
  redis.call('PEXPIRE', KEYS[1], math.ceil(ttl / 1000))
  local time = NOW()
  return time[1] * 1000000 + time[2]
end
--@use rules

may_exceed_memory = true
if not begin() then return { now, 8 } end
mark_client_alive(string.sub(id, 1, 16))
grant()
local reply = { now, 8 }
local l = held_lease(id)
if l and (not mark or l.token == token_of(mark)) then
  if ttl > 0 then
    l.claimed = 1
    l.granted_at = hold_start(l)
    l.expires_at = now + ttl
    note_expiry(l.expires_at)
  end
  if floor > h.last_token then
    -- It is one lease at several stores, with one token.
    l.token = floor
    raise_clock()
  end
  put_lease(l)
  local token, last = nil, nil
  if reserve > 0 then token, last = next_tokens(reserve) end
  reply = { now, 7, l.expires_at - now, has_ready_waiter() and 1 or 0, token or 0, last or 0 }
end
store()
return reply
