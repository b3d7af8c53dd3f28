"use strict";
// Workers of node:cluster count in a file under one lock: cluster.js URL FILE

const cluster = require("node:cluster");
const fs = require("node:fs");
const { connect } = require("leasehold");

async function main() {
  const [url, file] = process.argv.slice(2);
  // Before the fork, and in each worker.
  const client = await connect(url);
  if (cluster.isPrimary) {
    await client.using("cluster", () => fs.writeFileSync(file, "0"));
    for (let at = 0; at < 4; at++) cluster.fork();
    cluster.on("exit", (_, code) => {
      if (code !== 0) process.exit(1);
    });
    return;
  }
  for (let turn = 0; turn < 25; turn++) {
    await client.using("cluster", async () => {
      const number = Number(fs.readFileSync(file, "utf8"));
      await new Promise(setImmediate);
      fs.writeFileSync(file, String(number + 1));
    });
  }
  process.exit(0);
}

main();
