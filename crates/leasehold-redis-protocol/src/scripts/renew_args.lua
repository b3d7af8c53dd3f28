-- Reads the arguments of renew.lua.
--
-- KEYS and ARGV are those of renew.lua.
-- Returns nothing: it sets the locals of renew_fast.lua.

local state, id, ttl, reserve = KEYS[1], struct.unpack('>c24I8I4', ARGV[1])
