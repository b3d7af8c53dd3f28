"use strict";
// Options as values: what the API passes to a back end. Times are milliseconds; null is what was not given.

const { inspect } = require("node:util");
const { InvalidInput } = require("./errors");

const CLIENT_OPTIONS = ["namespace", "ttl", "label", "maxWaiters", "replicas", "connectTimeout", "token"];
const LOCK_OPTIONS = [
  "ttl",
  "wait",
  "signal",
  "autoRenew",
  "minHold",
  "maxHold",
  "maxWaiters",
  "replicas",
  "label",
  "traceId",
  "detachable",
];
const MUTEX_OPTIONS = [...LOCK_OPTIONS, "globalFifo", "bridge"];

/** Refuses options that nobody reads: a mistyped `ttl` would be no ttl. */
function known(options, names) {
  if (options === null || typeof options !== "object") throw new InvalidInput(`options are an object, and these are of the type ${typeof options}`);
  for (const name of Object.keys(options)) {
    if (!names.includes(name)) throw new InvalidInput(`${name} is no option here: there are ${names.join(", ")}`);
  }
  return options;
}

function milliseconds(value, what) {
  if (typeof value !== "number" || !(value >= 0 && value <= Number.MAX_SAFE_INTEGER)) {
    throw new InvalidInput(`${what} is a number of milliseconds from 0 on, not ${inspect(value)}`);
  }
  return value;
}

/** As `milliseconds`; undefined, null and Infinity are no limit: null. So are 300,000 years. */
function optionalMilliseconds(value, what) {
  if (value === undefined || value === null) return null;
  if (typeof value === "number" && value > Number.MAX_SAFE_INTEGER) return null;
  return milliseconds(value, what);
}

/** As `text`, for what may have a secret in it: the value is not repeated. */
function secretText(value, what) {
  if (typeof value !== "string") throw new InvalidInput(`${what} is a text, and this one is of the type ${typeof value}`);
  if (!value.isWellFormed()) throw new InvalidInput(`${what} is no valid text`);
  return value;
}

function text(value, what) {
  if (typeof value !== "string") throw new InvalidInput(`${what} is a text, not ${inspect(value)}`);
  if (!value.isWellFormed()) throw new InvalidInput(`${what} is no valid text: ${inspect(value)}`);
  return value;
}

function optionalText(value, what) {
  return value === undefined || value === null ? null : text(value, what);
}

function flag(value, what, otherwise = false) {
  if (value === undefined) return otherwise;
  if (typeof value !== "boolean") throw new InvalidInput(`${what} is true or false, not ${inspect(value)}`);
  return value;
}

/** A number of 32 bits. */
function count(value, what) {
  if (!Number.isInteger(value) || value < 0 || value > 0xffffffff) {
    throw new InvalidInput(`${what} is a whole number from 0 on, not ${inspect(value)}`);
  }
  return value;
}

function optionalCount(value, what) {
  return value === undefined || value === null ? null : count(value, what);
}

function optionalToken(value) {
  if (value === undefined || value === null) return null;
  if (typeof value !== "bigint" || value <= 0n || value >= 1n << 64n) {
    throw new InvalidInput(`a fencing token is a positive bigint, not ${inspect(value)}`);
  }
  return value;
}

function optionalSignal(value) {
  if (value === undefined || value === null) return null;
  if (!(value instanceof AbortSignal)) throw new InvalidInput(`signal is an AbortSignal, not ${inspect(value)}`);
  return value;
}

function optionalBridge(value) {
  if (value === undefined || value === null) return null;
  if (!Array.isArray(value.terms)) {
    throw new InvalidInput(`a bridge is made by a function of leasehold.bridge, and is not ${inspect(value)}`);
  }
  return value.terms.map((term) => text(term, "a name of another library's lock"));
}

/** The settings of a client. */
function settings(options) {
  return {
    ttl: optionalMilliseconds(options.ttl, "ttl"),
    label: optionalText(options.label, "label"),
    maxWaiters: optionalCount(options.maxWaiters, "maxWaiters"),
    replicas: optionalCount(options.replicas, "replicas"),
    connectTimeout: optionalMilliseconds(options.connectTimeout, "connectTimeout"),
    token: options.token === undefined || options.token === null ? null : secretText(options.token, "token"),
  };
}

/**
 * What to lock, and how. `own`: what a kind has besides the options of every lock.
 */
function terms(kind, names, options, own = {}) {
  return {
    kind,
    names,
    ttl: optionalMilliseconds(options.ttl, "ttl"),
    autoRenew: flag(options.autoRenew, "autoRenew", true),
    minHold: options.minHold === undefined ? 0 : milliseconds(options.minHold, "minHold"),
    maxHold: optionalMilliseconds(options.maxHold, "maxHold"),
    maxWaiters: optionalCount(options.maxWaiters, "maxWaiters"),
    replicas: optionalCount(options.replicas, "replicas"),
    label: optionalText(options.label, "label"),
    traceId: optionalText(options.traceId, "traceId"),
    owner: null,
    permits: 1,
    capacity: 1,
    period: 0,
    atLeastOnce: false,
    globalFifo: flag(options.globalFifo, "globalFifo"),
    detachable: flag(options.detachable, "detachable"),
    bridge: optionalBridge(options.bridge),
    ...own,
  };
}

module.exports = {
  CLIENT_OPTIONS,
  LOCK_OPTIONS,
  MUTEX_OPTIONS,
  count,
  flag,
  known,
  milliseconds,
  optionalMilliseconds,
  optionalSignal,
  optionalToken,
  secretText,
  settings,
  terms,
  text,
};
