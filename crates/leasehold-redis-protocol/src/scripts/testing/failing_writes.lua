-- For tests: the writes of what follows fail from the one of the number `failing` on, or those of the command of that name, as if
-- the user lacked the right. With an empty text none fails.

local able, number, writes = redis, tonumber(failing), 0

local WRITES = { DEL = 1, HDEL = 1, HSET = 1, PEXPIRE = 1, PEXPIREAT = 1, PUBLISH = 1, RENAME = 1, SET = 1, SPUBLISH = 1,
  XADD = 1, XTRIM = 1 }

local function failing_at_writes(run)
  return function(command, ...)
    if WRITES[command] then
      writes = writes + 1
      -- An error of the server, as each of them reports it to a script.
      if command == failing or number and writes >= number then return run('GET') end
    end
    return run(command, ...)
  end
end

local redis = setmetatable(
  { call = failing_at_writes(able.call), pcall = failing_at_writes(able.pcall) }, { __index = able })
