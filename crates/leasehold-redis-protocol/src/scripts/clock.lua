-- The server's time, and the tokens that follow it.
--
-- KEYS  2 the clock: see rows.lua
-- ARGV  none
-- Returns nothing: it sets the local `now`, in microseconds, and defines the functions that convert tokens.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local NEVER = 9007199254740991
local TOKENS_PER_MS = 2048

-- The stream id that is this token.
local function id_of(token)
  return string.format('%.0f-%.0f', math.floor(token / TOKENS_PER_MS), token % TOKENS_PER_MS)
end

-- The token that an id of the clock stands for, and whether it does: a clock that stands still, or was set back, gives more ids in
-- one millisecond than there are tokens.
local function token_of(id)
  local ms, sequence = string.match(id, '(%d+)%-(%d+)')
  return ms * TOKENS_PER_MS + sequence, tonumber(sequence) < TOKENS_PER_MS
end
