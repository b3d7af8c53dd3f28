"use strict";
// Requests to the servers of a store, with repeats: another server, another connection, the problems that servers answer with.

const { setTimeout: sleep } = require("node:timers/promises");
const { InvalidInput, LeaseholdError, Refused, Unavailable, Unsupported } = require("../errors");
const info = require("../info");
const { TOKEN_VARIABLE } = require("./address");
const { now } = require("./clock");
const { NotConnected, Stranger, Transport } = require("./transport");

// The problems that callers of `Api.call` handle. All others are errors, or reasons to ask again.
const OUTCOMES = new Set(["busy", "timed-out", "request-ended", "not-held"]);

// How long an unreachable server is asked again: only briefly if it has never answered, since its address may be wrong.
const PATIENCE = 10_000;
const FIRST_PATIENCE = 2_000;

// The pause between repeats: a request that waits loses its place after 2 s.
const MIN_PAUSE = 50;
const MAX_PAUSE = 1_000;

const ERRORS = {
  __proto__: null,
  "invalid-request": InvalidInput,
  "body-too-large": InvalidInput,
  "head-too-large": InvalidInput,
  unsupported: Unsupported,
  unauthorized: Refused,
  "missing-right": Refused,
  "name-not-allowed": Refused,
  "foreign-origin": Refused,
};

/** Why a server is asked again. */
class Failure {
  constructor(reason, { isLost = true, wasConnected = false, tryAnother = true, pause = 0 } = {}) {
    Object.assign(this, { reason, isLost, wasConnected, tryAnother, pause });
  }
}

class Api {
  #transports;
  #servers;
  #headers;
  #hasToken;
  #connectTimeout;
  #current = 0;
  #wasAnswered = false;

  constructor(servers, token, connectTimeout) {
    this.#servers = servers;
    this.#transports = servers.map((server) => new Transport(server));
    this.#hasToken = token !== null;
    this.#headers = { "User-Agent": "leasehold-node", Accept: "application/json" };
    if (token !== null) this.#headers.Authorization = `Bearer ${token}`;
    this.#connectTimeout = connectTimeout;
  }

  #patience() {
    return this.#connectTimeout ?? (this.#wasAnswered ? PATIENCE : FIRST_PATIENCE);
  }

  /**
   * Sends the request, with these fields or this text, to one server after another, until one answers it. `limit` is for each of them. If none has answered for a while, or at the time
   * `latest`, it is not sent again, but `Unavailable` is thrown. When `signal` is aborted its reason is thrown.
   *
   * `delivery.isPossible`: whether the request may have reached a server, though it was not answered.
   */
  async call(method, path, fields, options) {
    const { limit, latest = Infinity, isRepeatable = true, delivery = {}, signal = null, isBackground = false } = options;
    const text = typeof fields === "string" ? fields : JSON.stringify(fields ?? {});
    const body = method === "POST" ? text : undefined;
    const headers = { ...this.#headers };
    if (body !== undefined) {
      headers["Content-Type"] = "application/json";
      headers["Content-Length"] = String(Buffer.byteLength(body));
    }
    const request = { method, path, headers, body, delivery };
    let until = null;
    let wasLost = false;
    let pause = MIN_PAUSE;
    let roundLeft = this.#servers.length;
    for (;;) {
      signal?.throwIfAborted();
      const index = this.#current;
      const sent = now();
      const outcome = await this.#send(index, request, { limit, isRepeatable, signal, isBackground, sent, wasLost });
      if (!(outcome instanceof Failure)) return outcome;
      if (until === null || (outcome.wasConnected && now() - sent > this.#patience())) {
        // A server that ends after a long wait was there until now.
        until = Math.min(now() + this.#patience(), latest);
      }
      wasLost ||= outcome.isLost;
      if (this.#current === index) this.#current = (index + 1) % this.#servers.length;
      if (outcome.isLost && !isRepeatable) throw new Unavailable(`${outcome.reason}; it may have been done`);
      roundLeft -= 1;
      if (outcome.tryAnother && roundLeft > 0) continue;
      roundLeft = this.#servers.length;
      const rest = Math.min(Math.max(pause, outcome.pause), MAX_PAUSE);
      if (now() + rest >= until) throw new Unavailable(outcome.reason);
      await rested(rest, signal, isBackground);
      pause = Math.min(pause * 2, MAX_PAUSE);
    }
  }

  async #send(index, request, { limit, isRepeatable, signal, isBackground, sent, wasLost }) {
    const server = this.#servers[index].text;
    // Not AbortSignal.any and AbortSignal.timeout: what they make stays with a signal that lives for long.
    const ended = new AbortController();
    const abort = () => ended.abort();
    signal?.addEventListener("abort", abort, { once: true });
    const timer = setTimeout(abort, Math.min(limit, 0x7fffffff));
    if (isBackground) timer.unref();
    try {
      const response = await this.#transports[index].send(request, { isRepeatable, signal: ended.signal, isBackground });
      this.#wasAnswered = true;
      return this.#judge(response, server, sent, wasLost);
    } catch (error) {
      signal?.throwIfAborted();
      if (error instanceof LeaseholdError) throw error;
      if (ended.signal.aborted) return new Failure(`${server} did not answer in time`);
      if (error instanceof Stranger || error instanceof NotConnected || error.code === "EACCES") {
        return new Failure(`${server}: ${error.message}`, { isLost: false });
      }
      if (["ECONNREFUSED", "ENOENT", "ENOTFOUND", "EAI_AGAIN"].includes(error.code)) {
        return new Failure(`${server}: no server listens there`, { isLost: false });
      }
      if (isCertificate(error)) throw new Unavailable(`${server}: its certificate is not valid: ${error.message}`);
      return new Failure(`${server}: ${error.message}`, { wasConnected: true });
    } finally {
      clearTimeout(timer);
      signal?.removeEventListener("abort", abort);
    }
  }

  #judge(response, server, sent, wasLost) {
    const { status, body: text } = response;
    let content = null;
    try {
      content = info.parse(text);
    } catch {
      // A proxy's page.
    }
    if ((status === 200 || status === 202) && content !== null) return { status, content, text, sent, code: null, wasLost };
    const problem = typeof content?.code === "string" ? content : {};
    const { code = null } = problem;
    if (OUTCOMES.has(code)) return { status, content, text, sent, code, wasLost };
    const pause = retryAfter(response);
    if (["stopping", "limit-reached", "too-many-connections"].includes(code)) {
      const tryAnother = problem.try_another === true;
      return new Failure(`${server}: ${words(problem)}`, { isLost: false, wasConnected: true, tryAnother, pause });
    }
    if (status >= 500 || [408, 425, 429].includes(status)) {
      // Those without a code are a proxy's, whose server may have done what it has not answered.
      const reason = code === null ? `it answered with status ${status}` : words(problem);
      return new Failure(`${server}: ${reason}`, { wasConnected: true, pause });
    }
    if (code === "unauthorized" && !this.#hasToken) {
      throw new Refused(`${server} wants a token: pass the option token to connect, or set ${TOKEN_VARIABLE}`);
    }
    if (code === null) throw new LeaseholdError(`${server} answered with status ${status}: is it an address of \`leasehold serve\`?`);
    throw new (ERRORS[code] ?? LeaseholdError)(`${server}: ${words(problem)}`);
  }

  close() {
    for (const transport of this.#transports) transport.close();
  }
}

function isCertificate(error) {
  return /CERT|SELF_SIGNED|UNABLE_TO_|ERR_TLS_CERT/.test(error.code ?? "");
}

function words({ detail, title, remedy }) {
  const what = String(detail ?? title);
  return remedy ? `${what}; ${remedy}` : what;
}

function retryAfter({ headers }) {
  const value = headers["retry-after"] ?? "";
  return /^\d{1,6}$/.test(value) ? Number(value) * 1_000 : 0;
}

/** A pause, which the signal ends with its reason. */
async function rested(milliseconds, signal, isBackground) {
  try {
    await sleep(milliseconds, undefined, { signal: signal ?? undefined, ref: !isBackground });
  } catch (error) {
    signal?.throwIfAborted();
    throw error;
  }
}

module.exports = { Api };
