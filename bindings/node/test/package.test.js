"use strict";
// The package as it is installed: its types, its two module systems, and what loading it costs.

const assert = require("node:assert/strict");
const { execFileSync } = require("node:child_process");
const fs = require("node:fs");
const path = require("node:path");
const { test } = require("node:test");
const { pathToFileURL } = require("node:url");
const { newFolder } = require("./servers");

const FOLDER = path.dirname(require.resolve("leasehold/package.json"));

test("the ESM file has what the CommonJS file has", async () => {
  for (const name of ["index", "redlock", "testing"]) {
    const required = require(path.join(FOLDER, `${name}.js`));
    const imported = await import(pathToFileURL(path.join(FOLDER, `${name}.mjs`)).href);
    assert.equal(imported.default, required);
    for (const key of Object.keys(required)) {
      if (key !== "default") assert.equal(imported[key], required[key], `${name}: ${key}`);
    }
  }
});

test("the types are those of the package, and programs compile strictly", () => {
  const tsc = path.join(path.dirname(require.resolve("typescript/package.json")), "bin/tsc");
  const program = path.join(__dirname, "types.ts");
  const options = ["--noEmit", "--strict", "--exactOptionalPropertyTypes", "--noUncheckedIndexedAccess", "--target", "esnext", "--module", "nodenext"];
  execFileSync(process.execPath, [tsc, ...options, "--types", "node", program], { stdio: "pipe", encoding: "utf8" });
});

test("no back end is loaded before an address needs it", () => {
  const code = `
    require("leasehold");
    const loaded = Object.keys(require.cache).filter((file) => /native|http|ioredis/.test(file.replace(${JSON.stringify(FOLDER)}, "")));
    if (loaded.length > 0) throw new Error(loaded.join());`;
  execFileSync(process.execPath, ["-e", code], { cwd: __dirname, stdio: "pipe" });
});

test("the client of servers needs no native module", async () => {
  const folder = newFolder();
  fs.cpSync(FOLDER, folder, { recursive: true });
  fs.rmSync(path.join(folder, "leasehold.node"));
  const code = `
    const { connect, Unavailable, Unsupported } = require(${JSON.stringify(folder)});
    connect("http://127.0.0.1:1", { connectTimeout: 10 }).catch((error) => {
      if (!(error instanceof Unavailable)) throw error;
      return connect("memory:").then(() => { throw new Error("it works"); }, (error) => {
        if (!(error instanceof Unsupported)) throw error;
        console.log(error.message);
      });
    });`;
  const said = execFileSync(process.execPath, ["-e", code], { encoding: "utf8", stdio: "pipe" });
  assert.match(said, /no native module for .*: use the http: or unix: address/);
  fs.rmSync(folder, { recursive: true });
});

test("no call is lost that is answered while it is being made", async () => {
  const folder = newFolder();
  fs.cpSync(FOLDER, folder, { recursive: true });
  fs.rmSync(path.join(folder, "leasehold.node"));
  // A module whose calls are woken by another thread before they have returned.
  const fake = `
    let ready = [];
    exports.Failed = class {};
    exports.Environment = class {
      get isReady() { return ready.length > 0; }
      take() { const keys = ready; ready = []; return keys; }
      result() { return null; }
      records() { return 2; }
      shutDown() {}
    };
    exports.open = () => ({ connect() { ready.push(1); return 1; } });`;
  fs.mkdirSync(path.join(folder, "leasehold.node"));
  fs.writeFileSync(path.join(folder, "leasehold.node/index.js"), fake);
  const connecting = require(folder).connect("memory:");
  const later = new Promise((resolve) => setImmediate(() => setImmediate(resolve)));
  assert.notEqual(await Promise.race([connecting, later]), undefined);
  fs.rmSync(folder, { recursive: true });
});
