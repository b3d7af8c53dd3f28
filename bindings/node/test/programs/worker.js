"use strict";
// A worker that holds one lock and waits for another one, until it is terminated.

const { parentPort, workerData } = require("node:worker_threads");
const { connect } = require("leasehold");

async function main() {
  const { url, held, busy } = workerData;
  const client = await connect(url);
  const lease = await client.acquire(held, { ttl: 30_000 });
  lease.signal.addEventListener("abort", () => {});
  const waiting = client.acquire(busy, { ttl: 30_000 });
  parentPort.postMessage("holds");
  await waiting;
}

main();
