"use strict";
// Every kind of lock, over every back end.

const assert = require("node:assert/strict");
const path = require("node:path");
const { after, before, describe, test } = require("node:test");
const leasehold = require("leasehold");
const { newFolder, startPostgres, startRedis, startServe, stays, until } = require("./servers");

const { connect } = leasehold;

/** What each back end is started with. */
const BACK_ENDS = {
  "sqlite:": async () => [`sqlite:${path.join(newFolder(), "locks.db")}`, []],
  "redis:": async () => {
    const redis = await startRedis();
    return [redis.url, [redis]];
  },
  "postgres:": async () => {
    const postgres = await startPostgres();
    return [postgres.url, [postgres]];
  },
  "serve over redis": async () => {
    const redis = await startRedis();
    const serve = await startServe(redis.url);
    return [serve.url, [serve, redis]];
  },
};

for (const [name, start] of Object.entries(BACK_ENDS)) {
  const isServer = name.startsWith("serve");
  // What the HTTP API does not have is refused there, by a test of its own.
  const native = isServer ? () => {} : test;
  describe(name, () => {
    let url;
    let servers;
    let client;
    let other;

    before(async () => {
      [url, servers] = await start();
      client = await connect(url);
      other = await connect(url, { label: "the other" });
    });
    after(async () => {
      await client?.close();
      await other?.close();
      for (const server of servers ?? []) await server.stop();
    });

    test("a lock excludes others, and its tokens rise", async () => {
      const lease = await client.acquire("exclusive");
      assert.equal(lease.name, "exclusive");
      assert.equal(typeof lease.token, "bigint");
      assert.deepEqual(Object.entries(lease.tokens), [["exclusive", lease.token]]);
      assert.ok(lease.expiresIn > 0 && lease.expiresIn <= 30_000);
      assert.equal(await other.tryLock("exclusive"), null);
      await assert.rejects(other.acquire("exclusive", { wait: 50 }), leasehold.Timeout);
      await lease.release();
      assert.equal(lease.expiresIn, 0);
      assert.equal(lease.isLost, false);
      const next = await other.acquire("exclusive");
      assert.ok(next.token > lease.token);
      await next.release();
      await next.release();
    });

    test("waiters get the lock in the order in which they came", async () => {
      const lease = await client.acquire("order");
      const order = [];
      const waits = [];
      for (let at = 0; at < 5; at++) {
        const waiting = (at % 2 === 0 ? client : other).using("order", { globalFifo: true }, () => order.push(at));
        waits.push(waiting);
        await until(async () => (await client.inspect("order")).waiters.length === at + 1);
      }
      await lease.release();
      await Promise.all(waits);
      assert.deepEqual(order, isServer ? order.toSorted() : [0, 1, 2, 3, 4]);
    });

    test("using releases, and passes results and errors on", async () => {
      assert.equal(await client.using("using", () => 7), 7);
      await assert.rejects(
        client.using("using", { ttl: 5_000 }, async () => {
          throw new RangeError("mine");
        }),
        RangeError,
      );
      assert.equal((await client.inspect("using")).holders.length, 0);
      await assert.rejects(client.using("using"), leasehold.InvalidInput);
    });

    test("an aborted wait leaves the queue, with the reason of its signal", async () => {
      const lease = await client.acquire("aborted");
      const controller = new AbortController();
      const reason = new Error("no longer needed");
      const waiting = other.acquire("aborted", { signal: controller.signal });
      await until(async () => (await client.inspect("aborted")).waiters.length === 1);
      controller.abort(reason);
      await assert.rejects(waiting, (error) => error === reason);
      await assert.rejects(other.acquire("aborted", { signal: controller.signal }), (error) => error === reason);
      await lease.release();
      // Over HTTP the place, and then the lease, are given up a little later.
      await other.using("aborted", { wait: 20_000 }, () => {});
      await until(async () => (await client.inspect("aborted")).holders.length === 0);
    });

    test("a forced release is noticed, and aborts the signal", async () => {
      const lease = await client.acquire("forced", { ttl: 1_500 });
      const { signal } = lease;
      const [former, ...others] = await other.forceRelease("forced", "mutex", { token: lease.token });
      assert.equal(former.token, lease.token);
      assert.equal(others.length, 0);
      await until(() => signal.aborted);
      assert.ok(signal.reason instanceof leasehold.LeaseLost);
      assert.equal(signal.reason.reason, "gone");
      assert.equal(lease.isLost, true);
      assert.throws(() => lease.check(), leasehold.LeaseLost);
      await assert.rejects(lease.release(), leasehold.LeaseLost);
      assert.deepEqual(await other.forceRelease("forced"), []);
    });

    test("a body that ends under a lost lease rejects, and its own error wins", async () => {
      const lose = async (lease) => {
        await other.forceRelease("body");
        await until(() => lease.isLost);
      };
      await assert.rejects(client.using("body", { ttl: 1_000 }, lose), leasehold.LeaseLost);
      const own = new Error("mine");
      const body = async (lease) => {
        await lose(lease);
        throw own;
      };
      await assert.rejects(client.using("body", { ttl: 1_000 }, body), (error) => error === own);
    });

    test("a lease is renewed, and ends without renewal", async () => {
      const renewed = await client.acquire("renewed", { ttl: 600 });
      const not = await client.acquire("not renewed", { ttl: 600, autoRenew: false });
      await until(() => not.isLost);
      assert.equal(not.loss, "expired");
      await stays(() => !renewed.isLost, 1_200);
      await renewed.release();
      const held = await client.acquire("max hold", { ttl: 600, maxHold: 900 });
      await until(() => held.isLost);
      assert.equal(held.loss, "max_hold");
    });

    test("a reentrant lock is its owner's", async () => {
      const lock = client.reentrant("reentrant", { owner: "request-1" });
      const first = await lock.acquire();
      const second = await lock.acquire();
      assert.equal(await other.reentrant("reentrant", { owner: "request-2" }).tryAcquire(), null);
      await first.release();
      assert.equal(await other.reentrant("reentrant", { owner: "request-2" }).tryAcquire(), null);
      await second.release();
      await (await other.reentrant("reentrant", { owner: "request-2" }).tryAcquire()).release();
    });

    test("readers share, and writers do not", async () => {
      const lock = client.rwlock("rw");
      const readers = [await lock.read().acquire(), await other.rwlock("rw").read().acquire()];
      assert.equal(await lock.write().tryAcquire(), null);
      for (const reader of readers) await reader.release();
      const writer = await lock.write().acquire();
      assert.equal(await other.rwlock("rw").read().tryAcquire(), null);
      await writer.release();
    });

    native("a writer becomes a reader, and an upgradable reader a writer", async () => {
      const writer = await client.rwlock("grades").write().acquire();
      const reader = await writer.downgrade();
      assert.equal(writer.isReleased, true);
      assert.equal(await other.rwlock("grades").write().tryAcquire(), null);
      const upgradable = await other.rwlock("grades").upgradable().acquire();
      const { signal } = upgradable;
      await assert.rejects(upgradable.upgrade({ wait: 50 }), leasehold.Timeout);
      assert.equal(upgradable.isLost, false);
      assert.ok(upgradable.expiresIn > 0);
      await reader.release();
      const upgraded = await upgradable.upgrade();
      assert.equal(upgradable.isReleased, true);
      assert.equal(signal.aborted, false);
      assert.equal(await client.rwlock("grades").read().tryAcquire(), null);
      await upgraded.release();
      await assert.rejects((await client.acquire("plain")).downgrade(), leasehold.Unsupported);
    });

    native("an aborted upgrade loses the lease", async () => {
      const reader = await client.rwlock("stopped").read().acquire();
      const upgradable = await other.rwlock("stopped").upgradable().acquire();
      const { signal } = upgradable;
      const controller = new AbortController();
      const upgrading = upgradable.upgrade({ signal: controller.signal });
      controller.abort();
      await assert.rejects(upgrading, { name: "AbortError" });
      await until(() => upgradable.isLost);
      await until(() => signal.aborted);
      assert.ok(signal.reason instanceof leasehold.LeaseLost);
      await reader.release();
    });

    native("using releases what its lease has become", async () => {
      const lock = client.rwlock("becomes");
      await lock.upgradable().using(async (lease) => void (await lease.upgrade()));
      assert.deepEqual((await client.inspect("becomes", "rw")).holders, []);
      await assert.rejects(
        lock.write().using(async (lease) => {
          await lease.downgrade();
          throw new Error("its own");
        }),
        /its own/,
      );
      assert.deepEqual((await client.inspect("becomes", "rw")).holders, []);
    });

    test("a semaphore has its permits", async () => {
      const semaphore = client.semaphore("permits", { permits: 3, take: 2 });
      const lease = await semaphore.acquire();
      assert.equal(await semaphore.tryAcquire(), null);
      const one = await other.semaphore("permits", { permits: 3 }).tryAcquire();
      const info = await client.inspect("permits", "semaphore");
      assert.deepEqual([info.capacity, info.inUse], [3, 3]);
      await lease.release();
      await one.release();
    });

    test("several locks, all or none", async () => {
      const one = await other.acquire("several b");
      await assert.rejects(client.lockAll(["several a", "several b"]).acquire({ wait: 50 }), leasehold.Timeout);
      await other.using("several a", { wait: 20_000 }, () => {});
      await one.release();
      await client.using(["several b", "several a"], (lease) => {
        assert.deepEqual(Object.keys(lease.tokens).sort(), ["several a", "several b"]);
      });
      assert.throws(() => client.lockAll("several a"), leasehold.InvalidInput);
      assert.throws(() => client.lockAll(["x", "x"]), leasehold.InvalidInput);
    });

    test("work is started once in a period", async () => {
      let starts = 0;
      for (const candidate of [client, other]) await candidate.oncePer("nightly", 3_600_000).using(() => starts++);
      assert.equal(starts, 1);
      assert.equal(await other.oncePer("nightly", 3_600_000).acquire(), null);
    });

    test("an election has one leader, whom observers see", async () => {
      const election = client.election("leader", { label: "http://10.0.0.7:8080" });
      assert.equal(await election.leader(), null);
      const seen = [];
      const stop = new AbortController();
      const watching = (async () => {
        for await (const leader of other.election("leader").observe({ every: 20, signal: stop.signal })) seen.push(leader?.token ?? null);
      })();
      await until(() => seen.length === 1);
      const leadership = await election.acquire();
      assert.equal((await election.leader()).process.label, "http://10.0.0.7:8080");
      await until(() => seen.length === 2);
      await leadership.release();
      await until(() => seen.length === 3);
      stop.abort(new Error("enough"));
      await assert.rejects(watching, /enough/);
      assert.deepEqual(seen, [null, leadership.token, null]);
    });

    test("a detached lease is attached by another client", async () => {
      const lease = await client.acquire("detached", { ttl: 5_000 });
      const text = await lease.detach();
      assert.equal(lease.isReleased, true);
      assert.equal(lease.expiresIn, 0);
      assert.equal(await client.tryLock("detached"), null);
      const attached = await other.attach(text);
      assert.equal(attached.token, lease.token);
      await attached.release();
      await assert.rejects(other.attach(text), leasehold.LeaseLost);
      await assert.rejects(other.attach("nonsense"), leasehold.InvalidInput);
      assert.throws(() => JSON.stringify(attached), /detach/);
    });

    test("a function runs under the lock of its arguments", async () => {
      const report = client.locked((user) => `report:${user}`, { wait: 0, busy: "skip" }, async (user) => `of ${user}`);
      assert.equal(await report(7), "of 7");
      await other.using("report:7", async () => {
        assert.equal(await report(7), undefined);
        assert.equal(await report(8), "of 8");
      });
      const strict = client.locked("report:7", { wait: 0 }, () => 1);
      await other.using("report:7", () => assert.rejects(strict(), leasehold.Timeout));
    });

    test("names have the client's namespace", async () => {
      const own = await connect(url, { namespace: "app" });
      const lease = await own.acquire("spaced");
      assert.equal(lease.name, "app:spaced");
      assert.deepEqual((await own.list()).map((lock) => lock.name), ["app:spaced"]);
      assert.equal((await client.inspect("app:spaced")).holders[0].token, lease.token);
      assert.equal((await own.inspect("spaced")).holders[0].process.label, null);
      await own.close();
      assert.equal(lease.loss, "closed");
      await assert.rejects(own.acquire("spaced"), leasehold.ClientClosed);
      assert.equal((await client.inspect("app:spaced")).holders.length, 0);
    });

    test("closing ends the waits", async () => {
      const closing = await connect(url);
      const lease = await client.acquire("closing");
      const waiting = closing.acquire("closing");
      await until(async () => (await client.inspect("closing")).waiters.length === 1);
      await Promise.all([assert.rejects(waiting, leasehold.ClientClosed), closing.close()]);
      await lease.release();
    });

    test("bad input is refused before anything is sent", async () => {
      assert.throws(() => client.lock("x", { tll: 1 }), leasehold.InvalidInput);
      assert.throws(() => client.lock("x", { ttl: "10" }), leasehold.InvalidInput);
      assert.throws(() => client.lock("x", { ttl: -1 }), leasehold.InvalidInput);
      assert.throws(() => client.lock(7), leasehold.InvalidInput);
      assert.throws(() => client.lock("\ud800"), leasehold.InvalidInput);
      assert.throws(() => client.lock("x", { signal: {} }), leasehold.InvalidInput);
      assert.throws(() => client.lock("x", { bridge: "redis-py:x" }), leasehold.InvalidInput);
      assert.throws(() => client.semaphore("x", { permits: 1.5 }), leasehold.InvalidInput);
      assert.throws(() => client.semaphore("x"), leasehold.InvalidInput);
      assert.throws(() => client.reentrant("x"), leasehold.InvalidInput);
      await assert.rejects(client.acquire("x", { ttl: 1 }), leasehold.InvalidInput);
      await assert.rejects(client.acquire(""), leasehold.InvalidInput);
      await assert.rejects(client.inspect("x", "nothing"), leasehold.InvalidInput);
      await assert.rejects(client.forceRelease("x", "mutex", { token: 7 }), leasehold.InvalidInput);
      assert.deepEqual((await client.list()).filter((lock) => lock.name === "x"), []);
    });

    if (isServer) {
      test("what the HTTP API does not have is refused", async () => {
        const unsupported = [
          () => client.rwlock("x").upgradable().acquire(),
          () => client.acquire("x", { bridge: leasehold.bridge.redisPy("x") }),
          () => client.acquire("x", { maxWaiters: 1 }),
          () => client.oncePer("x", 1_000, { atLeastOnce: true }).acquire(),
        ];
        for (const call of unsupported) await assert.rejects(call, leasehold.Unsupported);
        const writer = await client.rwlock("x").write().acquire();
        await assert.rejects(writer.downgrade(), leasehold.Unsupported);
        assert.equal(writer.isReleased, false);
        await writer.release();
        await assert.rejects(connect(url, { maxWaiters: 1 }), leasehold.Unsupported);
      });
    }
  });
}

test("addresses that cannot be used are refused", async () => {
  for (const address of ["redis", "", 7, "nothing://x", "http://user:secret@127.0.0.1", "unix:", "test:99"]) {
    await assert.rejects(connect(address), (error) => {
      assert.ok(error instanceof leasehold.InvalidInput, `${address}: ${error}`);
      assert.doesNotMatch(error.message, /secret/);
      return true;
    });
  }
  await assert.rejects(connect("memory:", { tok: 1 }), leasehold.InvalidInput);
  await assert.rejects(connect("memory:", { namespace: "a:" }), leasehold.InvalidInput);
  await assert.rejects(connect("memory:", { token: "t" }), leasehold.InvalidInput);
  await assert.rejects(connect("redis://127.0.0.1:1"), leasehold.Unavailable);
  await assert.rejects(connect("http://127.0.0.1:1"), leasehold.Unavailable);
});

test("no password of an address is shown, whether the store answers or not", async () => {
  const { inspect } = require("node:util");
  const redis = await startRedis();
  const addresses = [
    "redis-sentinel://127.0.0.1:1/m?sentinel_password=S3cret",
    "redis://me:S3cret@127.0.0.1:1",
    "redis+unix:///nowhere?pass=S3cret",
    "redlock:redis://:S3cret@127.0.0.1:1 redis://:S3cret@127.0.0.1:2",
    "postgres://me:S3cret@127.0.0.1:1/db",
    "postgres://127.0.0.1:1/db?password=S3cret",
    "http://127.0.0.1:1/?token=S3cret",
    "unix:/nowhere?token=S3cret",
    `${redis.url}?password=S3cret`,
  ];
  for (const address of addresses) {
    await connect(address, { connectTimeout: 100 }).then(
      (client) => {
        assert.doesNotMatch(`${client.address} ${inspect(client)}`, /S3cret/);
        return client.close();
      },
      (error) => assert.doesNotMatch(`${error.stack} ${inspect(error)}`, /S3cret/),
    );
  }
  await redis.stop();
});

test("what is released during an upgrade or a downgrade is not held afterwards", async () => {
  const redis = await startRedis();
  const client = await connect(redis.url);
  const free = () => until(async () => (await client.inspect("rw", "rw")).holders.length === 0);
  const reader = await client.rwlock("rw").read().acquire();
  const upgradable = await client.rwlock("rw").upgradable().acquire();
  const upgrading = upgradable.upgrade();
  assert.throws(() => upgradable.check(), leasehold.LeaseLost);
  await Promise.all([assert.rejects(upgrading, leasehold.LeaseLost), upgradable.release().catch(() => {})]);
  await reader.release();
  await free();
  const other = await client.rwlock("rw").read().acquire();
  const left = client.rwlock("rw").upgradable().using(async (lease) => {
    lease.upgrade().catch(() => {});
  });
  await left.catch((error) => assert.ok(error instanceof leasehold.LeaseLost));
  await other.release();
  await free();
  const writer = await client.rwlock("rw").write().acquire();
  const downgrading = writer.downgrade();
  await writer.release();
  assert.equal((await downgrading).isReleased, true);
  await free();
  await client.close();
  await redis.stop();
});

test("values that cannot be used leave a lease as it was, or are refused", async () => {
  const redis = await startRedis();
  const client = await connect(redis.url);
  const lease = await client.acquire("values", { ttl: 5_000, maxHold: Number.MAX_VALUE });
  await lease.release({ timeout: Number.MAX_VALUE });
  assert.equal((await client.inspect("values")).holders.length, 0);
  assert.throws(() => client.oncePer("x", Infinity), leasehold.InvalidInput);
  assert.throws(() => client.lock("x", { minHold: Infinity }), leasehold.InvalidInput);
  const again = await client.acquire("values");
  await assert.rejects(again.release({ timeout: -1 }), leasehold.InvalidInput);
  assert.equal(again.isReleased, false);
  await again.release();
  const renewing = await client.acquire("values");
  const renewed = renewing.renew().then(() => "renewed", (error) => error.name);
  const released = renewing.release();
  assert.ok(["renewed", "LeaseLost"].includes(await renewed));
  await released;
  await client.close();
  await redis.stop();
});

test("secrets are not repeated where they are not expected", async () => {
  const secrets = [
    [new URL("redis://:hunter2@127.0.0.1:1"), {}],
    [{ host: "h", password: "hunter2" }, {}],
    ["memory:", { token: Buffer.from("hunter2") }],
    ["http://127.0.0.1:1", { token: ["hunter2"] }],
    ["hunter2@127.0.0.1", {}],
    ["hunter2@127.0.0.1:6379", {}],
    ["http://h:hunter2", {}],
    ["http:///:hunter2@h", {}],
    ["unix:/x?a=1&token=hunter2", {}],
    ["unix:/x#token=hunter2", {}],
  ];
  for (const [address, options] of secrets) {
    await assert.rejects(connect(address, { connectTimeout: 50, ...options }), (error) => {
      assert.doesNotMatch(`${error.stack}`, /hunter2|68 75 6e/);
      return error instanceof leasehold.LeaseholdError;
    });
  }
});

test("many waits have one signal, and no warning is printed", async () => {
  const client = await connect("memory:");
  const lease = await client.acquire("many");
  const warnings = [];
  const warned = (warning) => warnings.push(warning);
  process.on("warning", warned);
  const controller = new AbortController();
  const waits = Array.from({ length: 50 }, () => client.acquire("many", { signal: controller.signal }));
  await new Promise(setImmediate);
  controller.abort(new Error("enough"));
  for (const waiting of waits) await assert.rejects(waiting, /enough/);
  await new Promise(setImmediate);
  process.removeListener("warning", warned);
  assert.deepEqual(warnings, []);
  await lease.release();
  await client.close();
});
