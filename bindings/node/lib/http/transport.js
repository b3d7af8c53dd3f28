"use strict";
// Requests to one server, on connections that are used again.

const http = require("node:http");
const https = require("node:https");
const { lstatSync, readlinkSync, statSync } = require("node:fs");
const { dirname, join, resolve } = require("node:path");

// A server closes a connection that was silent for 20 s.
const MAX_IDLE = 10_000;
const CONNECT_LIMIT = 5_000;
const MAX_LINKS = 40;
const MAX_BODY = 256 * 1024 * 1024;

/** The server of a Unix socket is another user's. */
class Stranger extends Error {}

/** Nothing was sent, because nobody has answered. */
class NotConnected extends Error {}

/** Each folder and link that the system goes through on the way to a file. */
function* steps(path) {
  let parts = resolve(path).split("/").filter(Boolean).slice(0, -1);
  let folder = "/";
  yield lstatSync(folder);
  for (let links = 0; parts.length > 0; ) {
    const part = parts.shift();
    if (part === "..") folder = dirname(folder);
    if (part === "." || part === "..") continue;
    const next = join(folder, part);
    const found = lstatSync(next);
    yield found;
    if (!found.isSymbolicLink()) {
      folder = next;
    } else if (++links > MAX_LINKS) {
      throw new Stranger(`${path}: there are too many links on the way`);
    } else {
      const target = readlinkSync(next);
      if (target.startsWith("/")) folder = "/";
      parts = [...target.split("/").filter(Boolean), ...parts];
    }
  }
}

/** The user who alone decides what is in the file's folder, and where the way there leads; or root. */
function ownerOf(path) {
  const all = [...steps(path)];
  const folders = all.filter((found) => found.isDirectory());
  const owner = folders[folders.length - 1].uid;
  const isSafe = folders.every((found) => (found.mode & 0o022) === 0) && all.every((found) => found.uid === 0 || found.uid === owner);
  return isSafe ? owner : 0;
}

/**
 * Refuses a socket whose name another user has taken, before anything is sent there. Its file is this user's, root's, or the folder's owner's, if
 * nobody else could have made that folder or a link to it. What is returned tells one file from a later one of the same name.
 */
function checkUser(path) {
  const found = statSync(path, { bigint: true });
  const allowed = [0, process.geteuid(), ownerOf(path)];
  if (!allowed.includes(Number(found.uid))) throw new Stranger(`${path}: the server there is of another user (uid ${found.uid})`);
  return `${found.dev} ${found.ino} ${found.ctimeNs}`;
}

class Transport {
  #server;
  #agent;
  #module;

  constructor(server) {
    this.#server = server;
    this.#module = server.isTls ? https : http;
    this.#agent = new this.#module.Agent({ keepAlive: true, maxFreeSockets: 32, timeout: MAX_IDLE });
  }

  /**
   * Sends a request. One that may not arrive twice gets a new connection: an old one may be at its end.
   * @returns {Promise<{ status: number, headers: object, body: string }>}
   */
  async send(request, { isRepeatable, signal, isBackground }) {
    while (isRepeatable) {
      const sent = { wasReused: false };
      try {
        return await this.#exchange(request, this.#agent, signal, isBackground, sent);
      } catch (error) {
        if (!sent.wasReused || signal.aborted || error.code !== "ECONNRESET") throw error;
      }
    }
    return this.#exchange(request, false, signal, isBackground, {});
  }

  #exchange({ method, path, headers, body, delivery }, agent, signal, isBackground, sent) {
    return new Promise((resolve, reject) => {
      const { host, port, prefix, socket: socketPath, authority } = this.#server;
      const before = socketPath === null ? null : checkUser(socketPath);
      const options = {
        ...(socketPath === null ? { host, port } : { socketPath }),
        method,
        path: prefix + path,
        headers: { Host: authority, ...headers },
        agent,
        signal,
        setHost: false,
        timeout: 0,
        // Whatever NODE_TLS_REJECT_UNAUTHORIZED says: a token would go to anyone.
        ...(this.#server.isTls ? { rejectUnauthorized: true } : {}),
        maxHeaderSize: 64 * 1024,
      };
      const request = this.#module.request(options);
      const begin = () => {
        // The name may have led elsewhere between the look and the connection.
        if (before !== null && checkUser(socketPath) !== before) throw new Stranger(`${socketPath}: the socket was replaced meanwhile`);
        delivery.isPossible = true;
        request.end(body);
      };
      request.on("socket", (socket) => {
        sent.wasReused = request.reusedSocket;
        if (isBackground) socket.unref();
        const start = () => {
          try {
            begin();
          } catch (error) {
            request.destroy(error);
          }
        };
        if (!socket.connecting) return start();
        // A wait may last far longer than it takes to know that nobody answers there.
        const timer = setTimeout(() => request.destroy(new NotConnected("it accepts no connection")), CONNECT_LIMIT).unref();
        socket.once("close", () => clearTimeout(timer));
        return socket.once(this.#server.isTls ? "secureConnect" : "connect", () => {
          clearTimeout(timer);
          start();
        });
      });
      request.on("error", reject);
      // After an answer or an error this has no effect. An answer of another protocol has neither.
      request.on("close", () => reject(new Error("the connection ended without an answer")));
      request.on("response", (response) => {
        const parts = [];
        let size = 0;
        response.on("data", (part) => {
          size += part.length;
          if (size > MAX_BODY) request.destroy(new Error("the answer is too large"));
          else parts.push(part);
        });
        response.on("error", reject);
        response.on("close", () => reject(new Error("the connection ended without an answer")));
        response.on("end", () => {
          if (!response.complete) return reject(new Error("the connection ended without an answer"));
          resolve({ status: response.statusCode, headers: response.headers, body: Buffer.concat(parts).toString("utf8") });
        });
      });
    });
  }

  close() {
    this.#agent.destroy();
  }
}

module.exports = { NotConnected, Stranger, Transport };
