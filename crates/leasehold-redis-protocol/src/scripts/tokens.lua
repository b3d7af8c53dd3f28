-- The tokens that the clock's ids stand for.
--
-- KEYS, ARGV  none
-- Returns nothing: it defines functions.

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
