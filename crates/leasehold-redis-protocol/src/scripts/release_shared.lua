-- Before the rules in release.lua: a shared lease is given back. Does what the rules would do, at a third of their price.
--
-- KEYS, ARGV and replies are those of release.lua; without a reply the rules follow. The lease has no owner, and it is not the last
-- one. Nothing has expired, and there is no waiter and no tombstone. `row` is the header's, if there is one.

local function release_shared()
  local s, first = unpack_header(row)
  if s.leases < 2 or s.waiters + s.tombstones > 0 or s.next_expiry <= now then return end
  local gone, replaced, l = { row }, '', #first > 0 and unpack_lease(first)
  if l and l.id == ARGV[1] then
    first = ''
  else
    gone[2] = first_row('l' .. ARGV[1])
    if not gone[2] then return end
    l = unpack_lease(gone[2])
    gone[3] = struct.pack(BY_TIME, 'e', l.expires_at, l.id)
    replaced = gone[2] .. gone[3]
  end
  if l.retained + l.has_owner > 0 then return end
  -- The other leases stay in their rows, also the last one: its next renewal makes it plain.
  s.serial, s.leases, s.in_use = s.serial - 1, s.leases - 1, s.in_use - l.weight
  -- Should memory be full, the rules know what to do.
  local added = redis.pcall('ZADD', KEYS[1], '0', pack_header(s, first) .. replaced)
  if type(added) == 'table' then return end
  redis.call('ZREM', KEYS[1], unpack(gone))
  return now
end

local released = row and #row >= struct.size(HEADER) and release_shared()
if released then return released end
