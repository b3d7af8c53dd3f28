// Locks of Node.js as peers of the benchmark; bench/peers/README.md says what the orders mean. Without an argument redlock 5 over ioredis, with the argument
// `leasehold` that package.
//
// redlock gives up after 10 retries; here it tries for as long as the driver wants, at the pace that it comes with, or, tuned,
// every 5 ms. On several servers it gives up, and is asked again: it returns the keys of a minority only when it gives up.
import { closeSync, openSync, readFileSync, readSync, writeFileSync, writeSync } from "node:fs";
import { createRequire } from "node:module";
import { connect } from "node:net";
import { createInterface } from "node:readline";

const require = createRequire(import.meta.url);
const now = () => Number(process.hrtime.bigint());
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const say = (value) => process.stdout.write(JSON.stringify(value) + "\n");
const version = (name) => {
  const path = require.resolve(name);
  const folder = path.slice(0, path.lastIndexOf(`/node_modules/${name}/`)) + `/node_modules/${name}`;
  return JSON.parse(readFileSync(`${folder}/package.json`)).version.replace(/^v/, "");
};

/** Clients, each with a connection of its own to every server. */
let clients = [];
/** What `hold` took, by name. */
let held = new Map();
let ttl = 10_000;

const library = process.argv[2] ?? "redlock";
const { Redis } = library === "redlock" ? await import("ioredis") : {};
const { default: Redlock, ExecutionError } = library === "redlock" ? await import("redlock") : {};
const leasehold = library === "leasehold" ? await import("leasehold") : undefined;

/** A client of leasehold. Its locks are renewed, and its waiters granted in their order. */
class Leasehold {
  constructor(urls) {
    this.urls = urls;
    this.limited = this;
  }

  async ready() {
    this.client = await leasehold.connect(this.urls.length > 1 ? `redlock:${this.urls.join(" ")}` : this.urls[0]);
  }

  lock(order) {
    if (order.lock !== "mutex") throw new Error("leasehold is measured with its mutex here");
    return this;
  }

  /** A wait ends with the run. */
  async acquire(name, end) {
    try {
      return await this.client.acquire(name, { ttl, wait: Math.max(0, (end - now()) / 1e6) });
    } catch (error) {
      if (error instanceof leasehold.Timeout) return undefined;
      throw error;
    }
  }

  using(name, routine) {
    return this.client.using(name, { ttl }, (lease) => routine(lease.signal, lease.token));
  }

  async left() {
    const locks = await this.client.list();
    return { left: locks.reduce((sum, { holders, waiters }) => sum + holders.length + waiters.length, 0) };
  }

  close() {
    this.client.close().catch(() => {});
  }
}

/** redlock, with these settings. */
class Setting {
  constructor(redlock) {
    this.redlock = redlock;
    redlock.on("error", () => {});
  }

  /** Without a result once the run is over. */
  async acquire(name, end) {
    for (;;) {
      try {
        return await this.redlock.acquire([name], ttl);
      } catch (error) {
        // On several servers, its retries are used up.
        if (this.redlock.clients.size === 1 || !(error instanceof ExecutionError)) throw error;
        if (now() >= end) return undefined;
      }
    }
  }

  using(name, routine) {
    return this.redlock.using([name], ttl, routine);
  }
}

class Client {
  constructor(urls) {
    this.connections = urls.map((url) => new Redis(url, { maxRetriesPerRequest: 0 }));
    for (const connection of this.connections) connection.on("error", () => {});
    const limit = urls.length > 1 ? {} : { retryCount: -1 };
    this.plain = new Setting(new Redlock(this.connections, limit));
    this.tuned = new Setting(new Redlock(this.connections, { ...limit, retryDelay: 5, retryJitter: 5 }));
    // The number of retries counts for releases too: without a limit, the release of a lost lock never ends.
    this.limited = new Setting(new Redlock(this.connections));
  }

  ready() {
    const isQuorum = this.connections.length > 1;
    return Promise.all(this.connections.map((one) => one.ping().catch((error) => {
      // A server that is down is part of the work of a quorum.
      if (!isQuorum) throw error;
    })));
  }

  lock(order) {
    if (order.lock !== "mutex") throw new Error("redlock has only a mutex");
    return order.is_tuned ? this.tuned : this.plain;
  }

  left() {
    return {};
  }

  close() {
    for (const connection of this.connections) connection.disconnect();
  }
}

async function open(order) {
  close();
  ttl = order.ttl_ms;
  for (let number = 0; number < order.clients; number++) clients.push(new (leasehold ? Leasehold : Client)(order.urls));
  await Promise.all(clients.map((client) => client.ready()));
  return {};
}

function close() {
  for (const client of clients) client.close();
  clients = [];
  held = new Map();
  return {};
}

async function run(order) {
  const acquisitions = [];
  const state = { failures: 0, inside: 0, waiting: 0 };
  const counter = order.counter ? openSync(order.counter, "r+") : undefined;
  const bytes = Buffer.alloc(8);

  const failed = async (error) => {
    state.failures++;
    state.failure ??= String(error.message);
    await sleep(1);
  };
  const section = async () => {
    let count;
    if (counter !== undefined) {
      readSync(counter, bytes, 0, 8, 0);
      count = bytes.readBigUInt64LE();
    }
    if (order.hold_us > 0) await sleep(order.hold_us / 1000);
    if (counter !== undefined) {
      bytes.writeBigUInt64LE(count + 1n);
      writeSync(counter, bytes, 0, 8, 0);
    }
  };
  const acquireRepeatedly = async (client, name, task) => {
    for (let count = 0; now() < order.end_ns && (order.max_acquisitions === 0 || count < order.max_acquisitions); ) {
      const asked = now();
      let lock;
      state.waiting++;
      try {
        lock = await client.acquire(name, order.end_ns);
      } catch (error) {
        await failed(error);
        continue;
      } finally {
        state.waiting--;
      }
      // The run may be over, and its log written.
      if (state.isOver || lock === undefined) return;
      const entered = now();
      state.inside++;
      await section();
      const left = now();
      try {
        await lock.release();
      } catch (error) {
        await failed(error);
      }
      state.inside--;
      acquisitions.push([task, asked, entered, left, now()]);
      count++;
    }
  };

  const tasks = Array.from({ length: order.tasks }, (_, number) => ({
    client: clients[number % clients.length].lock(order),
    name: order.own_names ? `${order.name}:${number}` : order.name,
    number: order.first_task + number,
  }));
  await sleep(Math.max(0, (order.start_ns - now()) / 1e6));
  const all = Promise.all(tasks.map((task) => acquireRepeatedly(task.client, task.name, task.number)));
  await Promise.race([all, sleep(Math.max(0, (order.end_ns - now()) / 1e6))]);
  for (const limit = now() + 5e8; state.inside > 0 && now() < limit; ) await sleep(1);
  state.isOver = true;
  if (counter !== undefined) closeSync(counter);

  const log = Buffer.alloc(acquisitions.length * 40);
  acquisitions.forEach(([task, ...moments], index) => {
    log.writeUInt32LE(task, index * 40);
    moments.forEach((moment, place) => log.writeBigUInt64LE(BigInt(moment), index * 40 + 8 + place * 8));
  });
  writeFileSync(order.log, log);
  // There is no way to call back an attempt of redlock.
  return { failures: state.failures, failure: state.failure, is_spent: state.waiting > 0 };
}

/** With `using`, which extends for as long as the work takes. */
async function hold(order) {
  const atOnce = 500;
  for (let first = 0; first < order.count; first += atOnce) {
    const some = [];
    for (let number = first; number < Math.min(order.count, first + atOnce); number++) {
      const name = order.count === 1 ? order.name : `${order.name}:${number}`;
      const client = clients[number % clients.length].lock(order);
      some.push(new Promise((resolve, reject) => {
        client.using(name, (signal) => {
          held.set(name, signal);
          resolve();
          return new Promise(() => {});
        }).catch((error) => {
          held.delete(name);
          reject(error);
        });
      }));
    }
    await Promise.all(some);
  }
  return {};
}

/** The connection of one task to the resource. */
class Resource {
  constructor(path, task) {
    this.stream = connect(path);
    this.answers = createInterface({ input: this.stream })[Symbol.asyncIterator]();
    this.stream.write(`worker ${task} ${process.pid}\n`);
  }

  tell(event, moment = moments(), rest = "") {
    this.stream.write(`${event} ${moment} ${rest}`.trim().replaceAll("\n", " ") + "\n");
  }

  async ask(event, moment, token) {
    this.tell(event, moment, String(token));
    if ((await this.answers.next()).done) throw new Error("the resource is gone");
  }
}

/** Whole nanoseconds: a number would lose some. */
const moments = () => process.hrtime.bigint();

async function contendTask(order, client, task) {
  const resource = new Resource(order.resource, task);
  /** A time at which the lock was still held, by the signal that the library gives; none if it is lost. */
  const check = (signal) => {
    const moment = moments();
    if (!signal.aborted) return moment;
    resource.tell("lost");
    return undefined;
  };
  const section = async (signal, token, holdUs) => {
    let moment = check(signal);
    if (moment === undefined) return;
    await resource.ask("begin", moment, token);
    for (let left = holdUs; left > 0; left -= order.step_us) {
      await sleep(Math.min(left, order.step_us) / 1000);
      moment = check(signal);
      if (moment === undefined) return;
      resource.tell("held", moment);
    }
    // The lock was checked, and the write is on its way.
    await sleep(order.write_us / 1000);
    await resource.ask("write", moment, token);
  };
  for (let number = 0; now() < order.end_ns; number++) {
    const part = (a, b) => (number * a + task * b + order.seed) % 100;
    const holdUs =
      part(41, 53) < order.long_percent ? order.long_us : Math.floor((order.hold_us * (part(37, 61) + 1)) / 100);
    resource.tell("want");
    for (let isDone = false; !isDone; ) {
      try {
        await client.using(order.name, async (signal, token = 0) => {
          isDone = true;
          await section(signal, token, holdUs);
          resource.tell("leave");
        });
        resource.tell("done");
      } catch (error) {
        resource.tell(isDone ? "kept" : "fail", moments(), String(error.message));
        if (!isDone) await sleep(5);
      }
    }
    await sleep((order.hold_us * part(29, 17)) / 100 / 1000);
  }
  resource.tell("end");
  resource.stream.end();
}

/** With `using`, as its documentation advises. */
async function contend(order) {
  const tasks = Array.from({ length: order.tasks }, (_, number) => {
    const client = clients[number % clients.length];
    client.lock(order); // Either has only one kind of lock here.
    return contendTask(order, client.limited, order.first_task + number);
  });
  await Promise.all(tasks);
  return {};
}

const orders = {
  open,
  run,
  hold,
  held: () => ({ held: [...held.values()].filter((signal) => !signal.aborted).length }),
  contend,
  left: () => clients[0].left(),
  close,
};

const libraries = { redlock: () => `redlock ${version("redlock")}, ioredis ${version("ioredis")}`, leasehold: () => `leasehold (Node.js) ${version("leasehold")}` };
say({ library: libraries[library](), runtime: `Node.js ${process.versions.node}` });
for await (const line of createInterface({ input: process.stdin })) {
  try {
    const order = JSON.parse(line);
    if (!Object.hasOwn(orders, order.order)) throw new Error(`no order is called "${order.order}"`);
    say(await orders[order.order](order));
  } catch (error) {
    say({ error: String(error.message) });
  }
}
process.exit(0);
