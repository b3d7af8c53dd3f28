-- Around a script where a proxy or a managed server restricts what scripts may do: the time comes from the clock of tokens, and the
-- client that has called the script publishes what it would have published.
--
-- KEYS  1 the resource, 2 the clock: see table.lua; 3 the key in which a new hash is built; 4 of a request, the key of its tombstone
-- ARGV  none
-- Returns what the script returns; if there is something to publish, 'publish', what the script returns, and a list with the digest in an
--       inbox's name and the message, in turn.

local outbox = {}

-- What TIME would answer, in whole milliseconds. The id may become a token afterwards.
local function time_of_clock()
  if not drawn then
    drawn = redis.pcall('XADD', KEYS[2], 'MAXLEN', '0', '*', 't', '')
    if MAY_EXCEED_MEMORY and drawn.err and string.find(drawn.err, 'OOM') then
      -- Once the script has written something that takes no memory, full memory refuses nothing more.
      redis.call('XTRIM', KEYS[2], 'MAXLEN', '0')
      drawn = redis.pcall('XADD', KEYS[2], 'MAXLEN', '0', '*', 't', '')
    end
    if drawn.err then error(drawn.err, 0) end
  end
  local ms = string.match(drawn, '%d+')
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
