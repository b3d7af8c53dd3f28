"use strict";
// A lease: its token, its time and its loss.

const { run } = require("./call");
const { LeaseLost, Timeout } = require("./errors");
const { known, milliseconds, optionalMilliseconds, optionalSignal } = require("./terms");

/** Leases that nobody has any more, and that were not released. */
const forgotten = new FinalizationRegistry(({ backend, controller }) => {
  const isHeld = backend.loss() === null;
  backend.abandon();
  if (!isHeld) return;
  const message = `the lease of "${backend.name}" was not released`;
  process.emitWarning(message, "LeaseholdWarning");
  // Somebody may have kept its signal alone.
  controller?.abort(new LeaseLost(`${message}, and nothing refers to it any more`, "released"));
});

class Lease {
  #backend;
  #isReleased = false;
  /** @type {AbortController | null} */
  #controller = null;
  /** What an upgrade or a downgrade has made of it. @type {Lease | null} */
  #replacement = null;
  /** An upgrade was aborted, which has ended the lease. */
  #isGone = false;
  /** Ends an upgrade that is pending. @type {AbortController | null} */
  #upgrading = null;
  /** A downgrade that is pending. @type {Promise<unknown> | null} */
  #downgrading = null;

  constructor(backend) {
    this.#backend = backend;
    forgotten.register(this, { backend, controller: null }, backend);
  }

  get name() {
    return this.#backend.name;
  }

  get token() {
    return this.#backend.token;
  }

  get tokens() {
    return this.#backend.tokens;
  }

  get expiresIn() {
    return this.#isReleased ? 0 : this.#backend.remaining();
  }

  get isReleased() {
    return this.#isReleased;
  }

  get isLost() {
    return this.loss !== null;
  }

  get loss() {
    if (this.#isReleased) return null;
    return this.#backend.loss() ?? (this.#isGone ? "gone" : null);
  }

  get signal() {
    if (this.#controller === null) {
      this.#controller = new AbortController();
      if (!this.#isReleased) {
        forgotten.unregister(this.#backend);
        forgotten.register(this, { backend: this.#backend, controller: this.#controller }, this.#backend);
        this.#watch();
      }
    }
    return this.#controller.signal;
  }

  check() {
    const loss = this.loss;
    if (loss !== null) throw lossOf(this.#backend, loss);
    if (this.#isReleased) throw new LeaseLost(`"${this.name}": the lease was released or detached before`, "released");
    // Nothing is known of it until the upgrade has ended.
    if (this.#upgrading !== null) throw new LeaseLost(`"${this.name}": an upgrade is pending, so that the lease may not be trusted`, "gone");
  }

  async renew() {
    await this.#backend.renew().promise;
  }

  async release(options) {
    const timeout = options === undefined ? null : optionalMilliseconds(known(options, ["timeout"]).timeout, "timeout");
    if (this.#downgrading !== null) {
      // The reader that it becomes is nobody's.
      await this.#downgrading;
      await this.#replacement?.release(options);
      return;
    }
    if (this.#isReleased) return;
    this.#upgrading?.abort(new LeaseLost(`"${this.name}": the lease was released during its upgrade`, "released"));
    const released = this.#backend.release(timeout);
    if (!released.isRefused) this.#end();
    await released.promise;
  }

  async detach() {
    const detached = this.#backend.detach();
    this.#consumed(detached);
    return detached.promise;
  }

  async downgrade() {
    const downgraded = this.#backend.downgrade();
    this.#consumed(downgraded);
    const replaced = downgraded.promise.then((reader) => {
      this.#replacement = new Lease(reader);
      return this.#replacement;
    });
    this.#downgrading = replaced.then(
      () => (this.#downgrading = null),
      () => (this.#downgrading = null),
    );
    return replaced;
  }

  async upgrade(options = {}) {
    known(options, ["wait", "signal"]);
    const wait = optionalMilliseconds(options.wait, "wait");
    const signal = optionalSignal(options.signal);
    signal?.throwIfAborted();
    const upgrading = new AbortController();
    const abort = () => upgrading.abort(signal?.reason);
    signal?.addEventListener("abort", abort, { once: true });
    this.#upgrading = upgrading;
    let writer = null;
    try {
      writer = await run(() => this.#backend.upgrade(wait), upgrading.signal);
    } finally {
      signal?.removeEventListener("abort", abort);
      this.#upgrading = null;
      this.#isGone = upgrading.signal.aborted;
      // The attempt has ended the watch. What it was aborted in is lost.
      if (writer === null) this.#watch();
    }
    if (writer === null) throw new Timeout(`"${this.name}": not upgraded within ${wait} ms`);
    this.#end();
    this.#backend.abandon();
    this.#replacement = new Lease(writer);
    return this.#replacement;
  }

  setMinHold(value) {
    this.#backend.setMinHold(milliseconds(value, "minHold"));
  }

  async [Symbol.asyncDispose]() {
    await this.release();
  }

  /** Runs the routine, and releases the lease: for `using` of the locks. */
  async use(routine) {
    let value;
    try {
      value = await routine(this);
    } catch (error) {
      // What went wrong first is what counts.
      await this.#latest().release().catch(() => {});
      throw error;
    }
    await this.#latest().release();
    return value;
  }

  toString() {
    const state = this.#isReleased ? "released" : this.isLost ? `lost: ${this.loss}` : `${Math.round(this.expiresIn)} ms left`;
    return `Lease "${this.name}" token ${this.token}, ${state}`;
  }

  [Symbol.for("nodejs.util.inspect.custom")]() {
    return `<${this}>`;
  }

  toJSON() {
    throw new TypeError(
      "a lease cannot be serialized, because its holder is this process: pass the string of lease.detach() on, and call client.attach(…) there",
    );
  }

  /** What is held in the end: the routine may have upgraded or downgraded it. */
  #latest() {
    /** @type {Lease} */
    let lease = this;
    while (lease.#replacement !== null) lease = lease.#replacement;
    return lease;
  }

  #watch() {
    if (this.#controller === null) return;
    const loss = this.loss;
    if (loss !== null) this.#controller.abort(lossOf(this.#backend, loss));
    else watch(this.#backend, this.#controller);
  }

  /** The call ends this lease, whatever comes of it, unless it was refused before it started. */
  #consumed(call) {
    if (!call.isRefused) this.#end();
  }

  #end() {
    this.#isReleased = true;
    forgotten.unregister(this.#backend);
  }
}

/** Aborts the controller once the lease is lost. Keeps neither the lease nor the process. */
function watch(backend, controller) {
  const weak = new WeakRef(backend);
  backend.lost().promise.then(
    (reason) => {
      if (reason !== null) controller.abort(lossOf(weak.deref(), reason));
    },
    () => {},
  );
}

function lossOf(backend, reason) {
  return new LeaseLost(backend === undefined ? "the lease is lost" : backend.lossError(), reason);
}

module.exports = { Lease };
