"use strict";
// What a client does: it acquires, renews and releases.

const { randomBytes } = require("node:crypto");
const { setImmediate: immediate, setTimeout: sleep } = require("node:timers/promises");
const { ClientClosed, InvalidInput, LeaseLost, LeaseholdError, Refused, Timeout, Unavailable, Unsupported } = require("../errors");
const { parse, tokenOf } = require("./address");
const { Api } = require("./api");
const { now } = require("./clock");
const { Held, Malformed, Renewals, batches, endOf, grantOf, outcomesOf } = require("./held");
const { lockPath } = require("./request");

// A slice of a wait: shorter than the time after which proxies end a silent request.
const SLICE = 20_000;

// Without an id, each slice is a new place in the queue. So it is as long as servers allow.
const MAX_SLICE = 50_000;

// Of a request about states.
const LOOK_LIMIT = 10_000;

// By how much an acquisition may last longer than its wait while no server answers.
const GRACE = 2_000;

// Requests that were given up, and for whose leases the client waits at the same time.
const MAX_GIVEN_UP = 32;
const MAX_GIVING_UP = 60_000;

/** How long a server may take for an answer, besides the wait: a part of the ttl, so that there is time for another server. */
function limitOf(ttl) {
  return Math.min(Math.max(ttl / 6, 1_000), 5_000);
}

const newId = () => randomBytes(16).toString("hex");

class Core {
  #api;
  #renewals;
  /** Over a quorum, requests have no ids. */
  #hasRequestIds = true;
  /** What callers wait for. */
  #calls = new Set();
  #givenUp = new Set();
  /** The ids of leases whose release has begun. */
  #releasing = new Set();
  #closing = null;
  /** Ends what goes on in the background when the client is closed. */
  #closed = new AbortController();

  constructor(url, settings) {
    this.servers = parse(url);
    this.token = tokenOf(settings.token);
    this.settings = settings;
    this.address = this.servers.map((server) => server.text).join(",");
    this.#api = new Api(this.servers, this.token, settings.connectTimeout);
    this.#renewals = new Renewals((path, ids, options) => this.#sendIds(path, ids, options), (held) => this.beginRelease(held, true));
  }

  get isClosed() {
    return this.#closing !== null;
  }

  /** The ids of the leases that it holds, and of those whose release is not confirmed. */
  get unreleasedIds() {
    return [...new Set([...this.#renewals.ids, ...this.#releasing])];
  }

  /**
   * Starts the work of a caller, which gets a signal that ends it. `abandon` gets a result that nobody takes.
   * @template T
   * @param {(signal: AbortSignal) => Promise<T>} work
   */
  start(work, abandon = (_) => {}) {
    if (this.isClosed) return { promise: Promise.reject(new ClientClosed("the client was closed")), cancel() {}, isRefused: true };
    const controller = new AbortController();
    let isCancelled = false;
    this.#calls.add(controller);
    const promise = new Promise((resolve, reject) => {
      work(controller.signal).then(
        (value) => {
          this.#calls.delete(controller);
          if (isCancelled) abandon(value);
          else resolve(value);
        },
        (error) => {
          this.#calls.delete(controller);
          if (!isCancelled) reject(defect(error));
        },
      );
    });
    const cancel = () => {
      isCancelled = true;
      controller.abort();
    };
    return { promise, cancel };
  }

  // Acquire

  async acquire(request, wait, signal) {
    const deadline = wait === null ? Infinity : now() + wait;
    let answer;
    if (request.isSet || !this.#hasRequestIds) {
      answer = await this.#acquireUnnamed(request, deadline, signal);
    } else {
      try {
        answer = await this.#acquireNamed(request, deadline, signal);
      } catch (error) {
        if (!(error instanceof Unsupported)) throw error;
        // Either the store can't repeat requests, or it does not have this lock at all.
        answer = await this.#acquireUnnamed(request, deadline, signal);
        this.#hasRequestIds = false;
      }
    }
    if (answer === null) return null;
    const grants = readGrants(request, answer);
    return this.#hold(grants, request.ttl, request);
  }

  #hold(grants, ttl, { isRenewed, maxHold }) {
    const held = new Held(grants, ttl, { isRenewed, endsAt: maxHold === null ? Infinity : now() + maxHold });
    if (this.isClosed) {
      held.lose("closed", `${held.what}: the client was closed`);
      this.beginRelease(held, true);
    } else {
      this.#renewals.add(held);
    }
    return held;
  }

  /** Acquires by a request that can be repeated at any server: in slices, between which it keeps its place in the queue. */
  async #acquireNamed(request, deadline, signal) {
    const fields = { ...request.fields, request_id: newId() };
    const isWaiting = deadline > now();
    const delivery = { isPossible: false };
    try {
      for (;;) {
        const answer = await this.#slice(request, fields, deadline, SLICE, { delivery, signal });
        if (answer.code === "busy" || answer.code === "timed-out") return null;
        if (answer.code === "request-ended") {
          // Its place is lost.
          fields.request_id = newId();
        } else if (answer.status !== 202) {
          return answer;
        } else if (now() >= deadline) {
          this.#leave(request, { ...fields }, isWaiting);
          return null;
        }
      }
    } catch (error) {
      const isInNoQueue = error instanceof Refused || error instanceof InvalidInput || error instanceof Unsupported;
      if (!isInNoQueue && delivery.isPossible) this.#leave(request, { ...fields }, isWaiting);
      throw error;
    }
  }

  /** Acquires by requests without an id, of which a second one may wait for the lease of a first one whose answer was lost. */
  async #acquireUnnamed(request, deadline, signal) {
    let wasLost = false;
    for (;;) {
      const answer = await this.#slice(request, request.fields, deadline, MAX_SLICE, { signal });
      wasLost ||= answer.wasLost;
      if (answer.code === null) return answer;
      if (now() >= deadline) break;
    }
    if (wasLost) throw new Unavailable(`${request.what}: an earlier request was not answered, and its lease may be in the way`);
    return null;
  }

  #slice(request, fields, deadline, slice, options) {
    const left = Math.min(Math.max(0, deadline - now()), slice);
    const waitMs = Math.round(left);
    return this.#api.call("POST", request.path, { ...fields, wait_ms: waitMs }, {
      limit: left + limitOf(request.ttl),
      latest: Math.max(deadline, now()) + GRACE,
      // Without a wait and without an id, a second request would find the lock held by the first one.
      isRepeatable: waitMs > 0 || "request_id" in fields,
      ...options,
    });
  }

  /** Gives up a request that the server may go on with, in the background. */
  #leave(request, fields, isWaiting) {
    const leaving = this.#giveUp(request, fields, isWaiting).catch(() => {});
    this.#givenUp.add(leaving);
    leaving.finally(() => this.#givenUp.delete(leaving));
  }

  /**
   * Repeats a request in order to release its lease at once.
   *
   * The server can't take a request out of the queue: it keeps the place, and then the lease, for 2.5 s after the last repeat. A lease that a repeat was
   * answered with lasts for its ttl if that answer is lost. So there is at least one repeat, which does not wait.
   */
  async #giveUp(request, fields, isWaiting) {
    const deadline = isWaiting && this.#givenUp.size < MAX_GIVEN_UP ? now() + MAX_GIVING_UP : 0;
    let answer = null;
    try {
      while ((answer === null || answer.status === 202) && now() < deadline) {
        answer = await this.#slice(request, fields, deadline, SLICE, { isBackground: true, signal: this.#closed.signal });
      }
    } catch (error) {
      if (!this.isClosed) throw error;
      answer = null;
    }
    if (answer === null || answer.status === 202) answer = await this.#slice(request, fields, 0, SLICE, { isBackground: true });
    if (answer.status === 200) {
      const grant = grantOf(answer.content, answer.sent, request.ttl);
      await this.#release([grant.id], request.ttl, grant.validUntil, true);
    }
  }

  // Renew and release

  #sendIds(path, ids, options) {
    return this.#api.call("POST", path, { leases: ids }, options);
  }

  async renew(held) {
    await this.#renewals.renew([held], false);
    this.check(held);
    if (held.error !== null) throw new Unavailable(`${held.what}: the renewal was not confirmed: ${held.error}`);
  }

  check(held) {
    const loss = held.loss();
    if (loss !== null) throw new LeaseLost(loss.message, loss.reason);
  }

  /** The lease was ended by the caller. If it was lost, what the server may have of it is released all the same. */
  beginRelease(held, isBackground) {
    this.#renewals.discard(held);
    if (held.released !== null) return;
    // Its last renewal may have been carried out, though it was not answered.
    held.released = this.#release(held.ids, held.ttl, now() + held.ttl, isBackground);
    held.released.catch(() => {});
  }

  /** Waits for the release. */
  async released(held, timeout) {
    this.check(held);
    await within(held.released, timeout, `${held.what}: the release was not confirmed within ${timeout} ms; it goes on`);
  }

  /** Releases a lease that nobody refers to. */
  abandon(held) {
    if (held.end()) this.beginRelease(held, true);
  }

  /** Releases leases, and goes on in the background until their time is over, since then they end by themselves. The promise has the first result. */
  #release(ids, ttl, deadline, isBackground) {
    return new Promise((resolve, reject) => {
      const attempt = async (left, isBackground) => {
        const options = { limit: limitOf(ttl), latest: deadline, isBackground };
        const answer = await this.#sendIds("/v1/leases/release", left, options);
        const outcomes = outcomesOf(answer, left.length);
        const refused = outcomes.find(({ outcome }) => outcome === "not-allowed" || outcome === "invalid");
        if (refused !== undefined) reject(new Refused(`the release was refused: ${refused.detail}`));
        const unknown = outcomes.find(({ outcome }) => outcome === "unknown");
        if (unknown !== undefined) reject(new Unavailable(`the store did not confirm the release: ${unknown.detail}`));
        return left.filter((_, at) => outcomes[at].outcome === "unknown");
      };
      const go = async () => {
        for (const id of ids) this.#releasing.add(id);
        let left = ids;
        let background = isBackground;
        while (left.length > 0 && now() < deadline) {
          try {
            left = await attempt(left, background);
          } catch (error) {
            reject(defect(error));
            if (!(error instanceof Unavailable)) return;
          }
          background = true;
          if (left.length > 0) await sleep(1_000, undefined, { ref: false });
        }
        resolve(undefined);
      };
      go()
        .catch(reject)
        .finally(() => {
          for (const id of ids) this.#releasing.delete(id);
        });
    });
  }

  /** Renews the lease, so that its next holder has the whole ttl, and forgets it. If that fails, the lease is released. */
  async detach(held) {
    try {
      await this.renew(held);
    } catch (error) {
      this.abandon(held);
      throw error;
    }
    this.#renewals.discard(held);
    if (!held.end()) this.check(held);
    return held.ids[0];
  }

  async attach(text, signal) {
    const sentBy = now();
    const answer = await this.#sendIds("/v1/leases/renew", [text], { limit: 5_000, signal });
    const [outcome] = outcomesOf(answer, 1);
    switch (outcome.outcome) {
      case "renewed":
        break;
      case "ended":
        throw new LeaseLost(`${outcome.kind} "${outcome.name}": ${outcome.detail}`, "gone");
      case "invalid":
        throw new InvalidInput(String(outcome.detail));
      case "not-allowed":
        throw new Refused(String(outcome.detail));
      default:
        throw new Unavailable(`the store did not confirm the lease: ${outcome.detail}`);
    }
    const ttl = endOf(outcome, answer.sent, Infinity) - sentBy;
    const grant = grantOf({ ...outcome, lease: text }, answer.sent, ttl);
    return this.#hold([grant], ttl, { isRenewed: true, maxHold: null });
  }

  // States

  /** Asks a server whether it is there, and whether it takes the token. */
  async reach(signal) {
    await this.#api.call("GET", "/v1/access", null, { limit: LOOK_LIMIT, signal });
  }

  async inspect(kind, name, signal) {
    return (await this.#api.call("GET", lockPath(kind, name), null, { limit: LOOK_LIMIT, signal })).text;
  }

  async list(signal) {
    const locks = [];
    let after = "";
    for (;;) {
      const { content } = await this.#api.call("GET", `/v1/locks${after}`, null, { limit: LOOK_LIMIT, signal });
      if (!Array.isArray(content.locks)) throw new Malformed("there are no locks");
      locks.push(...content.locks);
      if (content.next === null) return JSON.stringify(locks);
      if (typeof content.next !== "string") throw new Malformed("there is no next page");
      after = `?after=${encodeURIComponent(content.next)}`;
    }
  }

  async forceRelease(kind, name, token, signal) {
    // As text, since a token may exceed the numbers of JSON.stringify.
    const fields = token === null ? "{}" : `{"token":${token}}`;
    const answer = await this.#api.call("POST", lockPath(kind, name, "/force-release"), fields, {
      limit: LOOK_LIMIT,
      isRepeatable: false,
      signal,
    });
    return JSON.stringify(answer.code === "not-held" ? [] : answer.content.released);
  }

  // Close

  /** Ends the calls, and releases all leases in the background. */
  beginClose() {
    if (this.#closing !== null) return;
    const leases = this.#renewals.takeAll().filter((held) => held.lose("closed", `${held.what}: the client was closed`));
    const closing = [];
    for (const batch of batches(leases)) {
      const ttl = Math.max(...batch.map((held) => held.ttl));
      const released = this.#release(batch.flatMap((held) => held.ids), ttl, now() + ttl, false);
      released.catch(() => {});
      for (const held of batch) held.released = released;
      closing.push(released);
    }
    this.#closing = closing;
    for (const controller of this.#calls) controller.abort(new ClientClosed("the client was closed"));
    this.#closed.abort();
    closing.push(this.#allGivenUp());
    Promise.allSettled(closing).then(() => this.#api.close());
  }

  /** Waits for the requests that the calls give up which end now. */
  async #allGivenUp() {
    await immediate();
    await Promise.all(this.#givenUp);
  }

  /** Waits for what `beginClose` has begun. */
  async closed(timeout) {
    const late = `${this.address}: not all releases were confirmed within ${timeout} ms; they go on`;
    await within(Promise.all(this.#closing), timeout, late);
  }
}

function readGrants(request, answer) {
  const contents = request.isSet ? answer.content.leases : [answer.content];
  if (!Array.isArray(contents)) throw new Malformed("there are no leases");
  const grants = contents.map((content) => grantOf(content, answer.sent, request.ttl));
  const names = grants.map((grant) => grant.name).sort();
  const expected = [...request.names].sort();
  if (names.length !== expected.length || names.some((name, at) => name !== expected[at])) throw new Malformed("there are other names");
  return grants;
}

/** An error of this package, whatever it is. */
function defect(error) {
  if (error instanceof LeaseholdError) return error;
  if (error instanceof Malformed) {
    return new LeaseholdError(`the server's answer is not understood (${error.message}): is it of another version?`);
  }
  return new LeaseholdError(`a defect of the client of servers: ${error}`, { cause: error });
}

async function within(promise, timeout, late) {
  if (timeout === null) return promise;
  let timer;
  const limit = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Timeout(late)), Math.min(timeout, 0x7fffffff));
  });
  try {
    return await Promise.race([promise, limit]);
  } finally {
    clearTimeout(timer);
  }
}

module.exports = { Core };
