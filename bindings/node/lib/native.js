"use strict";
// The back end for stores: the native module, as the contract in backend.d.ts asks for.
//
// An operation of the module is a started call. Those that are not done at once are in `running` until the module names their keys, which it does on
// this thread: in `drain`, after a call that let others go on, or when it calls `drain` itself.

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
/** @type {Map<number, (operation: any) => void>} */
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

/** Settles the operations that have ended. */
function drain() {
  for (const key of environment.take()) {
    const settle = running.get(key);
    if (settle !== undefined) {
      running.delete(key);
      settle();
    }
  }
}

/** Whether a value of the module is an error. */
function isFailed(value) {
  return value instanceof native.Failed;
}

function errorOf(failed) {
  const { class: name, message, reason } = failed;
  if (name === "LeaseLost") return new errors.LeaseLost(message, reason ?? "gone");
  const known = errors[name];
  return new (known ?? errors.LeaseholdError)(message);
}

/** A value of the module, or its error as an exception. */
function checked(value) {
  if (isFailed(value)) throw errorOf(value);
  return value;
}

/** What an operation results in. */
function resultOf(operation) {
  const value = checked(operation.result());
  return value instanceof native.Lease ? new Lease(value) : value;
}

/** A started operation as a call. `keepsAlive`: whether the process waits for it. */
function call(started, keepsAlive = true) {
  let operation;
  try {
    operation = checked(started);
  } catch (error) {
    return { promise: Promise.reject(error), cancel() {}, isRefused: true };
  } finally {
    // What this call let go on ends in the same turn.
    if (environment.isReady) drain();
  }
  if (operation.isDone) return { promise: settled(operation), cancel() {} };
  const key = operation.key;
  if (keepsAlive) begin();
  const promise = new Promise((resolve, reject) => {
    running.set(key, () => {
      if (keepsAlive) end();
      try {
        resolve(resultOf(operation));
      } catch (error) {
        reject(error);
      }
    });
  });
  const cancel = () => {
    if (!running.delete(key)) return;
    if (keepsAlive) end();
    operation.cancel();
    if (environment.isReady) drain();
  };
  return { promise, cancel };
}

async function settled(operation) {
  return resultOf(operation);
}

class Lease {
  #lease;

  constructor(lease) {
    this.#lease = lease;
    this.name = lease.name;
    this.token = lease.token;
  }

  get tokens() {
    const flat = this.#lease.tokens();
    const tokens = Object.create(null);
    for (let at = 0; at < flat.length; at += 2) tokens[flat[at]] = flat[at + 1];
    return tokens;
  }

  remaining() {
    return this.#lease.remaining();
  }

  loss() {
    return this.#lease.loss()?.reason ?? null;
  }

  lossError() {
    return this.#lease.loss()?.message ?? `"${this.name}": the lease is not lost`;
  }

  lost() {
    return call(this.#lease.lost(environment), false);
  }

  renew() {
    return call(this.#lease.renew(environment));
  }

  release(timeout) {
    return call(this.#lease.release(environment, timeout));
  }

  detach() {
    return call(this.#lease.detach(environment));
  }

  downgrade() {
    return call(this.#lease.downgrade(environment));
  }

  upgrade(wait) {
    return call(this.#lease.upgrade(environment, wait));
  }

  setMinHold(milliseconds) {
    const failed = this.#lease.setMinHold(milliseconds);
    if (failed) throw errorOf(failed);
  }

  abandon() {
    this.#lease.abandon();
    if (environment.isReady) drain();
  }
}

class Lock {
  #lock;

  constructor(lock) {
    this.#lock = lock;
  }

  acquire(wait) {
    return call(this.#lock.acquire(environment, wait));
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
    return call(this.#client.forceRelease(environment, kind, name, token));
  }

  close(timeout) {
    return call(this.#client.close(environment, timeout));
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

module.exports = { open, records: () => call(native.records(environment), false), TestStore: native.TestStore, errorOf };
