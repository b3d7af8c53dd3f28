"use strict";
// What `inspect` and `list` return. Tokens exceed the numbers of JSON.parse, so they are texts before it reads them.

// In a string of JSON a quote is escaped, so these are names of fields.
const TOKENS = /"(token|last_token)":\s*(\d+)/g;

function parse(json) {
  return JSON.parse(json.replace(TOKENS, '"$1":"$2"'));
}

function processOf(fields) {
  return {
    host: fields.host ?? null,
    pid: fields.pid ?? null,
    program: fields.program ?? null,
    label: fields.label ?? null,
    traceId: fields.trace_id ?? null,
  };
}

function holderOf(holder) {
  return {
    client: holder.client,
    token: BigInt(holder.token),
    weight: holder.weight,
    mode: holder.mode ?? null,
    owner: holder.owner ?? null,
    heldFor: holder.held_for_ms,
    expiresIn: holder.expires_in_ms,
    isRetained: holder.retained,
    isOwn: holder.is_own,
    process: processOf(holder.metadata),
  };
}

function waiterOf(waiter) {
  return {
    client: waiter.client,
    position: waiter.position,
    weight: waiter.weight,
    mode: waiter.mode ?? null,
    waitingFor: waiter.waiting_for_ms,
    isSkipped: waiter.skipped,
    isOwn: waiter.is_own,
    process: processOf(waiter.metadata),
  };
}

function lockOf(info) {
  return {
    kind: info.kind,
    name: info.name,
    capacity: info.capacity,
    inUse: info.in_use,
    lastToken: info.last_token === null ? null : BigInt(info.last_token),
    holders: info.holders.map(holderOf),
    waiters: info.waiters.map(waiterOf),
    isForeign: info.foreign !== null,
  };
}

module.exports = {
  parse,
  lock: (json) => lockOf(parse(json)),
  locks: (json) => parse(json).map(lockOf),
  holders: (json) => parse(json).map(holderOf),
};
