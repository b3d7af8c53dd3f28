"use strict";
// Releases the leases of a process that exits: a program of its own, which index.js starts. The leases come by its standard input.

const { readFileSync } = require("node:fs");
const { parse } = require("./address");
const { Api } = require("./api");

for (const { url, token, ids } of JSON.parse(readFileSync(0, "utf8"))) {
  const api = new Api(parse(url), token, null);
  // 500 is the most that a server takes at a time.
  for (let at = 0; at < ids.length; at += 500) {
    api.call("POST", "/v1/leases/release", { leases: ids.slice(at, at + 500) }, { limit: 1_000 }).catch(() => {});
  }
}
