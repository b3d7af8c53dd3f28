"use strict";
// Forgets a lease, which is released once it is collected: forget.js URL NAME, with --expose-gc

const { connect } = require("leasehold");

process.on("warning", (warning) => console.log(warning.message));

async function main() {
  const [url, name] = process.argv.slice(2);
  const client = await connect(url);
  await (async () => {
    const lease = await client.acquire(name, { ttl: 30_000 });
    // Watching it does not keep it, but tells that it is released.
    lease.signal.addEventListener("abort", ({ target }) => console.log("aborted:", target.reason.reason));
  })();
  for (;;) {
    globalThis.gc();
    await new Promise((resolve) => setTimeout(resolve, 10));
    const lease = await client.tryLock(name);
    if (lease !== null) {
      console.log("released");
      await client.close();
      return;
    }
  }
}

main();
