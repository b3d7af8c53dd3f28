"use strict";
// Holds a lock, says so, and ends in one of several ways: hold.js URL NAME HOW

const { connect, releaseOnSignals } = require("leasehold");

async function main() {
  const [url, name, how] = process.argv.slice(2);
  const client = await connect(url);
  if (how === "signals") releaseOnSignals(client);
  const lease = await client.acquire(name, { ttl: 30_000 });
  console.log(`holds ${lease.token}`);
  switch (how) {
    case "end":
      // Nothing keeps the process alive.
      return;
    case "exit":
      process.exit(3);
      break;
    case "throw":
      setImmediate(() => {
        throw new Error("the program's own");
      });
      return;
    case "watch":
      // A watched lease keeps no process alive either.
      lease.signal.addEventListener("abort", () => {});
      return;
    default:
      setInterval(() => {}, 1_000);
  }
}

main();
