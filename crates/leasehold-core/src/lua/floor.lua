-- What one of several stores that vote is told of the others, before any command.
--
-- ARGV  2 '>d': no token below this one is given, and a renewal raises the lease's and the last one to it; 0 for none

local floor = struct.unpack('>d', ARGV[2])
