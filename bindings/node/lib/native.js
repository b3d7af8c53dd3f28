"use strict";
// The back end for stores: the native module, as the contract in backend.d.ts asks for.
//
// A call of the module returns its result, or a number: the key of a call that has none yet. It is in `running` until the module names the key, which it
// does on this thread: in `drain`, after a call that let others go on, or when it calls `drain` itself.

const { join } = require("node:path");
const errors = require("./errors");

const FOLDER = join(__dirname, "..");

/** Loads the module for this platform: the one of this folder, or the package of the platform. */
function load() {
  const platform = `${process.platform}-${process.arch}`;
  let failure;
  for (const place of [join(FOLDER, "leasehold.node"), `leasehold-${platform}`]) {
    try {
      return require(place);
    } catch (error) {
      if (error.code !== "MODULE_NOT_FOUND") throw error;
      failure = error;
    }
  }
  throw new errors.Unsupported(
    `leasehold has no native module for ${platform}: use the http: or unix: address of a server of leasehold serve`,
    { cause: failure },
  );
}

const native = load();
/** How to settle those without a result, by their keys. @type {Map<number, () => void>} */
const running = new Map();
const environment = new native.Environment(drain);

// A pending call keeps the process alive; what is held does not.
const alive = setInterval(() => {}, 0x7fffffff);
alive.unref();
let pending = 0;

function begin() {
  if (pending++ === 0) alive.ref();
}

function end() {
  if (--pending === 0) alive.unref();
}

/** Settles the calls that have a result. */
function drain() {
  for (const key of environment.take()) {
    const settle = running.get(key);
    if (settle !== undefined) {
      running.delete(key);
      settle();
    }
  }
}

function errorOf(failed) {
  const { class: name, message, reason } = failed;
  if (name === "LeaseLost") return new errors.LeaseLost(message, reason ?? "gone");
  return new (errors[name] ?? errors.LeaseholdError)(message);
}

/** A value of the module, or its error as an exception. */
function checked(value) {
  if (value instanceof native.Failed) throw errorOf(value);
  return value;
}

/** A result of the module as one of the contract. */
function valueOf(result) {
  if (result === null || typeof result !== "object") return result;
  if ("lease" in result) return new Lease(result);
  return checked(result);
}

const ignore = () => {};

/** A call that was started: its result, or its key. `keepsAlive`: whether the process waits for it. */
function call(started, keepsAlive = true) {
  const begun = typeof started === "number" ? wait(started, keepsAlive) : ended(started);
  // What this call let go on ends in the same turn. It may be the call itself, so it is in `running` before.
  if (environment.isReady) drain();
  return begun;
}

function ended(result) {
  try {
    return { promise: Promise.resolve(valueOf(result)), cancel: ignore };
  } catch (error) {
    return { promise: Promise.reject(error), cancel: ignore };
  }
}

function wait(key, keepsAlive) {
  if (keepsAlive) begin();
  const promise = new Promise((resolve, reject) => {
    running.set(key, () => {
      if (keepsAlive) end();
      try {
        resolve(valueOf(environment.result(key)));
      } catch (error) {
        reject(error);
      }
    });
  });
  const cancel = () => {
    if (!running.delete(key)) return;
    if (keepsAlive) end();
    environment.cancel(key);
    if (environment.isReady) drain();
  };
  return { promise, cancel };
}

class Lease {
  #lease;

  constructor({ lease, name, token }) {
    this.#lease = lease;
    this.name = name;
    this.token = token;
  }

  get tokens() {
    const flat = environment.tokens(this.#lease);
    const tokens = Object.create(null);
    for (let at = 0; at < flat.length; at += 2) tokens[flat[at]] = flat[at + 1];
    return tokens;
  }

  remaining() {
    return environment.remaining(this.#lease);
  }

  loss() {
    return environment.loss(this.#lease)?.reason ?? null;
  }

  lossError() {
    return environment.loss(this.#lease)?.message ?? `"${this.name}": the lease is not lost`;
  }

  lost() {
    return call(environment.lost(this.#lease), false);
  }

  renew() {
    return call(environment.renew(this.#lease));
  }

  release(timeout) {
    return this.#ending(call(environment.release(this.#lease, timeout ?? undefined)));
  }

  detach() {
    return this.#ending(call(environment.detach(this.#lease)));
  }

  downgrade() {
    return this.#ending(call(environment.downgrade(this.#lease)));
  }

  upgrade(wait) {
    return call(environment.upgrade(this.#lease, wait ?? undefined));
  }

  /** A call that ends the lease, unless it was refused. */
  #ending(started) {
    return { ...started, isRefused: environment.has(this.#lease) };
  }

  setMinHold(milliseconds) {
    const failed = environment.setMinHold(this.#lease, milliseconds);
    if (failed) throw errorOf(failed);
  }

  abandon() {
    environment.abandon(this.#lease);
    if (environment.isReady) drain();
  }
}

class Lock {
  #lock;

  constructor(lock) {
    this.#lock = lock;
  }

  acquire(wait) {
    return call(this.#lock.acquire(environment, wait ?? undefined));
  }
}

class Backend {
  #client;

  constructor(client) {
    this.#client = client;
  }

  get address() {
    return this.#client.address;
  }

  lock(terms) {
    return new Lock(checked(this.#client.lock(given(terms))));
  }

  connect() {
    return call(this.#client.connect(environment));
  }

  attach(text) {
    return call(this.#client.attach(environment, text));
  }

  inspect(kind, name) {
    return call(this.#client.inspect(environment, kind, name));
  }

  list() {
    return call(this.#client.list(environment));
  }

  forceRelease(kind, name, token) {
    return call(this.#client.forceRelease(environment, kind, name, token ?? undefined));
  }

  close(timeout) {
    return call(this.#client.close(environment, timeout ?? undefined));
  }
}

/** Without what is not set: null is not undefined to the module. */
function given(options) {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== null));
}

/** Notes the address. Nothing is sent. */
function open(url, settings) {
  if (settings.token !== null && settings.token !== undefined) {
    throw new errors.InvalidInput("token is for servers of leasehold serve (http:, https:, unix:)");
  }
  return new Backend(checked(native.open(environment, url, given(settings))));
}

// `beforeExit` is not emitted by `process.exit`. In a worker that is terminated the module does the same.
process.on("exit", () => environment.shutDown());

module.exports = { open, records: () => call(environment.records(), false), TestStore: native.TestStore, errorOf };
