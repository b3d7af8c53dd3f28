-- The end of a plain value.
--
-- KEYS, ARGV  none
-- Returns nothing: it defines a function.

-- Whether the value has this mark and token, for itself or before further numbers.
local function is_marked(raw, mark)
  local _, last = string.find(raw, mark, 25, true)
  return last and (last == #raw or string.byte(raw, last + 1) == 32)
end
