"use strict";
// Holds a lock while the event loop is blocked: block.js URL NAME TTL MILLISECONDS. Prints what it knows of the lease at once afterwards.

const { connect } = require("leasehold");

async function main() {
  const [url, name, ttl, milliseconds] = process.argv.slice(2);
  const client = await connect(url);
  const lease = await client.acquire(name, { ttl: Number(ttl) });
  const { signal } = lease;
  console.log("blocks");
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, Number(milliseconds));
  const isLost = lease.isLost;
  await new Promise((resolve) => setTimeout(resolve, 50));
  console.log(JSON.stringify({ isLost, isAborted: signal.aborted }));
  await client.close();
}

main();
