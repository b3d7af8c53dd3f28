"use strict";
// The examples of the README, of docs/node.md and of examples/node run.

const assert = require("node:assert/strict");
const fs = require("node:fs");
const path = require("node:path");
const { after, before, test } = require("node:test");
const { Program, freePort, newFolder, startRedis } = require("./servers");

const ROOT = process.env.LEASEHOLD_ROOT ?? path.join(__dirname, "../../..");

let redis;

before(async () => (redis = await startRedis({ port: await freePort() })));
after(() => redis.stop());

/** The blocks of a page in this language. */
function blocks(page, language) {
  const text = fs.readFileSync(path.join(ROOT, page), "utf8");
  return [...text.matchAll(/^```(\w+)\n(.*?)^```$/gms)].filter(([, of]) => of === language).map(([, , code]) => code);
}

/** Runs a program beside the tests, where it finds the packages. */
async function run(name, code) {
  const file = path.join(__dirname, `documents-${name}.mjs`);
  fs.writeFileSync(file, code);
  const program = new Program(process.execPath, [file]);
  const { code: ended } = await program.ended;
  fs.rmSync(file);
  assert.equal(ended, 0, `${code}\n${program.output}`);
  return program.output;
}

for (const page of ["bindings/node/README.md", "bindings/node/README.zh-CN.md", "docs/node.md", "docs/zh-CN/node.md"]) {
  test(page, async () => {
    const found = blocks(page, "js");
    assert.ok(found.length > 0);
    for (const [at, code] of found.entries()) {
      // On the server of this test.
      const here = code.replaceAll("redis://127.0.0.1", `redis://127.0.0.1:${redis.port}`).replaceAll("new Redis()", `new Redis(${redis.port})`);
      await run(`${path.basename(path.dirname(page))}-${path.basename(page)}-${at}`, here);
    }
  });
}

test("the results in comments of docs/node.md are those of its program", async () => {
  const code = blocks("docs/node.md", "js").find((block) => block.includes("TestStore"));
  const expected = [...code.matchAll(/^console\.log\(.*\); \/\/ (.*)$/gm)].map(([, result]) => result);
  assert.deepEqual((await run("results", code)).trim().split("\n"), expected);
});

test("the service of examples/node ships an order once at a time", async () => {
  const file = path.join(__dirname, "documents-orders.mjs");
  fs.copyFileSync(path.join(ROOT, "examples/node/orders.mjs"), file);
  const store = `sqlite:${path.join(newFolder(), "orders.db")}`;
  const start = () => new Program(process.execPath, [file], { env: { ...process.env, PORT: "0", STORE: store, WORK: "2500" } });
  const services = [start(), start()];
  const ports = [];
  for (const service of services) {
    await service.hasSaid("listens on");
    ports.push(service.output.match(/listens on (\d+)/)[1]);
  }
  const ship = (at, order) => fetch(`http://127.0.0.1:${ports[at]}/orders/${order}/ship`, { method: "POST" });
  const first = ship(0, 42);
  // The first one has the lock once a second one of the same process waits in vain.
  const others = await Promise.all([ship(0, "042"), ship(1, "42")]);
  const answers = [await first, ...others];
  assert.deepEqual(answers.map(({ status }) => status).sort(), [200, 409, 409]);
  const shipped = await answers.find(({ status }) => status === 200).json();
  assert.equal(shipped.order, 42);
  assert.match(shipped.token, /^\d+$/);
  assert.equal((await ship(1, 43)).status, 200);
  assert.equal((await ship(1, "x")).status, 404);
  for (const service of services) {
    service.kill("SIGTERM");
    assert.equal((await service.ended).signal, "SIGTERM");
  }
  fs.rmSync(file);
});
