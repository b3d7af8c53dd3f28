// Compares the package with redlock in one run, by interleaved rounds: medians, and ratios within the run.
//
//   cd target/node/environment && node ../../../bindings/node/bench/compare.mjs [ROUNDS]
//
// It runs where the packages leasehold, redlock and ioredis are, and starts a Redis of its own on a Unix socket.

import { fork, spawn } from "node:child_process";
import { once } from "node:events";
import fs from "node:fs";
import { createRequire } from "node:module";
import os from "node:os";
import path from "node:path";
import { fileURLToPath } from "node:url";

const require = createRequire(path.join(process.cwd(), "package.json"));
const { connect } = require("leasehold");
const Redis = require("ioredis");
const { default: Redlock } = require("redlock");

const HOLD = 1;
const PROCESSES = 8;
const SECONDS = 3;

if (process.send !== undefined) await work();
else await compare(Number(process.argv[2] ?? 7));

function median(numbers) {
  return [...numbers].sort((a, b) => a - b)[Math.floor(numbers.length / 2)];
}

async function compare(rounds) {
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), "leasehold-bench-"));
  const socket = path.join(folder, "redis.sock");
  const server = spawn("redis-server", ["--port", "0", "--unixsocket", socket, "--save", "", "--dir", folder], { stdio: "ignore" });
  while (!fs.existsSync(socket)) await new Promise((resolve) => setTimeout(resolve, 10));
  const client = await connect(`redis+unix:${socket}`);
  const redis = new Redis(socket);
  const redlock = new Redlock([redis]);
  try {
    await table("an uncontended lock and its release, µs", rounds, {
      "leasehold, acquire and release": () => each(2_000, async (lock = client.lock("a")) => (await lock.acquire()).release()),
      "leasehold, using": () => each(2_000, (lock = client.lock("a")) => lock.using(() => {})),
      redlock: () => each(2_000, async () => (await redlock.acquire(["b"], 10_000)).release()),
      "two PINGs of ioredis": () => each(2_000, () => redis.ping().then(() => redis.ping())),
    });
    await table("100 tasks of a process on one lock, µs for a turn", rounds, {
      leasehold: () => turns((lock = client.lock("c")) => lock.using(async () => {})),
      "a queue of promises": () => turns(queue()),
    });
    console.log(`\n${PROCESSES} processes on one lock, hold ${HOLD} ms`);
    const found = { leasehold: [], redlock: [] };
    for (let round = 0; round < Math.min(rounds, 3); round++) {
      for (const library of Object.keys(found)) found[library].push(await contend(library, socket));
    }
    for (const [library, runs] of Object.entries(found)) {
      const rate = median(runs.map((run) => run.rate));
      const longest = median(runs.map((run) => run.longest));
      console.log(`${library}: ${rate.toFixed(0)} acquisitions/s, longest wait at the 99.9th percentile ${longest.toFixed(1)} ms`);
    }
  } finally {
    await client.close();
    redis.disconnect();
    server.kill();
    await once(server, "exit");
    fs.rmSync(folder, { recursive: true });
  }
}

async function table(title, rounds, rows) {
  const found = Object.fromEntries(Object.keys(rows).map((name) => [name, []]));
  for (let round = 0; round <= rounds; round++) {
    for (const [name, run] of Object.entries(rows)) {
      const took = await run();
      // The first round warms up.
      if (round > 0) found[name].push(took);
    }
  }
  console.log(`\n${title}`);
  for (const [name, times] of Object.entries(found)) console.log(`${name}: ${median(times).toFixed(2)}`);
}

/** Microseconds of one turn, one after the other. */
async function each(count, turn) {
  const begun = performance.now();
  for (let at = 0; at < count; at++) await turn();
  return ((performance.now() - begun) / count) * 1_000;
}

/** The same for 100 tasks. */
async function turns(turn) {
  const [tasks, each] = [100, 50];
  const begun = performance.now();
  await Promise.all(Array.from({ length: tasks }, async () => {
    for (let at = 0; at < each; at++) await turn();
  }));
  return ((performance.now() - begun) / (tasks * each)) * 1_000;
}

function queue() {
  let tail = Promise.resolve();
  return () => {
    const turn = tail.then(async () => {});
    tail = turn.catch(() => {});
    return turn;
  };
}

/** Acquisitions per second, and the longest wait of 999 in 1,000. */
async function contend(library, socket) {
  const workers = Array.from({ length: PROCESSES }, () => fork(fileURLToPath(import.meta.url), [library, socket]));
  await Promise.all(workers.map((worker) => once(worker, "message")));
  const waits = workers.map(async (worker) => {
    worker.send("go");
    const [found] = await once(worker, "message");
    return found;
  });
  const all = (await Promise.all(waits)).flat().sort((a, b) => a - b);
  await Promise.all(workers.map((worker) => worker.exitCode ?? once(worker, "exit")));
  return { rate: all.length / SECONDS, longest: all[Math.floor(all.length * 0.999)] };
}

async function work() {
  const [library, socket] = process.argv.slice(2);
  const sleep = () => new Promise((resolve) => setTimeout(resolve, HOLD));
  let using;
  if (library === "leasehold") {
    const client = await connect(`redis+unix:${socket}`);
    using = (routine, name = "contended") => client.using(name, routine);
  } else {
    const redlock = new Redlock([new Redis(socket)], { retryCount: -1 });
    using = (routine, name = "contended") => redlock.using([name], 10_000, routine);
  }
  // Connected, and compiled.
  for (let turn = 0; turn < 200; turn++) await using(async () => {}, `own ${process.pid}`);
  process.send("ready");
  await once(process, "message");
  const end = performance.now() + SECONDS * 1_000;
  const waits = [];
  while (performance.now() < end) {
    const asked = performance.now();
    await using(async () => {
      waits.push(performance.now() - asked);
      await sleep();
    });
  }
  process.send(waits, () => process.exit());
}
