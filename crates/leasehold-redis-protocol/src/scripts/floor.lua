-- The prelude of every script on a quorum node: reads the floor.
--
-- KEYS  those of the script
-- ARGV  the last '>d': no token below this one is granted, and a renewal raises the lease's token and the last token to it; 0 for none
-- Returns nothing: it sets the local `floor`.

local floor = struct.unpack('>d', ARGV[#ARGV])
