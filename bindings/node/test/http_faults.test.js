"use strict";
// Servers that end, freeze, refuse or do not answer; callers that give up, and answers that are wrong. Over HTTP.

const assert = require("node:assert/strict");
const { execFileSync } = require("node:child_process");
const fs = require("node:fs");
const path = require("node:path");
const { afterEach, describe, test } = require("node:test");
const { setImmediate: immediate, setTimeout: sleep } = require("node:timers/promises");
const leasehold = require("leasehold");
const { FakeServer, Proxy, READ_TOKEN, Serve, grant, outcomes, problem, rawServer } = require("./http_servers");
const { Program, TOKEN, freePort, newFolder, startRedis, stays, until } = require("./servers");

/** What a test has started: it ends with the test, the last one first. */
const started = [];
const ends = async (server) => {
  const running = await server;
  started.push(running);
  return running;
};
const serve = (store, options) => ends(Serve.start(store, options));
const fake = (reply) => ends(FakeServer.start(reply));
const connect = async (url, options = {}) => {
  const client = await leasehold.connect(url, options);
  // A server that answers no release is no reason to wait for it.
  started.push({ stop: () => client.close({ timeout: 1 }).catch(() => {}) });
  return client;
};

afterEach(async () => {
  for (const one of started.splice(0).reverse()) await one.stop();
});

/** What a fake server answers if nothing else matters. */
function ordinary(more = () => undefined) {
  return async (url, body) => {
    const answer = await more(url, body);
    if (answer !== undefined) return answer;
    if (url.endsWith("/renew")) return outcomes("renewed", body);
    if (url.endsWith("/release")) return outcomes("released", body);
    return [200, {}, grant()];
  };
}

describe("the time of a lease", () => {
  test("all leases of a client are renewed by one request", async () => {
    let token = 1;
    const server = await fake(ordinary((url) => (url.endsWith("/acquire") ? [200, {}, grant({ token: token++, expiresIn: 9_000 })] : undefined)));
    const client = await connect(server.url, { ttl: 9_000 });
    const leases = await Promise.all(Array.from({ length: 20 }, () => client.acquire("a")));
    await until(() => server.sent("/renew").length > 0);
    assert.deepEqual(server.sent("/renew").map(({ body }) => body.leases.length), [20]);
    assert.ok(!leases.some((lease) => lease.isLost));
  });

  test("it counts from when the request was sent", async () => {
    const server = await fake(ordinary(async (url) => {
      if (!url.endsWith("/acquire")) return undefined;
      await sleep(1_000);
      return [200, {}, grant({ expiresIn: 5_000 })];
    }));
    const lease = await (await connect(server.url)).acquire("a");
    assert.ok(lease.expiresIn < 4_100, String(lease.expiresIn));
  });

  test("no answer makes it longer than its ttl", async () => {
    const long = { expires_in_ms: 3_600_000 };
    const server = await fake(ordinary((url, body) => (url.endsWith("/renew") ? outcomes("renewed", body, long) : [200, {}, { ...grant(), ...long }])));
    const lease = await (await connect(server.url)).acquire("a", { ttl: 3_000 });
    assert.ok(lease.expiresIn <= 3_000);
    await lease.renew();
    assert.ok(lease.expiresIn <= 3_000);
  });

  test("one that was waited for lasts its whole ttl", async () => {
    const server = await fake(ordinary(async (url) => {
      if (!url.endsWith("/acquire")) return undefined;
      await sleep(1_500);
      return [200, {}, grant({ expiresIn: 4_400 })];
    }));
    const lease = await (await connect(server.url)).acquire("a", { ttl: 3_000 });
    assert.ok(lease.expiresIn > 1_500 && lease.expiresIn <= 3_000, String(lease.expiresIn));
  });

  test("one that no server renews is lost when it is over, and says why", async () => {
    const server = await serve();
    const records = [];
    const listener = (record) => records.push(record.message);
    leasehold.log.on("record", listener);
    const lease = await (await connect(server.url)).acquire("a", { ttl: 2_000 });
    const { signal } = lease;
    await server.kill();
    await until(() => signal.aborted);
    leasehold.log.off("record", listener);
    assert.ok(signal.reason instanceof leasehold.LeaseLost);
    assert.equal(lease.loss, "expired");
    assert.throws(() => lease.check(), /no server listens there/);
    assert.ok(records.some((message) => message.includes("lease lost")), String(records));
    assert.ok(records.some((message) => message.includes("which is tried again")), String(records));
  });

  test("one whose maximum hold is over is released at the server too", async () => {
    const client = await connect((await serve()).url);
    const lease = await client.acquire("a", { maxHold: 300 });
    const { signal } = lease;
    await (await client.acquire("a")).release();
    assert.equal(lease.loss, "max_hold");
    await until(() => signal.aborted);
    await assert.rejects(lease.release(), /maximum hold/);
  });

  test("a renewal without an answer delays no other lease", async () => {
    const server = await fake(ordinary(async (url, body) => {
      if (url.endsWith("/renew") && body.leases.some((lease) => lease.includes("long"))) await sleep(4_500);
      if (url.endsWith("/renew")) return outcomes("renewed", body, { expires_in_ms: 4_000 });
      if (url.endsWith("/release")) return undefined;
      const name = body.ttl_ms > 5_000 ? "long" : "short";
      return [200, {}, grant({ name, expiresIn: name === "long" ? 14_000 : 4_000 })];
    }));
    const client = await connect(server.url);
    await client.acquire("long", { ttl: 20_000 });
    const short = await client.acquire("short", { ttl: 4_000 });
    await stays(() => !short.isLost, 9_000);
  });

  test("a token beyond the numbers of JavaScript is exact", async () => {
    const token = 2n ** 60n + 1n;
    const content = JSON.stringify({ ...grant(), token: 0, token_text: String(token) }).replace('"token":0', `"token":${Number(token).toExponential()}`);
    const server = await fake(ordinary((url) => (url.endsWith("/acquire") ? [200, {}, content] : undefined)));
    const lease = await (await connect(server.url)).acquire("a");
    assert.equal(lease.token, token);
  });
});

describe("servers that end", () => {
  for (const kind of ["sqlite", "redis"]) {
    const storeOf = async () => (kind === "sqlite" ? `sqlite:${newFolder()}/locks.db` : (await ends(startRedis())).url);

    test(`a lease outlasts the restart of its server, over ${kind}`, async () => {
      const server = await serve(await storeOf());
      const client = await connect(server.url);
      const lease = await client.acquire("a", { ttl: 6_000 });
      await server.kill();
      // It could not be renewed when that was due.
      await until(() => lease.expiresIn < 3_900);
      await server.start();
      await until(() => lease.expiresIn > 5_500);
      lease.check();
      assert.equal(await client.tryLock("a"), null);
      await lease.release();
      const later = await client.acquire("a", { wait: 5_000 });
      assert.ok(later.token > lease.token);
    });

    for (const signal of ["SIGKILL", "SIGTERM"]) {
      test(`a wait outlasts the end of its server by ${signal}, over ${kind}`, async () => {
        const server = await serve(await storeOf());
        const client = await connect(server.url);
        const lease = await client.acquire("a", { ttl: 20_000 });
        let isGranted = false;
        const waiting = client.acquire("a", { wait: 60_000 }).then((granted) => {
          isGranted = true;
          return granted;
        });
        await until(async () => (await client.inspect("a")).waiters.length > 0);
        await server.kill(signal);
        await server.start();
        assert.ok(!isGranted);
        await lease.release();
        await (await waiting).release();
      });
    }
  }

  test("a frozen server is left for another one", async () => {
    const store = `sqlite:${newFolder()}/locks.db`;
    const [first, second] = [await serve(store, { tcp: true }), await serve(store, { tcp: true })];
    const client = await connect(`${first.url},127.0.0.1:${second.port}`, { token: TOKEN });
    const lease = await client.acquire("a", { ttl: 6_000 });
    first.freeze();
    await stays(() => !lease.isLost, 7_000);
    assert.equal(await client.tryLock("a"), null);
  });

  test("several servers are asked in turn", async () => {
    const server = await serve(undefined, { tcp: true });
    const client = await connect(`http://127.0.0.1:${await freePort()},127.0.0.1:${server.port}`, { token: TOKEN });
    await (await client.acquire("a")).release();
  });

  test("a server that accepts no connection is left for another one long before the wait of a slice is over", async () => {
    // Its queue of connections is full, so that the system answers no further one.
    const script = `const server = require("http").createServer((_request, response) => {
        response.shouldKeepAlive = false;
        response.end("{}");
      }).listen({ port: 0, host: "127.0.0.1", backlog: 1 }, () => console.log(server.address().port))`;
    const stuck = await ends(new Program(process.execPath, ["-e", script]));
    await stuck.hasSaid("\n");
    const port = Number(stuck.output.trim());
    const server = await fake(ordinary());
    const client = await connect(`http://127.0.0.1:${port},${server.url.slice(7)}`);
    stuck.kill("SIGSTOP");
    const others = Array.from({ length: 8 }, () => require("node:net").connect(port, "127.0.0.1").on("error", () => {}));
    await until(() => others.some((other) => !other.connecting));
    try {
      const began = performance.now();
      await client.acquire("a");
      assert.ok(performance.now() - began < 19_000, String(performance.now() - began));
    } finally {
      for (const other of others) other.destroy();
      stuck.kill("SIGCONT");
    }
  });

  test("a server that stops is left at once, and a full one is asked later", async () => {
    const asked = [];
    const first = await fake(() => {
      asked.push(["stopping", performance.now()]);
      return problem("stopping", 503, { tryAnother: true, retryAfter: 1 });
    });
    const second = await fake(ordinary((url) => {
      if (!url.endsWith("/acquire")) return undefined;
      asked.push(["full", performance.now()]);
      return asked.length < 4 ? problem("limit-reached", 429, { retryAfter: 1 }) : undefined;
    }));
    await (await connect(`${first.url},${second.url.slice(7)}`)).acquire("a", { wait: 30_000 });
    assert.deepEqual(asked.map(([who]) => who), ["stopping", "full", "stopping", "full"]);
    assert.ok(asked[2][1] - asked[1][1] >= 990);
  });
});

describe("answers that are lost", () => {
  test("that of an acquisition is the same lease", async () => {
    for (const kind of ["sqlite", "redis"]) {
      const store = kind === "sqlite" ? `sqlite:${newFolder()}/locks.db` : (await ends(startRedis())).url;
      const server = await serve(store, { tcp: true });
      let cuts = 0;
      const proxy = await ends(Proxy.start([server.port], (request) => request.includes("/acquire") && cuts++ < 2));
      const client = await connect(proxy.url, { token: TOKEN });
      const lease = await client.tryLock("a");
      assert.ok(lease !== null);
      assert.ok(cuts >= 2);
      assert.deepEqual((await client.inspect("a")).holders.map(({ token }) => token), [lease.token]);
      await lease.release();
      assert.ok((await client.tryLock("a")) !== null);
    }
  });

  test("that of a release is asked for again", async () => {
    const server = await serve(undefined, { tcp: true });
    let cuts = 0;
    const proxy = await ends(Proxy.start([server.port], (request) => request.includes("/release") && cuts++ < 1));
    const client = await connect(proxy.url, { token: TOKEN });
    await (await client.acquire("a")).release();
    assert.ok(cuts >= 1);
    assert.deepEqual((await client.inspect("a")).holders, []);
  });

  test("no answer at all is neither busy nor granted", async () => {
    const server = await fake(() => null);
    const client = await connect(server.url, { connectTimeout: 1_000 });
    await assert.rejects(client.tryLock("a"), leasehold.Unavailable);
    const ids = server.sent("/acquire").map(({ body }) => body.request_id);
    assert.ok(ids.length > 1);
    assert.equal(new Set(ids).size, 1);
    assert.ok(ids[0].length >= 32);
    await assert.rejects(client.acquire("a", { wait: 300 }), leasehold.Unavailable);
    // Locks together have no ids, so that a second request would meet the lease of the first one.
    server.requests.length = 0;
    await assert.rejects(client.lockAll(["a", "b"]).tryAcquire(), /may have been done/);
    assert.equal(server.sent("/v1/locks/acquire").length, 1);
  });

  test("a release that is not confirmed is an error, and goes on", async () => {
    let refusals = 1;
    const server = await fake(ordinary((url, body) => {
      if (!url.endsWith("/release")) return undefined;
      return refusals-- > 0 ? outcomes("unknown", body, { detail: "the store did not answer" }) : outcomes("already-ended", body);
    }));
    const lease = await (await connect(server.url)).acquire("a");
    await assert.rejects(lease.release(), (error) => error instanceof leasehold.Unavailable && /the store did not answer/.test(error.message));
    await until(() => server.sent("/release").length === 2);
  });

  test("a counter is exact behind a balancer that cuts connections, while a server is killed", async () => {
    const store = `sqlite:${newFolder()}/locks.db`;
    const servers = [await serve(store, { tcp: true }), await serve(store, { tcp: true })];
    const proxy = await ends(Proxy.start(servers.map(({ port }) => port), () => Math.random() < 0.05));
    let counter = 0;
    let isInside = false;
    let last = 0n;
    let count = 0;
    const end = performance.now() + 6_000;
    const work = async () => {
      const client = await connect(proxy.url, { token: TOKEN });
      while (performance.now() < end) {
        await client.using("a", { wait: 60_000, ttl: 10_000 }, async (lease) => {
          assert.ok(!isInside);
          isInside = true;
          assert.ok(lease.token > last);
          last = lease.token;
          const value = counter;
          await immediate();
          counter = value + 1;
          isInside = false;
        });
        count++;
      }
    };
    const all = Promise.all(Array.from({ length: 8 }, work));
    await until(() => count >= 10);
    await servers[0].kill();
    await servers[0].start();
    await all;
    assert.equal(counter, count);
    assert.ok(count > 8);
  });
});

describe("answers that are wrong", () => {
  for (const [what, content] of [
    ["of another name", grant({ name: "b" })],
    ["of a negative time", grant({ expiresIn: -1 })],
    ["of an infinite time", { ...grant(), expires_in_ms: "Infinity" }],
    ["of no time", { ...grant(), expires_in_ms: null }],
    ["without a token", { ...grant(), token_text: undefined }],
    ["with another token", { ...grant(), token_text: "-1" }],
    ["of no lease", {}],
    ["of a list", []],
    ["of a text", '"text"'],
    ["of null", { ...grant(), lease: null }],
  ]) {
    test(`a grant ${what} is no lease`, async () => {
      const client = await connect((await fake(ordinary((url) => (url.endsWith("/acquire") ? [200, {}, content] : undefined)))).url);
      await assert.rejects(client.acquire("a", { wait: 1_000 }), (error) => error instanceof leasehold.LeaseholdError && /is not understood/.test(error.message));
    });
  }

  for (const content of [{}, { leases: [] }, { leases: [{}] }, { leases: [null] }, { leases: [{ outcome: "unknown" }] }, []]) {
    test(`an answer to a release, or a renewal, that is ${JSON.stringify(content)} is an error`, async () => {
      const server = await fake((url) => [200, {}, url.startsWith("/v1/leases/") ? content : grant({ expiresIn: 20_000 })]);
      const client = await connect(server.url);
      const lease = await client.acquire("a");
      await assert.rejects(lease.renew(), leasehold.LeaseholdError);
      await assert.rejects(lease.release(), leasehold.LeaseholdError);
      await assert.rejects(client.attach("lease1.a"), leasehold.LeaseholdError);
    });
  }

  test("states that are not understood are errors", async () => {
    for (const content of [{}, [], "1", { locks: 5, next: null }, { locks: [], next: 7 }, { locks: [{}], next: null }]) {
      const server = await fake(() => [200, {}, content]);
      const client = await connect(server.url);
      await assert.rejects(client.list(), leasehold.LeaseholdError, JSON.stringify(content));
      await assert.rejects(client.inspect("a"), leasehold.LeaseholdError, JSON.stringify(content));
      await assert.rejects(client.forceRelease("a"), leasehold.LeaseholdError, JSON.stringify(content));
    }
  });

  test("what is no server of leasehold is named", async () => {
    const client = async (answer) => connect((await fake(() => answer)).url, { connectTimeout: 500 });
    await assert.rejects((await client([404, {}, "<html>"])).acquire("a"), /status 404: is it an address of `leasehold serve`/);
    await assert.rejects((await client([302, { Location: "http://elsewhere" }, ""])).acquire("a"), /status 302/);
    await assert.rejects((await client([502, {}, "bad gateway"])).tryLock("a"), (error) => error instanceof leasehold.Unavailable && /status 502/.test(error.message));
  });

  for (const [what, text] of [
    ["no HTTP", "220 mail.example.org ESMTP\r\n\r\n"],
    ["of another protocol", "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"],
    ["cut off", "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"],
    ["of a head without an end", `HTTP/1.1 200 OK\r\nX: ${"x".repeat(200_000)}`],
  ]) {
    test(`an answer that is ${what} is Unavailable within seconds`, async () => {
      const server = await ends(rawServer((socket) => socket.end(text)));
      const client = await connect(server.url, { connectTimeout: 500 });
      const began = performance.now();
      await assert.rejects(client.acquire("a", { wait: 15_000 }), leasehold.Unavailable);
      assert.ok(performance.now() - began < 14_000);
    });
  }

  test("chunked answers of a proxy are read", async () => {
    const content = JSON.stringify(grant());
    let answer = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    for (let at = 0; at < content.length; at += 7) {
      const part = content.slice(at, at + 7);
      answer += `${part.length.toString(16)};x=y\r\n${part}\r\n`;
    }
    answer += "0\r\nTrailer: x\r\n\r\n";
    const server = await ends(rawServer(async (socket) => {
      for (const byte of answer) {
        socket.write(byte);
        await new Promise((resolve) => setImmediate(resolve));
      }
    }));
    const client = await connect(server.url);
    assert.equal((await client.acquire("a")).token, 7n);
    assert.equal((await client.acquire("a")).token, 7n);
  });

  test("problems are the errors of the package", async () => {
    for (const [code, status, error] of [
      ["invalid-request", 400, leasehold.InvalidInput],
      ["missing-right", 403, leasehold.Refused],
      ["name-not-allowed", 403, leasehold.Refused],
      ["unsupported", 422, leasehold.Unsupported],
      ["store-unavailable", 503, leasehold.Unavailable],
      ["limit-reached", 429, leasehold.Unavailable],
    ]) {
      const client = await connect((await fake(() => problem(code, status))).url, { connectTimeout: 300 });
      await assert.rejects(client.tryLock("a"), (found) => found instanceof error && found.message.includes(`the detail of ${code}; the remedy of ${code}`));
    }
  });
});

describe("who is asked, and who asks", () => {
  test("a token is checked, and shown nowhere", async () => {
    const server = await serve(undefined, { tcp: true });
    const wrong = "d41d8cd98f00b204e9800998ecf8427e";
    const failed = await leasehold.connect(server.url, { token: wrong }).catch((error) => error);
    assert.ok(failed instanceof leasehold.Refused);
    const client = await connect(server.url, { token: READ_TOKEN });
    const { inspect } = require("node:util");
    for (const shown of [inspect(failed, { depth: 9, showHidden: true }), inspect(client, { depth: 9 }), inspect(client.lock("a"), { depth: 9 })]) {
      assert.ok(!shown.includes(wrong) && !shown.includes(READ_TOKEN), shown);
    }
    await assert.rejects(client.acquire("a"), (error) => error instanceof leasehold.Refused && /write/.test(error.message));
    await assert.rejects(leasehold.connect(server.url), /LEASEHOLD_HTTP_TOKEN/);
    await assert.rejects(leasehold.connect(server.url, { token: "a b" }), leasehold.InvalidInput);
  });

  test("a password in an address is refused, and not repeated", async () => {
    await assert.rejects(leasehold.connect("http://me:hunter2@127.0.0.1"), (error) => error instanceof leasehold.InvalidInput && !error.message.includes("hunter2"));
  });

  test("an address without a server is said to be one within seconds", async () => {
    const began = performance.now();
    await assert.rejects(leasehold.connect(`http://127.0.0.1:${await freePort()}`), /no server listens there/);
    await assert.rejects(leasehold.connect("unix:/nonexistent/serve.sock"), /no server listens there/);
    assert.ok(performance.now() - began < 15_000);
  });

  test("certificates are checked", async () => {
    const folder = newFolder();
    for (const [file, subject, more] of [
      ["ca", "/CN=test CA", ["-x509", "-addext", "basicConstraints=critical,CA:TRUE"]],
      ["server", "/CN=localhost", ["-x509", "-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=DNS:localhost"]],
    ]) {
      const key = ["req", "-newkey", "rsa:2048", "-nodes", "-keyout", `${file}.key`, "-out", `${file}.pem`, "-days", "2"];
      execFileSync("openssl", [...key, "-subj", subject, ...more], { cwd: folder, stdio: "ignore" });
    }
    const server = await serve(undefined, { tcp: true, tls: { cert: path.join(folder, "server.pem"), key: path.join(folder, "server.key") } });
    const script = `require("leasehold").connect(process.argv[1], { token: process.argv[2] }).then(async (client) => {
      await client.using("a", async () => {});
      console.log("locked");
    }).catch((error) => console.log(error.name, error.message))`;
    const run = async (host, env) => {
      const program = new Program(process.execPath, ["-e", script, `https://${host}:${server.port}`, TOKEN], { env: { ...process.env, ...env }, cwd: __dirname });
      await program.ended;
      return program.output;
    };
    const ca = { NODE_EXTRA_CA_CERTS: path.join(folder, "ca.pem") };
    assert.match(await run("localhost", { NODE_EXTRA_CA_CERTS: "" }), /Unavailable .*certificate/);
    assert.match(await run("localhost", ca), /locked/);
    assert.match(await run("127.0.0.1", ca), /Unavailable .*certificate/);
  });

  describe("at a Unix socket", { skip: process.geteuid() !== 0 && "it needs root, to be another user" }, () => {
    /** A server of another user, which notes what it gets. */
    async function stranger(folder) {
      const script = `const fs = require("fs"), net = require("net"), [path, user] = process.argv.slice(1);
        const seen = fs.openSync(path + ".seen", "a");
        net.createServer((socket) => socket.on("data", (data) => fs.writeSync(seen, data))).listen(path, () => {
          fs.chownSync(path, Number(user), Number(user));
          process.setuid(Number(user));
          console.log("listening");
        });`;
      const socket = path.join(folder, "locks.sock");
      const program = await ends(new Program(process.execPath, ["-e", script, socket, "65534"]));
      await program.hasSaid("listening");
      return { socket, seen: () => fs.readFileSync(`${socket}.seen`, "utf8") };
    }

    const folderOf = (parent, mode, owner) => {
      const folder = fs.mkdtempSync(path.join(parent, "leasehold-node-"));
      fs.chmodSync(folder, mode);
      fs.chownSync(folder, owner, 0);
      return folder;
    };

    for (const [where, make] of [
      ["in a folder of everybody", () => folderOf("/tmp", 0o1777, 0)],
      ["in a folder of the stranger where all may make folders", () => folderOf("/tmp", 0o755, 65_534)],
      ["behind a link of the stranger", () => {
        const [home, open] = [folderOf("/root", 0o755, 65_534), folderOf("/tmp", 0o1777, 0)];
        const link = path.join(open, "link");
        fs.symlinkSync(home, link);
        fs.lchownSync(link, 65_534, 65_534);
        return link;
      }],
    ]) {
      test(`a server of another user is refused before anything is sent, ${where}`, async () => {
        const { socket, seen } = await stranger(make());
        await assert.rejects(
          leasehold.connect(`unix:${socket}`, { token: "a-token-of-the-client", connectTimeout: 300 }),
          (error) => error instanceof leasehold.Unavailable && /of another user|others/.test(error.message),
        );
        assert.equal(seen(), "");
      });
    }

    test("a server of the user who alone decides what is in its folder is asked", async () => {
      const folder = folderOf("/root", 0o755, 65_534);
      const { socket, seen } = await stranger(folder);
      const connecting = leasehold.connect(`unix:${socket}`, { token: "a-token-of-the-client", connectTimeout: 300 }).catch(() => {});
      await until(() => seen().includes("a-token"));
      fs.rmSync(folder, { recursive: true });
      await connecting;
    });
  });
});

describe("requests with and without ids", () => {
  test("one whose place is lost goes on with a new id", async () => {
    const ids = [];
    const server = await fake(ordinary((url, body) => {
      if (!url.endsWith("/acquire")) return undefined;
      ids.push(body.request_id);
      if (ids.length === 1) return [202, {}, { status: "waiting", repeat_within_ms: 2_000 }];
      return ids.length === 2 ? problem("request-ended", 410) : undefined;
    }));
    await (await connect(server.url)).acquire("a", { wait: 30_000 });
    assert.equal(ids[0], ids[1]);
    assert.notEqual(ids[1], ids[2]);
  });

  test("a store without them is used without", async () => {
    const server = await fake((url, body) => {
      if ("request_id" in body) return problem("unsupported", 422);
      return body.wait_ms === 0 ? problem("busy", 409) : problem("timed-out", 409);
    });
    const client = await connect(server.url);
    assert.equal(await client.tryLock("a"), null);
    await assert.rejects(client.acquire("a", { wait: 50 }), leasehold.Timeout);
    assert.deepEqual(server.requests.map(({ body }) => "request_id" in body).slice(0, 2), [true, false]);
  });

  test("a quorum is used without", async () => {
    const ports = [await freePort(), await freePort(), await freePort()];
    for (const port of ports) await ends(startRedis({ port }));
    const server = await serve(`redlock://${ports.map((port) => `127.0.0.1:${port}`).join(",")}`);
    const client = await connect(server.url);
    const first = await client.acquire("a", { ttl: 6_000 });
    assert.equal(await client.tryLock("a"), null);
    await first.renew();
    await first.release();
    assert.ok((await client.acquire("a", { wait: 60_000 })).token > first.token);
  });
});

describe("callers that give up", () => {
  test("a wait that is given up leaves the queue", async () => {
    const client = await connect((await serve()).url);
    const lease = await client.acquire("a");
    for (let count = 0; count < 20; count++) await assert.rejects(client.acquire("a", { wait: 30 }), leasehold.Timeout);
    await lease.release();
    const began = performance.now();
    await client.acquire("a", { wait: 30_000 });
    // Those that were given up do not hold the lock one after the other until the server forgets each of them.
    assert.ok(performance.now() - began < 10_000);
  });

  test("a lease that is granted after the abort is released", async () => {
    const controller = new AbortController();
    const server = await fake(ordinary(async (url, body) => {
      if (!url.endsWith("/acquire")) return undefined;
      if (body.wait_ms > 0) await until(() => controller.signal.aborted);
      return undefined;
    }));
    const client = await connect(server.url);
    const waiting = client.acquire("a", { signal: controller.signal });
    await until(() => server.sent("/acquire").length === 1);
    controller.abort(new Error("enough"));
    await assert.rejects(waiting, /enough/);
    await until(() => server.sent("/release").length === 1);
    const ids = server.sent("/acquire").map(({ body }) => body.request_id);
    assert.equal(new Set(ids).size, 1);
  });

  test("aborted waits leave no listeners, no handles and no rejections", async () => {
    const rejections = [];
    const note = (error) => rejections.push(error);
    process.on("unhandledRejection", note);
    const { getEventListeners } = require("node:events");
    const client = await connect((await serve()).url);
    const lease = await client.acquire("a");
    const own = new AbortController();
    for (let round = 0; round < 10; round++) {
      const controllers = Array.from({ length: 20 }, () => new AbortController());
      const waits = controllers.map(({ signal }) => client.acquire("a", { signal }));
      const all = Promise.allSettled([...waits, client.acquire("a", { wait: 5, signal: own.signal })]);
      for (let turns = Math.random() * 100; turns > 0; turns--) await immediate();
      for (const controller of controllers) controller.abort();
      assert.ok((await all).every(({ status }) => status === "rejected"));
      assert.ok(controllers.every(({ signal }) => getEventListeners(signal, "abort").length === 0));
    }
    assert.equal(getEventListeners(own.signal, "abort").length, 0);
    await lease.release();
    await (await client.acquire("a", { wait: 60_000 })).release();
    await client.close();
    await until(() => process.getActiveResourcesInfo().filter((name) => name === "PipeWrap").length <= 6);
    process.off("unhandledRejection", note);
    assert.deepEqual(rejections, []);
  });

  test("closing gives the requests of its waits up, and waits for that", async () => {
    let isClosing = false;
    const server = await fake(ordinary(async (url, body) => {
      if (!url.endsWith("/acquire")) return undefined;
      if (body.wait_ms > 0 && !isClosing) await until(() => isClosing);
      return undefined;
    }));
    const client = await connect(server.url);
    const waiting = assert.rejects(client.acquire("a"), leasehold.ClientClosed);
    await until(() => server.sent("/acquire").length === 1);
    isClosing = true;
    await client.close();
    await waiting;
    const ids = server.sent("/acquire").map(({ body }) => body.request_id);
    assert.ok(ids.length >= 2 && new Set(ids).size === 1, String(ids.length));
    assert.equal(server.sent("/release").length, 1);
    await assert.rejects(client.acquire("a"), leasehold.ClientClosed);
  });

  test("closing releases, and its leases are lost", async () => {
    const server = await serve();
    const [client, other] = [await connect(server.url), await connect(server.url)];
    const lease = await client.acquire("a");
    const { signal } = lease;
    await client.close();
    assert.equal(lease.loss, "closed");
    assert.ok(signal.aborted);
    await assert.rejects(lease.release(), leasehold.LeaseLost);
    await other.acquire("a", { wait: 20_000 });
  });

  test("a release that is not confirmed in its time goes on", async () => {
    let answer;
    const mayAnswer = new Promise((resolve) => (answer = resolve));
    let isAnswered = false;
    const server = await fake(ordinary(async (url) => {
      if (!url.endsWith("/release")) return undefined;
      await mayAnswer;
      isAnswered = true;
      return undefined;
    }));
    const lease = await (await connect(server.url)).acquire("a");
    await assert.rejects(lease.release({ timeout: 50 }), leasehold.Timeout);
    assert.equal(lease.expiresIn, 0);
    answer();
    await until(() => isAnswered);
    assert.equal(server.sent("/release").length, 1);
  });

  test("an exit releases also what is on its way", async () => {
    const server = await serve();
    const script = `require("leasehold").connect(process.argv[1]).then(async (client) => {
      globalThis.kept = await client.acquire("kept");
      const released = await client.acquire("released");
      void released.release();
      process.exit(0);
    })`;
    const program = new Program(process.execPath, ["-e", script, server.url], { cwd: __dirname });
    assert.deepEqual(await program.ended, { code: 0, signal: null });
    const client = await connect(server.url);
    assert.deepEqual((await client.list()).filter(({ holders }) => holders.length > 0), [], program.output);
  });

  test("a wait outlasts several restarts", async () => {
    const server = await serve(undefined, { tcp: true });
    const client = await connect(server.url, { token: TOKEN });
    const holder = await (await connect(server.url, { token: TOKEN })).acquire("a", { ttl: 60_000 });
    let isGranted = false;
    const waiting = client.acquire("a").then(() => (isGranted = true));
    for (let count = 0; count < 2; count++) {
      await until(async () => (await client.inspect("a")).waiters.length > 0);
      // For longer than the server keeps the place of a request that is not repeated.
      await stays(async () => (await client.inspect("a")).waiters.length > 0, 3_500);
      await server.kill();
      await server.start();
    }
    await until(async () => (await client.inspect("a")).waiters.length > 0);
    assert.ok(!isGranted);
    await holder.release();
    await waiting;
  });
});
