"use strict";
// Processes with tasks count in a file under one lock, while some of them are killed.
//
// Each turn appends a line with the next number and its token. Two holders at a time would write one number twice, and a stale one a lower token.
// `LEASEHOLD_COUNTER_SECONDS=60` runs for a minute with each store.

const assert = require("node:assert/strict");
const fs = require("node:fs");
const path = require("node:path");
const { test } = require("node:test");
const { setTimeout: sleep } = require("node:timers/promises");
const { newFolder, node, startPostgres, startRedis, startServe, until } = require("./servers");

const SECONDS = Number(process.env.LEASEHOLD_COUNTER_SECONDS ?? 5);
const PROCESSES = 8;

const STORES = {
  sqlite: async (folder) => [`sqlite:${path.join(folder, "locks.db")}`, []],
  redis: async () => withServer(await startRedis()),
  postgres: async () => withServer(await startPostgres()),
  "serve over redis": async () => {
    const redis = await startRedis();
    const serve = await startServe(redis.url);
    return [serve.url, [serve, redis]];
  },
};

function withServer(server) {
  return [server.url, [server]];
}

for (const [name, start] of Object.entries(STORES)) {
  test(`the counter is exact while processes are killed: ${name}`, async (context) => {
    const folder = newFolder();
    const [url, servers] = await start(folder);
    const counter = path.join(folder, "counter");
    fs.writeFileSync(counter, "0 0\n");
    const size = () => fs.statSync(counter).size;
    const worker = () => node("count.js", url, counter);
    const workers = Array.from({ length: PROCESSES }, worker);
    const outputs = [];
    let killed = 0;
    // A worker that has ended by itself has found a violation, or an error.
    const check = () => {
      for (const { isRunning, output } of workers) assert.ok(isRunning, output);
    };
    try {
      await until(() => size() > 100);
      const end = performance.now() + SECONDS * 1_000;
      while (performance.now() < end) {
        await sleep(500 + Math.random() * 1_000);
        check();
        const at = Math.floor(Math.random() * PROCESSES);
        await workers[at].stop();
        outputs.push(workers[at].output);
        workers[at] = worker();
        killed += 1;
      }
      // The lock of the last one that was killed is free after its ttl.
      const before = size();
      await until(() => size() > before);
      check();
    } finally {
      await Promise.all(workers.map((worker) => worker.stop()));
      for (const server of servers) await server.stop();
    }
    const lines = fs.readFileSync(counter, "utf8").trimEnd().split("\n").map((line) => line.split(" ").map(BigInt));
    lines.forEach(([number, token], at) => {
      assert.equal(number, BigInt(at));
      if (at > 0) assert.ok(token > lines[at - 1][1], `line ${at}`);
    });
    assert.ok(killed > 2);
    const lost = [...outputs, ...workers.map(({ output }) => output)].join("").split("\n").filter(Boolean).length;
    assert.ok(lost < lines.length);
    context.diagnostic(`${lines.length} turns, ${killed} processes killed, ${lost} leases or answers lost`);
  });
}
