"use strict";
// A client of a store or a server.

const { inspect } = require("node:util");
const { InvalidInput, Timeout } = require("./errors");
const info = require("./info");
const { Lease } = require("./lease");
const { Election, Lock, OncePer, RwLock } = require("./lock");
const log = require("./log");
const {
  CLIENT_OPTIONS,
  LOCK_OPTIONS,
  MUTEX_OPTIONS,
  count,
  flag,
  known,
  milliseconds,
  optionalMilliseconds,
  optionalToken,
  secretText,
  settings,
  terms,
  text,
} = require("./terms");

const SERVERS = ["http:", "https:", "unix:"];

/** Loads only the back end that the address needs. */
function open(url, given) {
  if (SERVERS.some((scheme) => url.startsWith(scheme))) return require("./http").open(url, given);
  const native = require("./native");
  const backend = native.open(url, given);
  log.follow(native);
  return backend;
}

class Client {
  #backend;
  #prefix;
  #isClosed = false;

  constructor(address, options) {
    // It may have a password, so that it is not repeated.
    const url = secretText(address instanceof URL ? address.href : address, "the address of a store");
    if (!url.includes(":")) {
      throw new InvalidInput("the address of a store begins with a scheme, as redis://127.0.0.1 does, and this one has none");
    }
    known(options, CLIENT_OPTIONS);
    const { namespace } = options;
    if (namespace !== undefined && (text(namespace, "a namespace") === "" || namespace.endsWith(":"))) {
      throw new InvalidInput(`a namespace is a text that does not end with a colon, not ${inspect(namespace)}`);
    }
    this.#prefix = namespace === undefined ? "" : `${namespace}:`;
    this.#backend = open(url, settings(options));
  }

  /** Of `connect`. */
  async _connect() {
    try {
      await this.#backend.connect().promise;
    } catch (error) {
      this.#isClosed = true;
      this.#backend.close(0).promise.catch(() => {});
      throw error;
    }
    return this;
  }

  get address() {
    return this.#backend.address;
  }

  get isClosed() {
    return this.#isClosed;
  }

  #name(name) {
    return this.#prefix + text(name, "a lock's name");
  }

  lock(name, options = {}) {
    known(options, MUTEX_OPTIONS);
    return new Lock(this.#backend, terms("mutex", [this.#name(name)], options), options);
  }

  async acquire(name, options = {}) {
    return this.lock(name, options).acquire();
  }

  async tryLock(name, options = {}) {
    return this.lock(name, options).tryAcquire();
  }

  async using(name, ...rest) {
    const routine = rest.pop();
    const [options = {}] = rest;
    if (typeof routine !== "function") throw new InvalidInput(`what runs under the lock is a function, not ${inspect(routine)}`);
    const lock = Array.isArray(name) ? this.lockAll(name, options) : this.lock(name, options);
    return lock.using(routine);
  }

  reentrant(name, options) {
    known(options ?? {}, [...LOCK_OPTIONS, "owner"]);
    const owner = text(options?.owner, "owner");
    return new Lock(this.#backend, terms("reentrant", [this.#name(name)], options, { owner }), options);
  }

  rwlock(name, options = {}) {
    known(options, [...LOCK_OPTIONS, "bridge"]);
    const names = [this.#name(name)];
    return new RwLock((kind) => new Lock(this.#backend, terms(kind, names, options), options));
  }

  semaphore(name, options) {
    known(options ?? {}, [...LOCK_OPTIONS, "permits", "take"]);
    const own = { capacity: count(options?.permits, "permits"), permits: count(options.take ?? 1, "take") };
    return new Lock(this.#backend, terms("semaphore", [this.#name(name)], options, own), options);
  }

  lockAll(names, options = {}) {
    known(options, MUTEX_OPTIONS);
    if (typeof names === "string" || typeof names?.[Symbol.iterator] !== "function") {
      throw new InvalidInput(`several names are an array, not ${inspect(names)}`);
    }
    const all = Array.from(names, (name) => this.#name(name));
    if (new Set(all).size < all.length) throw new InvalidInput(`several names are different ones, not ${inspect(all)}`);
    return new Lock(this.#backend, terms("set", all, options), options);
  }

  oncePer(name, period, options = {}) {
    known(options, [...LOCK_OPTIONS, "atLeastOnce"]);
    const own = { period: milliseconds(period, "period"), atLeastOnce: flag(options.atLeastOnce, "atLeastOnce") };
    return new OncePer(this.#backend, terms("once_per", [this.#name(name)], options, own), options);
  }

  election(name, options = {}) {
    known(options, [...LOCK_OPTIONS, "bridge"]);
    return new Election(this.#backend, terms("election", [this.#name(name)], options), options);
  }

  /** The routine under a lock: for the name a text, or a function of the routine's arguments. */
  locked(name, ...rest) {
    const routine = rest.pop();
    const [options = {}] = rest;
    const { busy = "reject", ...others } = known(options, [...MUTEX_OPTIONS, "busy"]);
    if (busy !== "reject" && busy !== "skip") throw new InvalidInput(`busy is "reject" or "skip", not ${inspect(busy)}`);
    if (typeof routine !== "function") throw new InvalidInput(`what runs under the lock is a function, not ${inspect(routine)}`);
    if (typeof name !== "function") text(name, "a lock's name");
    const client = this;
    return async function locked(...parameters) {
      const lock = client.lock(typeof name === "function" ? name.apply(this, parameters) : name, others);
      let lease;
      try {
        lease = await lock.acquire();
      } catch (error) {
        if (busy === "skip" && error instanceof Timeout) return undefined;
        throw error;
      }
      return lease.use(() => routine.apply(this, parameters));
    };
  }

  async attach(detached) {
    return new Lease(await this.#backend.attach(secretText(detached, "a detached lease")).promise);
  }

  async inspect(name, kind = "mutex") {
    return info.lock(await this.#backend.inspect(text(kind, "a kind of lock"), this.#name(name)).promise);
  }

  async list() {
    const locks = info.locks(await this.#backend.list().promise);
    return locks.filter((lock) => lock.name.startsWith(this.#prefix));
  }

  async forceRelease(name, kind = "mutex", options = {}) {
    const token = optionalToken(known(options, ["token"]).token);
    const released = this.#backend.forceRelease(text(kind, "a kind of lock"), this.#name(name), token);
    return info.holders(await released.promise);
  }

  async close(options = {}) {
    const timeout = optionalMilliseconds(known(options, ["timeout"]).timeout, "timeout");
    if (this.#isClosed) return;
    this.#isClosed = true;
    await this.#backend.close(timeout).promise;
  }

  async [Symbol.asyncDispose]() {
    await this.close();
  }

  [Symbol.for("nodejs.util.inspect.custom")]() {
    return `<Client of ${this.address}>`;
  }
}

/** A client that has reached its store. */
async function connect(url, options = {}) {
  return new Client(url, options)._connect();
}

module.exports = { Client, connect };
