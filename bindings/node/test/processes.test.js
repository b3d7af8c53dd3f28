"use strict";
// What becomes of leases and waits when event loops are blocked, and when processes, workers and references end.

const assert = require("node:assert/strict");
const fs = require("node:fs");
const path = require("node:path");
const { after, before, describe, test } = require("node:test");
const { Worker } = require("node:worker_threads");
const { connect, LeaseLost } = require("leasehold");
const { TestStore } = require("leasehold/testing");
const leasehold = require("leasehold");
const { Program, newFolder, node, startRedis, startServe, stays, until } = require("./servers");

const IS_LONG = process.env.LEASEHOLD_TEST_LONG !== undefined;

let redis;
let serve;
let client;

before(async () => {
  redis = await startRedis();
  serve = await startServe(redis.url);
  client = await connect(redis.url);
});
after(async () => {
  await client.close();
  await serve.stop();
  await redis.stop();
});

const urlOf = (backEnd) => (backEnd === "native" ? redis.url : serve.url);

for (const backEnd of ["native", "http"]) {
  describe(`${backEnd}: a process ends`, () => {
    for (const [how, code] of [
      ["end", 0],
      ["watch", 0],
      ["exit", 3],
      ["throw", 1],
    ]) {
      test(`${how}: its lease is released, and its code is its own`, async () => {
        const program = node("hold.js", urlOf(backEnd), `ends ${how}`, how);
        const ended = await program.ended;
        assert.match(program.output, /holds/);
        assert.equal(ended.code, code, program.output);
        assert.notEqual(await client.tryLock(`ends ${how}`).then((lease) => lease?.release().then(() => true) ?? null), null);
      });
    }

    test("by a signal: released if it is asked for", async () => {
      const program = node("hold.js", urlOf(backEnd), "signals", "signals");
      await program.hasSaid("holds");
      program.kill("SIGTERM");
      assert.equal((await program.ended).signal, "SIGTERM");
      assert.equal((await client.inspect("signals")).holders.length, 0);
    });

    test("by a signal that nobody has asked about: held until its ttl", async () => {
      const program = node("hold.js", urlOf(backEnd), "killed", "stay");
      await program.hasSaid("holds");
      program.kill("SIGTERM");
      assert.equal((await program.ended).signal, "SIGTERM");
      assert.equal((await client.inspect("killed")).holders.length, 1);
      await client.forceRelease("killed");
    });

    test("a wait keeps it alive", async () => {
      const lease = await client.acquire(`waits ${backEnd}`);
      const program = node("wait.js", urlOf(backEnd), `waits ${backEnd}`);
      await program.hasSaid("waits");
      await stays(() => program.isRunning, 1_000);
      await lease.release();
      assert.equal((await program.ended).code, 0);
      assert.match(program.output, /granted/);
    });
  });
}

test("a lease outlasts a blocked event loop, by renewal outside of it", async () => {
  const program = node("block.js", redis.url, "blocked", "1000", "3000");
  await program.hasSaid("blocks");
  await stays(async () => (await client.tryLock("blocked")) === null, 2_500);
  await program.ended;
  assert.match(program.output, /{"isLost":false,"isAborted":false}/);
});

test("over HTTP a blocked event loop loses its lease, and is told at once", async () => {
  const program = node("block.js", serve.url, "blocked http", "1000", "3000");
  await program.ended;
  assert.match(program.output, /{"isLost":true,"isAborted":true}/);
});

test("a forgotten lease is released, with a warning", async () => {
  const parameters = ["--expose-gc", path.join(__dirname, "programs/forget.js"), redis.url, "forgotten"];
  const program = new Program(process.execPath, parameters);
  assert.equal((await program.ended).code, 0, program.output);
  assert.match(program.output, /"forgotten" was not released[^]*released/);
  assert.match(program.output, /aborted: released/);
});

test("workers that hold and wait are terminated, and leave nothing behind", async () => {
  const busy = await client.acquire("busy");
  for (let round = 0; round < 100; round++) {
    const workerData = { url: redis.url, held: "worker's", busy: "busy" };
    const worker = new Worker(path.join(__dirname, "programs/worker.js"), { workerData });
    await new Promise((resolve, reject) => {
      worker.once("message", resolve);
      worker.once("error", reject);
    });
    // At any moment of its wait.
    if (round % 2 === 0) await until(async () => (await client.inspect("busy")).waiters.length > 0);
    await worker.terminate();
    assert.equal((await client.inspect("worker's")).holders.length, 0, `round ${round}`);
    assert.equal((await client.inspect("busy")).waiters.length, 0, `round ${round}`);
  }
  await busy.release();
});

test("an exit of a worker by itself releases its leases, and the others' stay", async () => {
  const own = await client.acquire("main's");
  const code = `const { connect } = require("leasehold");
    connect(require("node:worker_threads").workerData).then((client) => client.acquire("short", { ttl: 30_000 })).then(() => process.exit(0));`;
  const worker = new Worker(code, { eval: true, workerData: redis.url });
  await new Promise((resolve) => worker.once("exit", resolve));
  assert.equal((await client.inspect("short")).holders.length, 0);
  own.check();
  await own.release();
});

test("processes of node:cluster exclude each other", async () => {
  const file = path.join(newFolder(), "counter");
  const program = node("cluster.js", redis.url, file);
  assert.equal((await program.ended).code, 0, program.output);
  assert.equal(fs.readFileSync(file, "utf8"), "100");
});

test("tasks of one process hand the lock on within a turn of the loop", async () => {
  const lock = client.lock("local");
  let lease = await lock.acquire();
  const granted = [];
  const waits = Array.from({ length: 4 }, async () => {
    const next = await lock.acquire();
    granted.push(next);
  });
  for (let at = 0; at < 4; at++) {
    const released = lease.release();
    // From the second one on, which waits in this process only, no timer and no descriptor is looked at in between.
    for (let microtask = 0; microtask < 20 && granted.length === at; microtask++) await undefined;
    if (at > 0) assert.equal(granted.length, at + 1);
    await released;
    lease = await until(() => granted[at]);
  }
  await lease.release();
  await Promise.all(waits);
});

test("pairs and aborted waits keep no memory and no handles", async () => {
  const [pairs, aborts] = IS_LONG ? [1_000_000, 100_000] : [20_000, 5_000];
  const store = await connect("memory:");
  const lock = store.lock("pairs");
  const round = async (pairs, aborts) => {
    for (let at = 0; at < pairs; at++) {
      const lease = await lock.acquire();
      await lease.release();
    }
    const lease = await lock.acquire();
    for (let at = 0; at < aborts; at++) {
      const controller = new AbortController();
      const waiting = lock.acquire({ signal: controller.signal });
      controller.abort();
      await assert.rejects(waiting, { name: "AbortError" });
    }
    await lease.release();
  };
  await round(5_000, 2_000);
  globalThis.gc?.();
  const handles = process.getActiveResourcesInfo().length;
  const before = process.memoryUsage().rss;
  await round(pairs, aborts);
  globalThis.gc?.();
  const grown = process.memoryUsage().rss - before;
  assert.ok(process.getActiveResourcesInfo().length <= handles + 1);
  assert.ok(grown < 64 * 1024 * 1024, `${grown} bytes`);
  await store.close();
});

test("a store of a test has the test's clock", async () => {
  const store = new TestStore();
  const one = await connect(store.address);
  const other = await connect(store.address);
  const lease = await one.acquire("clock", { ttl: 5_000, autoRenew: false });
  assert.equal(await other.tryLock("clock"), null);
  const records = [];
  leasehold.log.on("record", (record) => records.push(record));
  store.advance(5_001);
  await until(() => lease.isLost && lease.signal.aborted);
  assert.ok(lease.signal.reason instanceof LeaseLost);
  await until(() => records.some(({ level, message }) => level === "warn" && message.includes("lease lost")));
  leasehold.log.removeAllListeners();
  const next = await other.acquire("clock");
  store.setReachable(false);
  await assert.rejects(one.acquire("elsewhere"), leasehold.Unavailable);
  store.setReachable(true);
  await next.release();
  assert.ok(store.elapsed >= 5_001);
  assert.throws(() => store.advance(-1), leasehold.InvalidInput);
});
