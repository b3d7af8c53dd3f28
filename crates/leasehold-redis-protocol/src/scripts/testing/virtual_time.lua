-- For tests: what follows has the time `virtual` (microseconds) instead of the server's.
--
-- A key that has expired is deleted first, as a server does before a script runs. On the server the keys expire at the virtual
-- time, so a test chooses times that are far enough ahead of the server's.

local server, virtual_ms = redis, math.floor(virtual / 1000)

local function expiry_of(key)
  local expiry = server.pcall('PEXPIRETIME', key)
  if type(expiry) == 'number' then return expiry end
  -- Redis 6.2 does not have it. The two times must be of one millisecond.
  while true do
    local before, left, after = server.call('TIME'), server.call('PTTL', key), server.call('TIME')
    local ms = before[1] * 1000 + math.floor(before[2] / 1000)
    if left < 0 then return left end
    if ms == after[1] * 1000 + math.floor(after[2] / 1000) then return ms + left end
  end
end

for _, key in ipairs(KEYS) do
  local expiry = expiry_of(key)
  if expiry >= 0 and expiry <= virtual_ms then server.call('DEL', key) end
end

local function text(number) return string.format('%.0f', number) end

-- What `*` would be.
local function next_id(key)
  local last_ms, last_sequence = 0, 0
  if server.call('EXISTS', key) == 1 then
    local stream = server.call('XINFO', 'STREAM', key)
    for i = 1, #stream do
      if stream[i] == 'last-generated-id' then last_ms, last_sequence = string.match(stream[i + 1], '(%d+)%-(%d+)') end
    end
  end
  if virtual_ms > tonumber(last_ms) then return text(virtual_ms) .. '-0' end
  return last_ms .. '-' .. text(last_sequence + 1)
end

local function at_virtual_time(run)
  return function(command, key, ...)
    local args = { ... }
    if command == 'TIME' then
      return { text(math.floor(virtual / 1000000)), text(virtual % 1000000) }
    elseif command == 'PTTL' then
      local expiry = expiry_of(key)
      return expiry < 0 and expiry or expiry - virtual_ms
    elseif command == 'EXISTS' then
      local expiry = expiry_of(key)
      if expiry >= 0 and expiry <= virtual_ms then return 0 end
    elseif command == 'PEXPIRE' then
      return run('PEXPIREAT', key, text(args[1] + virtual_ms))
    elseif command == 'XADD' and args[3] == '*' then
      args[3] = next_id(key)
    elseif command == 'SET' then
      local at = args[2] == 'PX' and 2 or 3
      if args[at] == 'PX' then args[at], args[at + 1] = 'PXAT', text(args[at + 1] + virtual_ms) end
    end
    return run(command, key, unpack(args))
  end
end

local redis = setmetatable(
  { call = at_virtual_time(server.call), pcall = at_virtual_time(server.pcall) }, { __index = server })
