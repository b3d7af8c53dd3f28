"use strict";
// Servers of the tests of the client over HTTP: `leasehold serve` that is killed and started again, a balancer that cuts connections, and a server that
// answers with what a test says.

const fs = require("node:fs");
const http = require("node:http");
const net = require("node:net");
const path = require("node:path");
const { Program, TOKEN, freePort, leaseholdProgram, newFolder, until } = require("./servers");

const READ_TOKEN = "7be2f4906d1c5a38c9e0b7142fd68a05";

/** A server of `leasehold serve` on TCP or, without a port, on a Unix socket. */
class Serve {
  constructor(store, { port = 0, folder = newFolder(), tls = null } = {}) {
    this.store = store;
    this.port = port;
    this.folder = folder;
    this.tls = tls;
    this.path = path.join(folder, `serve-${port}.sock`);
    this.url = port ? `http://127.0.0.1:${port}` : `unix:${this.path}`;
  }

  static async start(store, options = {}) {
    const port = options.tcp ? await freePort() : 0;
    const serve = new Serve(store ?? `sqlite:${newFolder()}/locks.db`, { ...options, port });
    await serve.start();
    return serve;
  }

  async start() {
    const tokens = path.join(this.folder, "tokens");
    fs.writeFileSync(tokens, `tests write,force ${TOKEN}\nreader read ${READ_TOKEN}\n`, { mode: 0o600 });
    const listen = this.port ? `127.0.0.1:${this.port}` : `unix:${this.path}`;
    const tls = this.tls === null ? [] : ["--tls-cert", this.tls.cert, "--tls-key", this.tls.key];
    this.program = new Program(leaseholdProgram(), ["serve", "--store", this.store, "--listen", listen, "--tokens", tokens, ...tls]);
    await this.program.hasSaid("listening on");
  }

  async kill(signal = "SIGKILL") {
    this.program.kill(signal);
    await this.program.ended;
  }

  freeze() {
    this.program.kill("SIGSTOP");
  }

  thaw() {
    this.program.kill("SIGCONT");
  }

  async stop() {
    this.thaw();
    await this.program.stop();
  }
}

/** A TCP balancer in front of servers. `cuts` decides for each answer whether the connection ends in place of it. */
class Proxy {
  constructor(ports, cuts = (_request) => false) {
    let count = 0;
    this.sockets = new Set();
    this.server = net.createServer((client) => {
      const connect = (left) => {
        const server = net.connect(ports[count++ % ports.length], "127.0.0.1");
        let request = "";
        let isConnected = false;
        const end = () => {
          client.destroy();
          server.destroy();
        };
        server.once("connect", () => {
          isConnected = true;
          client.on("data", (data) => {
            request = String(data);
            server.write(data);
          });
          client.on("close", end);
        });
        server.on("data", (answer) => (cuts(request) ? end() : client.write(answer)));
        server.on("error", () => (isConnected || left === 0 ? end() : connect(left - 1)));
        server.on("close", () => isConnected && end());
      };
      client.on("error", () => {});
      this.sockets.add(client);
      client.on("close", () => this.sockets.delete(client));
      connect(ports.length);
    });
  }

  static async start(ports, cuts) {
    const proxy = new Proxy(ports, cuts);
    await new Promise((resolve) => proxy.server.listen(0, "127.0.0.1", resolve));
    proxy.url = `http://127.0.0.1:${proxy.server.address().port}`;
    return proxy;
  }

  stop() {
    for (const socket of this.sockets) socket.destroy();
    this.server.close();
  }
}

/** Answers with what `reply(path, body)` resolves to: a status, headers and a body, or null to close the connection. */
class FakeServer {
  requests = [];

  static async start(reply) {
    const fake = new FakeServer();
    fake.server = http.createServer(async (request, response) => {
      const parts = [];
      for await (const part of request) parts.push(part);
      const body = JSON.parse(Buffer.concat(parts).toString() || "{}");
      // Of `connect`.
      if (request.url === "/v1/access") return response.end("{}");
      fake.requests.push({ path: request.url, body, headers: request.headers });
      const answer = await reply(request.url, body);
      if (answer === null) return request.socket.destroy();
      const [status, headers, content] = answer;
      response.writeHead(status, headers);
      return response.end(typeof content === "string" ? content : JSON.stringify(content));
    });
    await new Promise((resolve) => fake.server.listen(0, "127.0.0.1", resolve));
    fake.url = `http://127.0.0.1:${fake.server.address().port}`;
    return fake;
  }

  sent(part) {
    return this.requests.filter((request) => request.path.includes(part));
  }

  stop() {
    this.server.closeAllConnections();
    this.server.close();
  }
}

/** Accepts connections, and writes these bytes to each that asks something. */
async function rawServer(write) {
  const sockets = new Set();
  const server = net.createServer((socket) => {
    sockets.add(socket);
    socket.on("error", () => {});
    socket.on("data", (request) => {
      if (String(request).startsWith("GET /v1/access")) socket.write("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}");
      else void write(socket);
    });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const stop = () => {
    for (const socket of sockets) socket.destroy();
    server.close();
  };
  return { url: `http://127.0.0.1:${server.address().port}`, stop };
}

/** A grant, as a server answers. */
function grant({ token = 7, expiresIn = 29_000, name = "a" } = {}) {
  return { lease: `lease1.${name}.${token}`, kind: "mutex", name, token, token_text: String(token), expires_in_ms: expiresIn };
}

/** The answer to a renewal or a release of so many leases. */
function outcomes(outcome, body, more = {}) {
  return [200, {}, { leases: body.leases.map(() => ({ ...grant(), outcome, ...more })) }];
}

function problem(code, status, { tryAnother = false, retryAfter = null } = {}) {
  const headers = { "Content-Type": "application/problem+json", ...(retryAfter === null ? {} : { "Retry-After": String(retryAfter) }) };
  const content = {
    type: `https://example.org/${code}`,
    code,
    title: code,
    status,
    detail: `the detail of ${code}`,
    remedy: `the remedy of ${code}`,
    try_another: tryAnother,
  };
  return [status, headers, content];
}

module.exports = { FakeServer, Proxy, READ_TOKEN, Serve, grant, outcomes, problem, rawServer, until };
