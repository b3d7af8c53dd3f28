"use strict";
// The class Redlock beside the package redlock, on one server and on three.

const assert = require("node:assert/strict");
const path = require("node:path");
const { after, before, describe, test } = require("node:test");
const Redis = require("ioredis");
const { default: Old } = require("redlock");
const leasehold = require("leasehold");
const Redlock = require("leasehold/redlock");
const { LIMIT, freePort, startRedis, until } = require("./servers");

const { ExecutionError, ResourceLockedError } = Redlock;

for (const count of [1, 3]) {
  describe(`${count} servers`, () => {
    let servers;
    let clients;
    let redlock;
    let old;
    let errors;

    before(async () => {
      servers = [];
      for (let at = 0; at < count; at++) servers.push(await startRedis({ port: await freePort() }));
      clients = servers.map(({ port }) => new Redis(port, { keyPrefix: "app:" }));
      redlock = new Redlock(clients, { retryCount: 2, retryDelay: 50 });
      old = new Old(clients, { retryCount: 2, retryDelay: 50 });
      redlock.on("error", (error) => errors.push(error));
    });
    after(async () => {
      await redlock?.quit();
      for (const server of servers ?? []) await server.stop();
    });
    test.beforeEach(() => (errors = []));

    test("both exclude each other", async () => {
      const theirs = await old.acquire(["both"], 30_000);
      const failed = await redlock.acquire(["both"], 30_000).then(() => null, (error) => error);
      assert.ok(failed instanceof ExecutionError);
      const stats = await failed.attempts[0];
      assert.equal(stats.membershipSize, count);
      assert.equal(stats.quorumSize, Math.floor(count / 2) + 1);
      assert.deepEqual([...stats.votesAgainst.keys()], clients);
      assert.ok(errors.some((error) => error instanceof ResourceLockedError));
      await theirs.release();
      const ours = await redlock.acquire(["both"], 30_000);
      assert.equal(ours.value, String(ours.token));
      assert.equal((await ours.attempts[0]).votesFor.size, count);
      await assert.rejects(old.acquire(["both"], 30_000), { name: "ExecutionError" });
      await ours.release();
      await (await old.acquire(["both"], 30_000)).release();
    });

    test("a lock ends unless it is extended", async () => {
      const lock = await redlock.acquire(["ends"], 1_000);
      assert.ok(lock.expiration - Date.now() <= 1_000 - 12);
      const extended = await lock.extend(2_000);
      assert.equal(lock.expiration, 0);
      await assert.rejects(lock.extend(1_000), (error) => error instanceof ExecutionError && error.attempts.length === 0);
      await assert.rejects(redlock.acquire(["ends"], 1_000, { retryCount: 0 }), ExecutionError);
      // Waits until the time is over.
      const next = await redlock.acquire(["ends"], 1_000, { retryCount: -1 });
      assert.ok(Date.now() >= extended.expiration);
      await assert.rejects(extended.release(), ExecutionError);
      await next.release();
    });

    test("using extends, releases, and passes results and errors on", async () => {
      let turns = 0;
      const value = await redlock.using(["b", "a"], 700, async (signal) => {
        const until = Date.now() + 1_500;
        while (Date.now() < until) {
          assert.equal(signal.aborted, false);
          await assert.rejects(old.acquire(["a"], 1_000, { retryCount: 0 }));
          turns += 1;
        }
        return "done";
      });
      assert.equal(value, "done");
      assert.ok(turns > 0);
      await assert.rejects(
        redlock.using(["a"], 700, async () => {
          throw new RangeError("mine");
        }),
        RangeError,
      );
      await (await old.acquire(["a", "b"], 1_000)).release();
    });

    test("a lost lock aborts the signal, with the error", async () => {
      const lost = redlock.using(["lost"], 1_000, async (signal) => {
        for (const client of clients) await client.set("lost", "another's");
        await until(() => signal.aborted);
        assert.ok(signal.error instanceof ExecutionError);
        assert.equal(signal.reason, signal.error);
        throw signal.error;
      });
      await assert.rejects(lost, ExecutionError);
      for (const client of clients) await client.del("lost");
    });

    test("what redlock refuses is refused", async () => {
      await assert.rejects(redlock.acquire(["x"], 1.5), /integer/);
      await assert.rejects(redlock.using(["x"], 500, async () => {}), /100ms greater/);
      await assert.rejects(redlock.using(["x"], 5_000, {}), /not a function/);
    });

    test("many waiters get their turns", async () => {
      let inside = 0;
      const turns = Array.from({ length: 20 }, () =>
        redlock.using(["many"], LIMIT, { retryCount: -1 }, async () => {
          inside += 1;
          assert.equal(inside, 1);
          await new Promise(setImmediate);
          inside -= 1;
        }),
      );
      await Promise.all(turns);
    });
  });
}

test("what cannot be kept is refused", async () => {
  const lazy = (options) => new Redis({ lazyConnect: true, ...options });
  assert.throws(() => new Redlock([]), /at least one/);
  assert.throws(() => new Redlock([{}]), leasehold.InvalidInput);
  assert.throws(() => new Redlock([new Redis.Cluster([{ host: "127.0.0.1", port: 1 }], { lazyConnect: true })]), leasehold.Unsupported);
  assert.throws(() => new Redlock([lazy({ natMap: { a: { host: "b", port: 1 } } })]), leasehold.Unsupported);
  assert.throws(() => new Redlock([lazy({ readOnly: true })]), leasehold.Unsupported);
  assert.throws(() => new Redlock([lazy({ role: "slave", name: "m", sentinels: [{ host: "h", port: 1 }] })]), leasehold.Unsupported);
  assert.throws(() => new Redlock([lazy({ tls: { ca: "x" } })]), leasehold.Unsupported);
  assert.throws(() => new Redlock([lazy({ tls: { rejectUnauthorized: false } })]), leasehold.Unsupported);
  assert.throws(() => new Redlock([lazy({ keyPrefix: "a:" }), lazy({ keyPrefix: "b:" })]), leasehold.Unsupported);
  assert.throws(() => new Redlock([lazy()], { retries: 1 }), leasehold.InvalidInput);
  assert.throws(() => new Redlock([lazy()], {}, { acquireScript: "return 1" }), leasehold.Unsupported);
});

test("a server that is not there is an error of the attempt", async () => {
  const client = new Redis({ port: await freePort(), lazyConnect: true });
  const redlock = new Redlock([client], { retryCount: 0 });
  const failed = await redlock.acquire(["x"], 1_000).then(() => null, (error) => error);
  assert.ok(failed instanceof ExecutionError);
  assert.ok(failed.cause instanceof leasehold.Unavailable);
  client.disconnect();
});

test("addresses follow the options of the client", async () => {
  const { addressOf } = require(path.join(path.dirname(require.resolve("leasehold/package.json")), "lib/ioredis.js"));
  const of = (options) => addressOf(new Redis({ lazyConnect: true, ...options }));
  assert.equal(of({}), "redis://localhost:6379");
  assert.equal(of({ host: "::1", port: 7, db: 3 }), "redis://[::1]:7/3");
  assert.equal(of({ username: "u@x", password: "p:/?" }), "redis://u%40x:p%3A%2F%3F@localhost:6379");
  assert.equal(of({ tls: { servername: "h", rejectUnauthorized: true }, host: "h" }), "rediss://h:6379");
  assert.equal(of({ path: "/run/my redis.sock", password: "p&q" }), "redis+unix:///run/my%20redis.sock?pass=p%26q");
  const sentinels = [{ host: "a", port: 1 }, { host: "b" }];
  assert.equal(of({ sentinels, name: "m", sentinelPassword: "s" }), "redis-sentinel://a:1,b:26379/m?sentinel_password=s");
});
