-- Goes before a script: it may then do only what every known proxy and managed server allows. A command that is refused, or a key that
-- is not declared, is an error.

local unruled, declared = redis, {}
for _, key in ipairs(KEYS) do declared[key] = true end

local REFUSED = { TIME = 1, PUBLISH = 1, SPUBLISH = 1, PUBSUB = 1, SCRIPT = 1, INFO = 1, WAIT = 1, CONFIG = 1, CLIENT = 1 }

local function refusal_of(command, key)
  if REFUSED[string.upper(command)] then return 'ERR This Redis command is not allowed from script: ' .. command end
  if not declared[key] then return 'ERR Script attempted to access a non local key: ' .. tostring(key) end
end

local redis = setmetatable({
  call = function(command, key, ...)
    local refusal = refusal_of(command, key)
    if refusal then error(refusal, 0) end
    return unruled.call(command, key, ...)
  end,
  pcall = function(command, key, ...)
    local refusal = refusal_of(command, key)
    if refusal then return { err = refusal } end
    return unruled.pcall(command, key, ...)
  end,
}, { __index = unruled })
