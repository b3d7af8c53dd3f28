"use strict";
// What is asked for: terms as the path and the fields of a request.

const { InvalidInput, Unsupported } = require("../errors");

// The server's default: three times a failover of ten seconds.
const DEFAULT_TTL = 30_000;
const MIN_TTL = 100;
const MAX_TTL = 2_592_000_000;

const KINDS = {
  __proto__: null,
  mutex: "mutex",
  reentrant: "mutex",
  once_per: "mutex",
  read: "rw",
  write: "rw",
  semaphore: "semaphore",
  election: "election",
  set: "mutex",
};

/** The path of a lock. Names of folders do not arrive in a path, so that they go into the query. */
function lockPath(kind, name, action = "") {
  const locks = `/v1/locks/${encodeURIComponent(kind)}`;
  if (name === "." || name === "..") return `${locks}/_${action}?name=${name}`;
  return `${locks}/${encodeURIComponent(name)}${action}`;
}

function requestOf(terms, settings) {
  refuseUnsupported(terms);
  const kind = KINDS[terms.kind];
  const { names } = terms;
  if (names.length === 0 || names.includes("")) throw new InvalidInput("a lock has a name");
  const ttl = terms.ttl ?? settings.ttl ?? DEFAULT_TTL;
  if (!(ttl >= MIN_TTL && ttl <= MAX_TTL)) throw new InvalidInput(`ttl is ${MIN_TTL} to ${MAX_TTL} milliseconds, not ${ttl}`);
  const fields = { ttl_ms: Math.round(ttl) };
  const label = terms.label ?? settings.label;
  if (label !== null) fields.label = label;
  if (terms.minHold > 0) fields.min_hold_ms = Math.round(terms.minHold);
  switch (terms.kind) {
    case "set":
      fields.names = names;
      break;
    case "reentrant":
      fields.owner = terms.owner;
      break;
    case "read":
    case "write":
      fields.mode = terms.kind;
      break;
    case "semaphore":
      fields.capacity = terms.capacity;
      fields.permits = terms.permits;
      break;
    case "once_per":
      fields.once_per_ms = Math.round(terms.period);
      break;
    default:
  }
  const isSet = terms.kind === "set";
  return {
    path: isSet ? "/v1/locks/acquire" : lockPath(kind, names[0], "/acquire"),
    what: `${kind} ${names.map((name) => JSON.stringify(name)).join(", ")}`,
    names,
    ttl,
    isRenewed: terms.autoRenew,
    maxHold: terms.maxHold,
    isSet,
    // Those that did not start the work of a period do not wait for the next one.
    isOnce: terms.kind === "once_per",
    fields,
  };
}

function refuseUnsupported(terms) {
  const store = "use it with the address of its store in place of the server's";
  const refused = [
    [!(terms.kind in KINDS), "an upgradable reader", store],
    [terms.bridge !== null, "a bridge to another library's lock", store],
    [terms.maxWaiters !== null, "maxWaiters", "the server has limits of its own"],
    [terms.replicas !== null, "replicas", store],
    [terms.traceId !== null, "traceId", "put it into the label"],
    [terms.atLeastOnce, "oncePer with atLeastOnce", store],
    [terms.kind === "set" && terms.minHold > 0, "minHold of several locks", "lock them one by one"],
  ];
  for (const [isGiven, what, instead] of refused) {
    if (isGiven) throw new Unsupported(`a server's HTTP API does not have ${what}: ${instead}`);
  }
}

module.exports = { lockPath, requestOf };
