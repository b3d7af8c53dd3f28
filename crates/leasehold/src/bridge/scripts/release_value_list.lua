-- Releases a lock that is a key with its holder's value, and wakes one waiter of the other library by an element of a list.
--
-- KEYS[1]  the lock
-- ARGV[1]  the holder's value
-- ARGV[2]  the list, whose elements waiters take off: no key of this call, so that a user without the right to it can release the lock
-- ARGV[3]  how long the element stays, in milliseconds
--
-- Returns 1, 2 if the user may not write the list, or 0 if the lock has another value or none.
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('del', KEYS[1])
-- One element at most: an old one would wake a second waiter in vain.
local cleared = redis.pcall('del', ARGV[2])
if type(cleared) == 'table' then return 2 end
-- The expiry is tried before there is something that would stay for ever without it.
for _, command in ipairs({ { 'pexpire', ARGV[2], ARGV[3] }, { 'lpush', ARGV[2], 1 } }) do
  if type(redis.pcall(unpack(command))) == 'table' then return 2 end
end
redis.call('pexpire', ARGV[2], ARGV[3])
return 1
