-- Around a script where a proxy or a managed server restricts what scripts may do: the time comes from the expiry of the clock of tokens,
-- and the client that has called the script publishes what it would have published.
--
-- KEYS  1 the resource, 2 the clock: see table.lua; 3 the key in which a new hash is built; 4 of a request, the key of its tombstone
-- ARGV  none
-- Returns what the script returns; if there is something to publish, 'publish', what the script returns, and a list with the digest in an
--       inbox's name and the message, in turn.

local outbox = {}
local ENDS, LONGEST, SHORTEST = 4102444800000, 2524608000000, 315360000000 -- 2100; what is left in 2020, and in 2090

local function left_of_clock()
  local left = redis.call('PTTL', KEYS[2])
  return left > SHORTEST and left < LONGEST and left
end

-- What TIME would answer, in whole milliseconds: the clock expires in 2100, and the server tells how long that is.
local function time_of_clock()
  local left = left_of_clock()
  if not left then
    -- It is new, or another program has changed its expiry.
    if redis.call('PEXPIREAT', KEYS[2], ENDS) == 0 then
      drawn = redis.call('XADD', KEYS[2], 'MAXLEN', '0', '*', 't', '')
      redis.call('PEXPIREAT', KEYS[2], ENDS)
    end
    left = left_of_clock()
    if not left then error('ERR the clock of the server is not between 2020 and 2090', 0) end
  end
  local ms = ENDS - left
  return { math.floor(ms / 1000), ms % 1000 * 1000 }
end

-- Who listens is not known.
local function subscribers()
  return { '', 1 }
end

local function publish_later(inbox, message)
  outbox[#outbox + 1] = inbox
  outbox[#outbox + 1] = message
end

local function script()
--@use script
end

local reply = script()
if #outbox > 0 then return { 'publish', reply, outbox } end
return reply
