"use strict";
// Locks with their terms. Nothing is sent before one is acquired.

const { setTimeout: sleep } = require("node:timers/promises");
const { run } = require("./call");
const { Timeout } = require("./errors");
const info = require("./info");
const { Lease } = require("./lease");
const { known, milliseconds, optionalMilliseconds, optionalSignal } = require("./terms");

/** How long an acquisition waits, and its signal: what the call says, and what the lock says otherwise. */
function waitOf(lock, options, names = ["wait", "signal"]) {
  if (options === undefined) return lock;
  known(options, names);
  return {
    wait: options.wait === undefined ? lock.wait : optionalMilliseconds(options.wait, "wait"),
    signal: options.signal === undefined ? lock.signal : optionalSignal(options.signal),
  };
}

class AnyLock {
  #client;
  #terms;
  #backend = null;

  constructor(client, terms, options) {
    this.#client = client;
    this.#terms = terms;
    this.wait = optionalMilliseconds(options.wait, "wait");
    this.signal = optionalSignal(options.signal);
  }

  get name() {
    return this.#terms.names.join(",");
  }

  async tryAcquire(options) {
    const { signal } = waitOf(this, options, ["signal"]);
    return this._acquire(0, signal);
  }

  /** @returns {Promise<Lease | null>} */
  _acquire(wait, signal) {
    this.#backend ??= this.#client.lock(this.#terms);
    return run(() => this.#backend.acquire(wait), signal).then(leaseOf);
  }
}

const leaseOf = (backend) => (backend === null ? null : new Lease(backend));

class Lock extends AnyLock {
  async acquire(options) {
    const { wait, signal } = waitOf(this, options);
    const lease = await this._acquire(wait, signal);
    if (lease === null) throw new Timeout(`"${this.name}": not granted within ${wait} ms`);
    return lease;
  }

  async using(routine) {
    const lease = await this.acquire();
    return lease.use(routine);
  }
}

/** One start in each period. Whoever does not get it gets null. */
class OncePer extends AnyLock {
  async acquire(options) {
    const { wait, signal } = waitOf(this, options);
    return this._acquire(wait, signal);
  }

  async using(routine) {
    const lease = await this.acquire();
    return lease === null ? undefined : lease.use(routine);
  }
}

class RwLock {
  #make;

  constructor(make) {
    this.#make = make;
  }

  read() {
    return this.#make("read");
  }

  write() {
    return this.#make("write");
  }

  upgradable() {
    return this.#make("upgradable");
  }
}

class Election extends Lock {
  #client;

  constructor(client, terms, options) {
    super(client, terms, options);
    this.#client = client;
  }

  async leader() {
    const lock = info.lock(await this.#client.inspect("election", this.name).promise);
    return lock.holders.find((holder) => !holder.isRetained) ?? null;
  }

  /** The current leader first, then each that differs from the last one. */
  async *observe(options = {}) {
    known(options, ["every", "signal"]);
    const every = Math.max(10, options.every === undefined ? 1_000 : milliseconds(options.every, "every"));
    const signal = optionalSignal(options.signal) ?? undefined;
    let last;
    for (;;) {
      signal?.throwIfAborted();
      const leader = await this.leader();
      const token = leader?.token ?? null;
      if (token !== last) {
        last = token;
        yield leader;
      }
      await pause(Math.min(every, 0x7fffffff), signal);
    }
  }
}

async function pause(milliseconds, signal) {
  try {
    await sleep(milliseconds, undefined, { signal });
  } catch (error) {
    // The caller's reason, and not the timer's error.
    signal?.throwIfAborted();
    throw error;
  }
}

module.exports = { Election, Lock, OncePer, RwLock };
