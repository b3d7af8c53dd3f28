-- The rules: the counterpart of `model.rs`, function by function with the same names; `store` is its `end`. `table.lua` and `rows.lua`
-- store what they change, and have the clock, which is its `Now`.
--
-- KEYS  1 the resource, 2 the clock: see table.lua
-- ARGV  1 the arguments of the command
-- Returns nothing: it defines the functions that the commands use.
--
-- No token below `floor` is granted. `raw` is the string in the key, if it is one; `drawn` is an id of the clock that is not a token yet.
--
-- In every command expired entries are removed first. Then the requester's entries are marked as reachable, the head of the
-- queue is granted what fits, and the command runs. Finally the key gets the form that tells what is left, and an expiry.

local requester = nil
local requester_parked = false -- its client was found absent in this step
local queue_moved = false
local had_ready_waiter = waiters > parked
local pushes = {}

local function push(id, kind, a, b, c)
  pushes[#pushes + 1] = { id = id, kind = kind, a = a or 0, b = b or 0, c = c or 0 }
end

-- The weight of the entry's named owner: that of its heaviest lease.
local function weight_of(entry)
  local l = entry.has_owner == 1 and leases > 0 and heaviest_lease_of(entry.owner)
  return l and l.weight or 0
end

local function add_lease(l)
  local before = weight_of(l)
  put_lease(l)
  leases = leases + 1
  in_use = in_use + math.max(l.weight - before, 0)
end

local function remove_lease(l)
  drop_lease(l)
  leases = leases - 1
  in_use = in_use - math.max(l.weight - weight_of(l), 0)
end

local function remove_waiter(w)
  change_waiter(false, w)
  waiters = waiters - 1
  if w.is_parked then parked = parked - 1 end
  queue_moved = true
end

local function set_parked(id, is_parked)
  local client = client_of(id)
  local ready = ready_row_of(client)
  if not ready or is_parked == (first_row('p' .. client) and true or false) then return end
  change(not is_parked, ready)
  change(is_parked, 'p' .. client)
  local count = count_rows('q' .. client)
  parked = parked + (is_parked and count or -count)
  queue_moved = true
  if requester and client_of(requester) == client then requester_parked = is_parked end
end

local function expire()
  if next_expiry > now then return end
  -- Once in a while the key's expiry is set again, in case that another program took it away.
  stayed = 0
  local l = first_expiring_lease()
  while l and l.expires_at <= now do
    remove_lease(l)
    if l.claimed == 0 then set_parked(l.id, true) end
    l = first_expiring_lease()
  end
  local w = first_expiring_waiter()
  while w and w.deadline <= now do
    remove_waiter(w)
    w = first_expiring_waiter()
  end
  local id, ends = first_tombstone()
  while id and ends <= now do
    change(false, rows_of_tombstone(id, ends))
    tombstones = tombstones - 1
    id, ends = first_tombstone()
  end
  next_expiry = math.min(l and l.expires_at or NEVER, w and w.deadline or NEVER, ends or NEVER)
end

local function fits(weight)
  return weight <= capacity - in_use
end

local function held_by(entry)
  local l = entry.has_owner == 1 and leases > 0 and heaviest_lease_of(entry.owner)
  if l and l.retained == 0 then return l end
end

local function held_lease(id)
  local l = lease(id)
  if l and l.retained == 0 then return l end
end

-- Now, where the clock has been set back to before the grant.
local function hold_start(l)
  return math.min(l.granted_at, now)
end

local function take_back_grant(id)
  for i = 1, #pushes do
    if pushes[i].id == id and pushes[i].kind == 1 then return table.remove(pushes, i) end
  end
end

local function remove_replaced(l)
  take_back_grant(l.id)
  remove_lease(l)
end

local function replaceable(id, sequence)
  local l = held_lease(client_of(id) .. sequence)
  if l and l.has_owner == 0 then return l end
end

local function invalidate_head_hint()
  head = 0
  queue_moved = true
end

-- What a waiter holds already, if anything; and whether it was to take the place of a lease that is gone.
local function current_lease(w)
  if w.replaces == '' then return held_by(w), false end
  local held = replaceable(w.id, w.replaces)
  return held, not held
end

local function has_ready_waiter()
  return waiters > parked
end

local function first_ready()
  return has_ready_waiter() and first_ready_waiter()
end

-- Whether what it adds to what it holds fits; that; and whether what it was to take the place of is gone.
local function fits_waiter(w)
  local held, is_gone = current_lease(w)
  return not is_gone and fits(math.max(w.weight - (held and held.weight or 0), 0)), held, is_gone
end

-- The first waiter that is not parked; or the requester, though it is parked, if it is earlier and what it waits for fits.
local function next_candidate()
  local ready = first_ready()
  local w = requester_parked and waiter(requester)
  if w and (not ready or w.place < ready.place) then
    local does_fit, _, is_gone = fits_waiter(w)
    if does_fit or is_gone then return w end
  end
  return ready
end

-- Returns nothing, and changes nothing, if the clock gives no token.
local function lease_to_waiter(w, held)
  local token, last = nil, nil
  if held and w.replaces == '' then
    token, last = held.token, held.token
  else
    token, last = next_tokens(w.reserve)
    if not token then return nil end
  end
  remove_waiter(w)
  w.token, w.granted_at, w.claimed, w.retained = token, now, 0, 0
  if held and w.replaces ~= '' then
    remove_replaced(held)
    w.granted_at = hold_start(held)
  end
  local valid_for = math.min(w.ttl, CLAIM_WINDOW)
  w.expires_at = now + valid_for
  add_lease(w)
  return token, last, valid_for
end

local function grant()
  while true do
    local w = next_candidate()
    if not w then break end
    local does_fit, held, is_gone = fits_waiter(w)
    if is_gone then
      remove_waiter(w)
      push(w.id, 3)
    elseif not does_fit then
      break
    elseif requester ~= w.id and not is_reachable(w.id) then
      set_parked(w.id, true)
    else
      local token, last, valid_for = lease_to_waiter(w, held)
      if not token then break end
      push(w.id, 1, token, last, valid_for)
    end
  end
end

local function head_hint()
  local l = first_expiring_lease()
  return l and l.expires_at or now
end

local function notify_holder()
  local l = leases == 1 and first_expiring_lease()
  if l and l.retained == 0 and l.token < last_token then push(l.id, 4) end
end

local function notify_head()
  local w = first_ready()
  local place = w and w.place or 0
  if w and place ~= head then push(w.id, 2, head_hint()) end
  head = place
end

local function shown(l)
  return { l.id, l.has_owner, l.owner, l.weight, l.token, l.granted_at, l.expires_at, l.retained, l.metadata }
end

local function store()
  if has_ready_waiter() and not had_ready_waiter then notify_holder() end
  if queue_moved then notify_head() end
  if leases + waiters + tombstones == 0 then
    if raw or has_rows then redis.call('DEL', KEYS[1]) end
  elseif has_rows or is_changed or next(changes) then
    local only = leases == 1 and waiters + tombstones == 0 and first_expiring_lease()
    local value = only and pack_plain(only)
    if value then
      redis.call('SET', KEYS[1], value, 'PXAT', math.ceil(only.expires_at / 1000))
    else
      store_rows()
    end
  end
  for i = 1, #pushes do
    local p = pushes[i]
    publish(p.id, p.kind, p.a, p.b, p.c)
  end
end

-- Runs a command. One of a client that acquires or renews shows that it is reachable: its waiters are not parked any more.
local function step(command, sender)
  if foreign then return { now, 13, foreign } end
  expire()
  if sender and parked > 0 then set_parked(sender, false) end
  grant()
  local reply, is_known = command()
  store()
  return reply or redis.error_reply(clock_error), is_known
end
