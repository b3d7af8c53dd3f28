-- The rules: the counterpart of `model.rs`, function by function with the same names; `store` is its `end`, and the functions of
-- the clock are its `Now`. `table.lua` stores what they change.
--
-- KEYS  1 the resource, 2 the clock: see table.lua
-- ARGV  1 the arguments of the command
-- Returns nothing: it defines the functions that the commands use.
--
-- No token below `floor` is granted. `raw` is the string in the key, if it is one; `drawn` is an id of the clock that is not a token yet.
--
-- In every command expired entries are removed first. Then the requester's entries are marked as reachable, the head of the
-- queue is granted what fits, and the command runs. Finally the key gets the form that tells what is left, and an expiry.
--@layer

local requester, requester_client = nil, nil
local requester_parked = 0 -- its client was found absent in this step
local had_ready_waiter = false
local loaded = nil -- the plain form as it was
local pushes = {}
local clock_error = nil -- why the clock gave no token: nothing more is granted in this step, and everything else is stored

local function note_expiry(expiry)
  if expiry < h.next_expiry then h.next_expiry = expiry end
end

-- To a waiter or a holder. A stored lease has no secret, and its inbox is that of its client.
local function push(to, kind, a, b, c)
  local secret = kind == 1 and to.secret or nil
  pushes[#pushes + 1] = { id = to.id, client = to.client, inbox = to.inbox, kind = kind, a = a or 0, b = b or 0, c = c or 0, secret = secret }
end

local function weight_of(owner)
  local l = heaviest_lease_of(owner)
  return l and l.weight or 0
end

local function add_lease(l)
  local before = 0
  if l.has_owner == 1 and h.leases > 0 then before = weight_of(l.owner) end
  note_expiry(l.expires_at)
  put_lease(l)
  h.leases = h.leases + 1
  h.in_use = h.in_use + math.max(l.weight, before) - before
end

local function remove_lease(l)
  drop_lease(l)
  h.leases = h.leases - 1
  local after = 0
  if l.has_owner == 1 then after = weight_of(l.owner) end
  h.in_use = h.in_use - (math.max(l.weight, after) - after)
end

local function remove_waiter(w)
  drop_waiter(w)
  queue.has_moved = true
end

local function set_parked(client, parked)
  local is_changed = park(client, parked)
  queue.has_moved = queue.has_moved or is_changed
  if requester_client == client then requester_parked = is_changed and parked or 0 end
end

local function expire()
  if h.next_expiry <= now then
    -- Once in a while the key's expiry is set again, in case that another program took it away.
    key.stays = 0
    local next_expiry = NEVER
    for _, l in ipairs(each_lease()) do
      store_part()
      if l.expires_at > now then
        next_expiry = math.min(next_expiry, l.expires_at)
      else
        remove_lease(l)
        if l.claimed == 0 then set_parked(l.client, 1) end
      end
    end
    h.next_expiry = math.min(next_expiry, end_tombstones())
  end
  if h.next_deadline <= now then
    local expired, next_deadline = expired_waiters()
    for i = 1, #expired do
      store_part()
      remove_waiter(waiter_in(expired[i]))
    end
    -- Of many waiters those that have left are looked for every second; until then they may be counted, and are granted nothing.
    h.next_deadline = h.waiters > 100 and math.max(next_deadline, now + 1000000) or next_deadline
  end
  queue.is_current = true
end

--@layer
local function fits(weight)
  return weight <= h.capacity - h.in_use
end

local function held_by(has_owner, owner)
  if has_owner == 1 and h.leases > 0 then
    local l = heaviest_lease_of(owner)
    if l and l.retained == 0 then return l end
  end
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
    local p = pushes[i]
    if p.id == id and p.kind == 1 then
      table.remove(pushes, i)
      return p
    end
  end
end

local function remove_replaced(l)
  take_back_grant(l.id)
  remove_lease(l)
end

local function replaceable(id, sequence)
  local l = held_lease(string.sub(id, 1, 16) .. sequence)
  if l and l.has_owner == 0 then return l end
end

local function invalidate_head_hint()
  h.head = 0
  queue.has_moved = true
end

-- The clock's next id, which follows the server's time and never falls, or this later one.
local function draw(id)
  return write(function() return redis.pcall('XADD', KEYS[2], 'MAXLEN', '0', id, 't', '') end)
end

-- As `draw`; nothing if the clock refuses, for example because memory is full.
local function try_draw(id)
  local is_drawn, reply = pcall(draw, id)
  if is_drawn then return reply end
  clock_error = type(reply) == 'table' and reply.err or reply
end

-- Takes the next token, but none below `floor`, and those up to `reserve` behind it; moves the clock behind the last. Returns
-- nothing if the clock gives none. It is called before anything is changed that depends on the token.
local function next_tokens(reserve)
  local id = drawn or try_draw('*')
  drawn = nil
  if not id then return nil end
  local next_one, is_token = token_of(id)
  local token = math.max(next_one, h.last_token + 1, floor)
  local last = token
  -- All locks share the clock, so it does not run far ahead for tokens that may never be used.
  if token <= (now / 1000 + MAX_LEAD) * TOKENS_PER_MS then last = token + reserve end
  if last > NEVER then
    clock_error = 'CLOCKAHEAD ' .. KEYS[2] .. ' is too far ahead for tokens below 2^53'
    return nil
  end
  if (last > next_one or not is_token) and not try_draw(id_of(last)) then return nil end
  h.last_token = last
  return token, last
end

-- Makes `floor` the last token, and moves the clock there. What the clock gives meanwhile is kept, if it is later.
local function raise_clock()
  drawn = draw('*')
  if token_of(drawn) < floor then
    draw(id_of(floor))
    drawn = nil
  end
  h.last_token = floor
end

-- What a waiter holds already, if anything; and whether it was to take the place of a lease that is gone.
local function current_lease(w)
  if w.replaces == '' then return held_by(w.has_owner, w.owner), false end
  local held = replaceable(w.id, w.replaces)
  return held, not held
end

-- Whether what it adds to what it holds fits; that; and whether what it was to take the place of is gone.
local function fits_waiter(w)
  local held, is_gone = current_lease(w)
  return not is_gone and fits(math.max(w.weight - (held and held.weight or 0), 0)), held, is_gone
end

-- The first waiter that is not parked; or the requester, though it is parked, if it is earlier and what it waits for fits.
local function next_candidate()
  local first = first_ready_waiter()
  local w = requester_parked == 1 and waiter(requester)
  if w and (not first or w.place < first.place) then
    local does_fit, _, is_gone = fits_waiter(w)
    if does_fit or is_gone then return w end
  end
  return first
end

-- Returns nothing, and changes nothing, if the clock gives no token.
local function lease_to_waiter(w, held)
  local valid_for = math.min(w.ttl, CLAIM_WINDOW)
  local granted_at = now
  local token, last
  if held and w.replaces == '' then
    token, last = held.token, held.token
  else
    token, last = next_tokens(w.reserve)
    if not token then return nil end
  end
  remove_waiter(w)
  if held and w.replaces ~= '' then
    remove_replaced(held)
    granted_at = hold_start(held)
  end
  w.token, w.granted_at, w.expires_at, w.claimed, w.retained = token, granted_at, now + valid_for, 0, 0
  add_lease(w)
  return token, last, valid_for
end

local function grant()
  while true do
    store_part()
    local w = next_candidate()
    if not w then break end
    local does_fit, held, is_gone = fits_waiter(w)
    -- An attempt may fit although the head of the queue does not.
    if not does_fit and not is_gone and (not requester or requester == w.id or h.in_use >= h.capacity) then break end
    if is_gone then
      remove_waiter(w)
      push(w, 3)
    elseif requester ~= w.id and not is_reachable(w.inbox) then
      set_parked(w.client, 1)
    elseif not does_fit then
      break
    else
      local token, last, valid_for = lease_to_waiter(w, held)
      if not token then break end
      push(w, 1, token, last, valid_for)
    end
  end
end

-- Of several leases it may be too early, as the next expiry is: a renewal does not look for the lease that ends first.
local function head_hint()
  local l = only_lease()
  if l then return l.expires_at end
  if h.leases > 0 then return h.next_expiry end
  -- Without tokens nothing is granted, so the head does not look again at once.
  return clock_error and now + 1000000 or now
end

local function has_ready_waiter()
  return first_ready_waiter() ~= nil
end

local function notify_holder()
  local l = only_lease()
  if l and l.retained == 0 and l.token < h.last_token then push(l, 4) end
end

local function notify_head()
  local w = first_ready_waiter()
  if not w then
    h.head, h.head_client = 0, NO_CLIENT
  elseif w.place ~= h.head then
    h.head, h.head_client = w.place, w.client
    push(w, 2, head_hint())
  end
end

local function shown(l)
  return { l.id, l.has_owner, l.owner, l.weight, l.token, l.granted_at, l.expires_at, l.retained, l.metadata }
end

-- A client that acquires or renews is reachable: its waiters are not parked any more.
local function mark_client_alive(client)
  if h.parked > 0 then set_parked(client, 0) end
end

local function publish_all()
  for i = 1, #pushes do publish(pushes[i]) end
end

local function store()
  if has_ready_waiter() and not had_ready_waiter then notify_holder() end
  if queue.has_moved then notify_head() end
  local only = h.waiters + h.tombstones == 0 and only_lease()
  local plain = only and pack_plain(only)
  if h.leases + h.waiters + h.tombstones == 0 then
    if raw or key.is_table then redis.call('DEL', KEYS[1]) end
  elseif not plain then
    return store_table(publish_all)
  elseif key.is_table or plain ~= loaded then
    write(function() return redis.pcall('SET', KEYS[1], plain, 'PXAT', math.ceil(only.expires_at / 1000)) end)
  end
  publish_all()
end

-- Whether the key is leasehold's, or free.
local function begin()
  load()
  had_ready_waiter = has_ready_waiter()
  if raw and first and not is_unbounded then loaded = pack_plain(first) end
  expire()
  return not foreign
end
