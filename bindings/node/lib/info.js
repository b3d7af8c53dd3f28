"use strict";
// What `inspect` and `list` return. Tokens exceed the numbers of JSON.parse, so they are texts before it reads them.

const { LeaseholdError } = require("./errors");

// In a string of JSON a quote is escaped, so these are names of fields.
const TOKENS = /"(token|last_token)":\s*(\d+)(?=\s*[,}])/g;

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

/** Reads the answer of a back end. That of a server may be anything. */
function read(json, of) {
  try {
    return of(parse(json));
  } catch (error) {
    throw new LeaseholdError("the server's answer is not understood: is it of another version?", { cause: error });
  }
}

module.exports = {
  parse,
  lock: (json) => read(json, lockOf),
  locks: (json) => read(json, (all) => all.map(lockOf)),
  holders: (json) => read(json, (all) => all.map(holderOf)),
};
