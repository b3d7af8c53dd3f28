-- The server's time.
--
-- KEYS  2 the clock: see table.lua
-- ARGV  none
-- Returns nothing: it sets the local `now`, in microseconds.

local time = NOW()
local now = time[1] * 1000000 + time[2]

local NEVER = 9007199254740991
local TOKENS_PER_MS = 2048
