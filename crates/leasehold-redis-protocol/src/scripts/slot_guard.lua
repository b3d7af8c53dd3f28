-- Before the rules, in a cluster: whether the key's slot is being moved. Until the move is over a script may delete a key, and may
-- not write it again, so a plain lease could not get rows.
--
-- KEYS  1 the resource: see table.lua
-- ARGV  none
-- Returns the error TRYAGAIN, with nothing written; without a reply the rules follow.
--
-- `raw` is the plain form. A key that does not exist shows the move, because every command for such a key is refused then.

if raw and type(redis.pcall('EXISTS', KEYS[1] .. ':')) == 'table' then
  return redis.error_reply('TRYAGAIN the hash slot of ' .. KEYS[1] .. ' is being moved')
end
