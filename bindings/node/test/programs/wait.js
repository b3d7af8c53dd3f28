"use strict";
// Waits for a lock, which keeps the process alive: wait.js URL NAME

const { connect } = require("leasehold");

async function main() {
  const [url, name] = process.argv.slice(2);
  const client = await connect(url);
  console.log("waits");
  await client.using(name, () => console.log("granted"));
}

main();
