"use strict";
// The class of the package redlock (node-redlock 5), on the engine of leasehold. Programs that use it keep their calls.
//
// What differs: docs/node.md lists it. A lock waits in a queue and is handed over, in place of being tried again. `using` is renewed outside of the event
// loop. The connections are leasehold's own, with the options of the ioredis clients.

const { EventEmitter } = require("node:events");
const bridge = require("./lib/bridge");
const { connect } = require("./lib/client");
const { InvalidInput, LeaseLost, LeaseholdError, Timeout, Unsupported } = require("./lib/errors");
const { addressOf, prefixOf } = require("./lib/ioredis");
const { secretText } = require("./lib/terms");

const DEFAULTS = Object.freeze({
  driftFactor: 0.01,
  retryCount: 10,
  retryDelay: 200,
  retryJitter: 100,
  automaticExtensionThreshold: 500,
});

/** What this class has besides the settings of redlock. */
const OWN = ["bridge", "addresses"];

const NO_QUORUM = "The operation was unable to achieve a quorum during its retry window.";

/** The shortest ttl of the engine. */
const MIN_TTL = 100;
const MAX_TIMER = 0x7fffffff;

/** Another holder has the resource. */
class ResourceLockedError extends Error {
  constructor(message) {
    super(message);
    this.name = "ResourceLockedError";
  }
}

/** The operation has failed. */
class ExecutionError extends Error {
  constructor(message, attempts) {
    super(message);
    this.attempts = attempts;
    this.name = "ExecutionError";
  }
}

class Lock {
  /** @type {import("./lib/lease").Lease[]} */
  #leases;
  #timer;

  constructor(redlock, resources, leases, attempts, expiration) {
    this.redlock = redlock;
    this.resources = resources;
    this.#leases = leases;
    this.attempts = attempts;
    this.expiration = expiration;
    this.value = leases.map((lease) => String(lease.token)).join(",");
    // A lock that is not extended ends, although the engine renews it.
    this.#expireAt(expiration);
  }

  #expireAt(expiration) {
    const left = Math.max(0, expiration - Date.now());
    this.#timer = setTimeout(() => {
      if (Date.now() < expiration) this.#expireAt(expiration);
      else for (const lease of this.#leases) lease.release().catch(() => {});
    }, Math.min(left, MAX_TIMER));
    this.#timer.unref();
  }

  /** The fencing token of the first resource. */
  get token() {
    return this.#leases[0].token;
  }

  async release() {
    return this.redlock.release(this);
  }

  async extend(duration) {
    return this.redlock.extend(this, duration);
  }

  /** For the class `Redlock`: the leases, which this lock does not end any more. */
  _take() {
    clearTimeout(this.#timer);
    return this.#leases;
  }
}

class Redlock extends EventEmitter {
  #addresses;
  #prefix;
  #isBridged;
  #opened = null;

  constructor(clients, settings = {}, scripts = undefined) {
    super();
    // An error without a listener ends no program: that a resource is locked is one.
    this.on("error", () => {});
    this.clients = new Set(clients);
    if (this.clients.size === 0) throw new Error("Redlock must be instantiated with at least one redis client.");
    if (scripts !== undefined && Object.keys(scripts).length > 0) {
      throw new Unsupported("scripts of the program's own cannot be used: leasehold has its own");
    }
    this.#isBridged = settings.bridge ?? true;
    this.settings = { ...DEFAULTS, ...numbersOf(settings) };
    const prefixes = new Set([...this.clients].map(prefixOf));
    if (prefixes.size > 1) throw new Unsupported("the clients have different key prefixes, so that their keys differ");
    [this.#prefix] = prefixes;
    const { addresses } = settings;
    if (addresses !== undefined && !(Array.isArray(addresses) && addresses.length > 0)) throw new InvalidInput("addresses are an array of texts");
    this.#addresses = addresses?.map((address) => secretText(address, "an address")) ?? [...this.clients].map(addressOf);
  }

  /** Opens the engine's own connections at the first use, and tries again if that failed. */
  #client() {
    this.#opened ??= connect(this.#addresses.length === 1 ? this.#addresses[0] : `redlock:${this.#addresses.join(" ")}`).catch((error) => {
      this.#opened = null;
      throw error;
    });
    return this.#opened;
  }

  async quit() {
    const opened = this.#opened;
    // One that could not connect is closed.
    if (opened !== null) await opened.then((client) => client.close(), () => {});
    await Promise.all([...this.clients].map((client) => client.quit()));
  }

  async acquire(resources, duration, settings) {
    checkDuration(duration);
    const { driftFactor, wait } = this.#merged(settings);
    const start = Date.now();
    const deadline = start + wait;
    const leases = [];
    try {
      const client = await this.#client();
      // In one order, so that two programs never wait for each other.
      for (const name of [...new Set(resources)].sort()) {
        leases.push(await this.#lock(client, name, duration).acquire({ wait: Math.max(0, deadline - Date.now()) }));
      }
    } catch (error) {
      await Promise.allSettled(leases.map((lease) => lease.release()));
      throw this.#failed(error, [...resources].length);
    }
    leases.sort((one, other) => resources.indexOf(this.#resource(one.name)) - resources.indexOf(this.#resource(other.name)));
    // The wait is over: the time of the lock counts from here.
    return new Lock(this, resources, leases, [this.#votes()], Date.now() + duration - drift(driftFactor, duration));
  }

  #lock(client, resource, duration) {
    const key = this.#prefix + resource;
    const foreign = this.#addresses.length === 1 ? bridge.nodeRedlock(key) : bridge.redlock(this.#addresses, key);
    return client.lock(key, { ttl: Math.max(duration, MIN_TTL), ...(this.#isBridged ? { bridge: foreign } : {}) });
  }

  #resource(name) {
    return name.slice(this.#prefix.length);
  }

  async release(lock, settings) {
    this.#merged(settings);
    // It is over, whatever comes of it.
    lock.expiration = 0;
    const released = await Promise.allSettled(lock._take().map((lease) => releaseOf(lease)));
    const failed = released.find(({ status }) => status === "rejected");
    if (failed !== undefined) throw this.#failed(failed.reason, lock.resources.length);
    return { attempts: [this.#votes()] };
  }

  async extend(existing, duration, settings) {
    checkDuration(duration);
    const { driftFactor } = this.#merged(settings);
    const start = Date.now();
    if (existing.expiration < start) throw new ExecutionError("Cannot extend an already-expired lock.", []);
    const leases = existing._take();
    try {
      await Promise.all(leases.map((lease) => lease.renew()));
    } catch (error) {
      await Promise.allSettled(leases.map((lease) => lease.release()));
      throw this.#failed(error, existing.resources.length);
    }
    existing.expiration = 0;
    return new Lock(this, existing.resources, leases, [this.#votes()], start + duration - drift(driftFactor, duration));
  }

  async using(resources, duration, settingsOrRoutine, optionalRoutine) {
    checkDuration(duration);
    const settings = typeof settingsOrRoutine === "function" ? undefined : settingsOrRoutine;
    const routine = optionalRoutine ?? settingsOrRoutine;
    if (typeof routine !== "function") throw new Error("INVARIANT: routine is not a function.");
    if (this.#merged(settings).automaticExtensionThreshold > duration - 100) {
      throw new Error("A lock `duration` must be at least 100ms greater than the `automaticExtensionThreshold` setting.");
    }
    const lock = await this.acquire(resources, duration, settings);
    // From here on the engine renews it, until the routine has ended.
    const leases = lock._take();
    const controller = new AbortController();
    const { signal } = controller;
    const abort = ({ target }) => {
      if (signal.aborted) return;
      signal.error = this.#failed(target.reason, resources.length);
      controller.abort(signal.error);
    };
    for (const lease of leases) {
      if (lease.signal.aborted) abort({ target: lease.signal });
      else lease.signal.addEventListener("abort", abort, { once: true });
    }
    let value;
    try {
      value = await routine(signal);
    } catch (error) {
      // What went wrong first is what counts.
      await lock.release().catch(() => {});
      throw error;
    }
    await lock.release();
    return value;
  }

  #merged(given) {
    const settings = { ...this.settings, ...numbersOf(given ?? {}) };
    // -1 is infinity, for settings that come from a file.
    const retries = settings.retryCount === -1 ? Infinity : settings.retryCount;
    const wait = retries === 0 ? 0 : retries * Math.max(1, settings.retryDelay);
    return { ...settings, wait };
  }

  /** Who has agreed. The engine decides over all servers, and does not tell their votes apart. */
  async #votes(error) {
    const clients = [...this.clients];
    return {
      membershipSize: clients.length,
      quorumSize: Math.floor(clients.length / 2) + 1,
      votesFor: new Set(error === undefined ? clients : []),
      votesAgainst: new Map(error === undefined ? [] : clients.map((client) => [client, error])),
    };
  }

  /** The error of this class for one of the engine, which the listeners of "error" get. */
  #failed(error, count) {
    if (error instanceof InvalidInput || error instanceof Unsupported || !(error instanceof LeaseholdError)) return error;
    const isLocked = error instanceof Timeout || error instanceof LeaseLost;
    const cause = isLocked
      ? new ResourceLockedError(`The operation was applied to: 0 of the ${count} requested resources.`)
      : error;
    this.emit("error", cause);
    const failed = new ExecutionError(NO_QUORUM, [this.#votes(cause)]);
    failed.cause = error;
    return failed;
  }
}

/** Releases a lease, also one that was lost: that is an error here. */
async function releaseOf(lease) {
  lease.check();
  await lease.release();
}

function numbersOf(settings) {
  const numbers = {};
  for (const [name, value] of Object.entries(settings)) {
    if (OWN.includes(name) || value === undefined) continue;
    if (!(name in DEFAULTS)) throw new InvalidInput(`${name} is no setting of Redlock: there are ${[...Object.keys(DEFAULTS), ...OWN].join(", ")}`);
    if (typeof value !== "number" || Number.isNaN(value)) throw new InvalidInput(`${name} is a number`);
    numbers[name] = value;
  }
  return numbers;
}

function checkDuration(duration) {
  if (!Number.isSafeInteger(duration) || duration <= 0) throw new Error("Duration must be an integer value in milliseconds.");
}

/** What redlock leaves for the drift of clocks, and for the precision of the server's. */
function drift(factor, duration) {
  return Math.round(factor * duration) + 2;
}

module.exports = Redlock;
module.exports.default = Redlock;
module.exports.Redlock = Redlock;
module.exports.Lock = Lock;
module.exports.ResourceLockedError = ResourceLockedError;
module.exports.ExecutionError = ExecutionError;
