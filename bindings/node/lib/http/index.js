"use strict";
// The back end for servers of `leasehold serve`: `http:`, `https:` and `unix:` addresses. It works wherever Node.js does, and renews on a timer: an event
// loop that is blocked for longer than two thirds of the ttl loses its leases, which the native module's renewal does not.

const { spawnSync } = require("node:child_process");
const { join } = require("node:path");
const { ClientClosed, Unsupported } = require("../errors");
const { Core } = require("./core");
const { requestOf } = require("./request");

/** How long the end of the process waits for the releases of its leases. */
const RELEASES = 1_000;

/** Those that hold leases, or may. One that nobody has any more holds none. @type {Set<WeakRef<Core>>} */
const cores = new Set();
const collected = new FinalizationRegistry((core) => cores.delete(core));
let hasExited = false;

class Lease {
  #core;
  #held;

  constructor(core, held) {
    this.#core = core;
    this.#held = held;
    this.name = held.grants.map((grant) => grant.name).join(",");
    this.token = held.grants.reduce((highest, { token }) => (token > highest ? token : highest), 0n);
  }

  get tokens() {
    const tokens = Object.create(null);
    for (const { name, token } of this.#held.grants) tokens[name] = token;
    return tokens;
  }

  remaining() {
    return this.#held.remaining();
  }

  loss() {
    return this.#held.loss()?.reason ?? null;
  }

  lossError() {
    return this.#held.loss()?.message ?? `${this.#held.what}: the lease is not lost`;
  }

  lost() {
    let stop = () => {};
    const promise = new Promise((resolve) => {
      stop = this.#held.watch(resolve);
    });
    return { promise, cancel: () => stop() };
  }

  renew() {
    return this.#core.start(() => this.#core.renew(this.#held));
  }

  release(timeout) {
    this.#held.end();
    // It is carried out also if nobody waits for it, and while the client is closed.
    this.#core.beginRelease(this.#held, false);
    return { promise: this.#core.released(this.#held, timeout), cancel() {} };
  }

  detach() {
    if (this.#held.grants.length > 1) {
      return refused("the leases of several locks can't be detached together: acquire the locks one by one");
    }
    return this.#core.start(() => this.#core.detach(this.#held));
  }

  downgrade() {
    return refused("a server's HTTP API can't downgrade a lease: use the address of its store");
  }

  upgrade() {
    return refused("a server's HTTP API can't upgrade a lease: use the address of its store");
  }

  setMinHold() {
    throw new Unsupported("a server's HTTP API can't change the minimum hold of a lease: use the address of its store");
  }

  abandon() {
    this.#core.abandon(this.#held);
  }
}

function refused(what) {
  return { promise: Promise.reject(new Unsupported(what)), cancel() {}, isRefused: true };
}

class Lock {
  #core;
  #request;

  constructor(core, request) {
    this.#core = core;
    this.#request = request;
  }

  acquire(wait) {
    const core = this.#core;
    const limit = this.#request.isOnce ? 0 : wait;
    const acquire = async (signal) => {
      const held = await core.acquire(this.#request, limit, signal);
      return held === null ? null : new Lease(core, held);
    };
    return core.start(acquire, (lease) => lease?.abandon());
  }
}

class Backend {
  #core;

  constructor(core) {
    this.#core = core;
  }

  get address() {
    return this.#core.address;
  }

  lock(terms) {
    return new Lock(this.#core, requestOf(terms, this.#core.settings));
  }

  connect() {
    return this.#core.start((signal) => this.#core.reach(signal));
  }

  attach(text) {
    const attach = async (signal) => new Lease(this.#core, await this.#core.attach(text, signal));
    return this.#core.start(attach, (lease) => lease.abandon());
  }

  inspect(kind, name) {
    return this.#core.start((signal) => this.#core.inspect(kind, name, signal));
  }

  list() {
    return this.#core.start((signal) => this.#core.list(signal));
  }

  forceRelease(kind, name, token) {
    return this.#core.start((signal) => this.#core.forceRelease(kind, name, token, signal));
  }

  close(timeout) {
    this.#core.beginClose();
    // What it waits for goes on in the background, which keeps no process alive.
    const alive = setInterval(() => {}, 0x7fffffff);
    return { promise: this.#core.closed(timeout).finally(() => clearInterval(alive)), cancel() {} };
  }
}

/** Sends nothing. */
function open(url, settings) {
  if (hasExited) throw new ClientClosed("the process exits");
  for (const option of ["maxWaiters", "replicas"]) {
    if (settings[option] !== null) throw new Unsupported(`${option} is no option over HTTP: the server and its store decide it`);
  }
  const core = new Core(url, settings);
  const weak = new WeakRef(core);
  cores.add(weak);
  collected.register(core, weak);
  return new Backend(core);
}

// Nothing asynchronous happens in an exit any more, so another process sends the releases.
process.on("exit", () => {
  hasExited = true;
  const open = [...cores].flatMap((weak) => weak.deref() ?? []);
  const clients = open.map((core) => ({ url: core.address, token: core.token, ids: core.unreleasedIds }));
  const holding = clients.filter(({ ids }) => ids.length > 0);
  if (holding.length === 0) return;
  const input = JSON.stringify(holding);
  spawnSync(process.execPath, [join(__dirname, "at-exit.js")], { input, timeout: RELEASES, stdio: ["pipe", "ignore", "ignore"], env: environment() });
});

/** Without what would change another process of Node.js. */
function environment() {
  const { NODE_OPTIONS, NODE_V8_COVERAGE, ...others } = process.env;
  return others;
}

module.exports = { open };
