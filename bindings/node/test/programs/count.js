"use strict";
// Tasks that count in a file under one lock, for ever: count.js URL FILE

const fs = require("node:fs");
const { connect, LeaseLost, Unavailable } = require("leasehold");

async function main() {
  const [url, file] = process.argv.slice(2);
  const client = await connect(url, { ttl: 3_000 });
  const turn = async (lease) => {
    const counter = fs.openSync(file, "r+");
    const { size } = fs.fstatSync(counter);
    const end = Buffer.alloc(Math.min(64, size));
    fs.readSync(counter, end, 0, end.length, size - end.length);
    const [number, token] = end.toString().trimEnd().split("\n").at(-1).split(" ").map(BigInt);
    if (lease.token <= token) throw new Error(`the token ${lease.token} is not above ${token}`);
    // A holder that was stopped, or told that its lease is lost, does not write.
    lease.check();
    fs.writeSync(counter, `${number + 1n} ${lease.token}\n`, size);
    fs.closeSync(counter);
    await new Promise(setImmediate);
  };
  const work = async () => {
    for (;;) {
      try {
        await client.using("counter", turn);
      } catch (error) {
        // A machine without a moment's time for a process may cost it its lease, or an answer. That is printed, and the work goes on.
        if (!(error instanceof LeaseLost || error instanceof Unavailable)) throw error;
        console.log(error.message.replaceAll("\n", " "));
      }
    }
  };
  await Promise.all(Array.from({ length: 50 }, work));
}

main();
