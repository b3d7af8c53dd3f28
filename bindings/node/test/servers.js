"use strict";
// Servers that the tests start on Unix sockets, or on free ports of the loopback address, and end by their process id.

const { spawn, execFileSync } = require("node:child_process");
const fs = require("node:fs");
const net = require("node:net");
const os = require("node:os");
const path = require("node:path");
const { setTimeout: sleep } = require("node:timers/promises");

/** Milliseconds that nothing in these tests takes on a machine that works, however busy it is. */
const LIMIT = 60_000;
const TOKEN = "4f1c7a0e9b2d6853a1f04c7e9d2b8365";
// The repository: the tests run in a copy of their folder, too.
const ROOT = process.env.LEASEHOLD_ROOT ?? path.join(__dirname, "../../..");

/** Looks again and again until the condition holds, and returns its value. */
async function until(condition, otherwise = "the condition did not hold in time") {
  const end = performance.now() + LIMIT;
  for (;;) {
    const value = await condition();
    if (value) return value;
    if (performance.now() > end) throw new Error(otherwise);
    await sleep(5);
  }
}

/** The condition holds throughout this time. */
async function stays(condition, milliseconds) {
  const end = performance.now() + milliseconds;
  while (performance.now() < end) {
    if (!(await condition())) throw new Error("the condition did not hold throughout");
    await sleep(20);
  }
}

function newFolder() {
  return fs.mkdtempSync(path.join(os.tmpdir(), "leasehold-node-"));
}

async function freePort() {
  const server = net.createServer().listen(0, "127.0.0.1");
  await new Promise((resolve) => server.once("listening", resolve));
  const { port } = server.address();
  await new Promise((resolve) => server.close(resolve));
  return port;
}

function found(what, candidates, remedy) {
  const program = candidates.find((candidate) => candidate && fs.existsSync(candidate));
  if (program === undefined) throw new Error(`${what} is missing: ${remedy}`);
  return program;
}

const inPath = (name) => (process.env.PATH ?? "").split(path.delimiter).map((folder) => path.join(folder, name));

function leaseholdProgram() {
  const program = process.env.LEASEHOLD_PROGRAM || path.join(ROOT, "target/debug/leasehold");
  return found(program, [program], "cargo build -p leasehold-cli, or set LEASEHOLD_PROGRAM");
}

function redisProgram() {
  return found("redis-server", inPath("redis-server"), "apt-get install redis-server");
}

function postgresProgram(name) {
  const folder = "/usr/lib/postgresql";
  const versions = fs.existsSync(folder) ? fs.readdirSync(folder).sort().reverse() : [];
  const installed = versions.map((version) => path.join(folder, version, "bin", name));
  return found(name, [...inPath(name), ...installed], "apt-get install postgresql");
}

/** A process of the tests' own, which ends with it. */
class Program {
  constructor(command, parameters, options = {}) {
    this.output = "";
    this.process = spawn(command, parameters, { stdio: ["ignore", "pipe", "pipe"], ...options });
    this.process.stdout.on("data", (data) => (this.output += data));
    this.process.stderr.on("data", (data) => (this.output += data));
    this.ended = new Promise((resolve) => this.process.once("close", (code, signal) => resolve({ code, signal })));
  }

  get isRunning() {
    return this.process.exitCode === null && this.process.signalCode === null;
  }

  /** Until it has printed this. */
  async hasSaid(text) {
    await until(() => {
      if (this.output.includes(text)) return true;
      if (!this.isRunning) throw new Error(`it has ended: ${this.output}`);
      return false;
    }, `it has not said ${text}`);
  }

  kill(signal = "SIGKILL") {
    this.process.kill(signal);
  }

  async stop() {
    if (this.isRunning) this.kill();
    await this.ended;
  }
}

/** Another program of Node.js: one of `programs/`, which ends in this time. */
function node(program, ...parameters) {
  return new Program(process.execPath, [path.join(__dirname, "programs", program), ...parameters]);
}

async function connects(options) {
  const socket = net.connect(options);
  return new Promise((resolve) => {
    socket.once("connect", () => resolve(socket.destroy() && true));
    socket.once("error", () => resolve(false));
  });
}

async function startRedis({ port = 0, folder = newFolder() } = {}) {
  const socket = path.join(folder, "redis.sock");
  const parameters = ["--port", String(port), "--unixsocket", socket, "--save", "", "--dir", folder];
  const program = new Program(redisProgram(), parameters);
  await until(async () => {
    if (!program.isRunning) throw new Error(program.output);
    return connects({ path: socket });
  }, "the server does not answer");
  return Object.assign(program, { url: `redis+unix:${socket}`, port });
}

async function startServe(store, { tcp = false, folder = newFolder() } = {}) {
  const socket = path.join(folder, "serve.sock");
  const parameters = ["serve", "--store", store, "--listen", `unix:${socket}`];
  const port = tcp ? await freePort() : 0;
  if (tcp) parameters.push("--listen", `127.0.0.1:${port}`);
  const program = new Program(leaseholdProgram(), parameters, { env: { ...process.env, LEASEHOLD_SERVE_TOKEN: TOKEN } });
  await until(async () => {
    if (!program.isRunning) throw new Error(program.output);
    return connects({ path: socket });
  }, "the server does not answer");
  return Object.assign(program, { url: `unix:${socket}`, tcp: `http://127.0.0.1:${port}` });
}

/** A server of PostgreSQL. It does not run as root, so `nobody` does. */
async function startPostgres() {
  const folder = newFolder();
  const isRoot = process.geteuid() === 0;
  const run = (program, parameters) =>
    isRoot ? ["runuser", ["-u", "nobody", "--", program, ...parameters]] : [program, parameters];
  if (isRoot) execFileSync("chown", ["nobody", folder]);
  const data = path.join(folder, "data");
  execFileSync(...run(postgresProgram("initdb"), ["-D", data, "-U", "locks", "--auth=trust", "-N"]), { cwd: folder });
  const port = await freePort();
  const parameters = ["-D", data, "-p", String(port), "-k", folder, "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"];
  const program = new Program(...run(postgresProgram("postgres"), parameters), { cwd: folder });
  const url = `postgres://locks@127.0.0.1:${port}/postgres`;
  await until(() => {
    if (!program.isRunning) throw new Error(program.output);
    return program.output.includes("ready to accept connections");
  }, "the server does not answer");
  program.stop = async () => {
    // The first line of its file is the server's process id; `runuser` is its parent.
    const [pid] = fs.readFileSync(path.join(data, "postmaster.pid"), "utf8").split("\n");
    process.kill(Number(pid), "SIGINT");
    await program.ended;
  };
  return Object.assign(program, { url });
}

module.exports = { LIMIT, Program, TOKEN, freePort, leaseholdProgram, newFolder, node, startPostgres, startRedis, startServe, stays, until };
