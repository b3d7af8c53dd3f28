"use strict";
// Leases that were granted: what is known of each, and the renewal of all leases of a client.

const { LeaseholdError } = require("../errors");
const { record } = require("../log");
const { now } = require("./clock");

// The most ids of a request, in number and in bytes.
const MAX_IDS = 500;
const MAX_IDS_SIZE = 200_000;

// The pause after a renewal that was not confirmed. A short lease is asked for again sooner.
const RETRY_PAUSE = 1_000;

// How long a server may take to answer a renewal.
const MAX_RENEWAL = 5_000;

// The timers' clock stands still while the host sleeps. So no pause is longer, and a lease that ended meanwhile is noticed.
const MAX_SLEEP = 1_000;

/** The answer is not that of a server of this version. */
class Malformed extends Error {}

function textOf(content, field) {
  const value = content?.[field];
  if (typeof value !== "string" || value === "") throw new Malformed(`${field} is missing`);
  return value;
}

/** Reads a grant. */
function grantOf(content, sent, ttl) {
  const token = textOf(content, "token_text");
  if (!/^\d{1,20}$/.test(token)) throw new Malformed("the token is no number");
  return {
    id: textOf(content, "lease"),
    kind: textOf(content, "kind"),
    name: textOf(content, "name"),
    token: BigInt(token),
    validUntil: endOf(content, sent, ttl),
  };
}

/**
 * The time until which a lease may be trusted: it counts from when the request was sent, which may have waited. No server makes it last longer than was
 * asked for.
 */
function endOf(content, sent, ttl) {
  const lifetime = content?.expires_in_ms;
  if (typeof lifetime !== "number" || !(lifetime >= 0)) throw new Malformed("there is no time");
  return Math.min(sent + lifetime, now() + ttl);
}

class Held {
  #state = "held";
  #loss = null;
  /** @type {((reason: string | null) => void)[]} */
  #watchers = new Set();

  constructor(grants, ttl, { isRenewed, endsAt }) {
    this.grants = grants;
    this.ttl = ttl;
    this.isRenewed = isRenewed;
    /** The end of its maximum hold. */
    this.endsAt = endsAt;
    this.validUntil = Math.min(...grants.map((grant) => grant.validUntil));
    this.nextRenewal = this.validUntil - (ttl * 2) / 3;
    this.isInFlight = false;
    /** Why the last renewal was not confirmed. */
    this.error = null;
    /** The first result of the release, once that has begun. */
    this.released = null;
    this.what = `${grants[0].kind} ${grants.map((grant) => JSON.stringify(grant.name)).join(", ")}`;
  }

  get isHeld() {
    this.#checkTime();
    return this.#state === "held";
  }

  get ids() {
    return this.grants.map((grant) => grant.id);
  }

  /** The time at which the lease ends unless it is renewed. */
  deadline() {
    return Math.min(this.validUntil, this.endsAt);
  }

  remaining() {
    return this.isHeld ? Math.max(0, this.deadline() - now()) : 0;
  }

  /** The reason and the message. */
  loss() {
    this.#checkTime();
    return this.#loss;
  }

  /** A lease whose time is over is lost, also if no timer has run since. */
  #checkTime() {
    const time = now();
    if (this.#state !== "held" || time < this.deadline()) return;
    if (time >= this.endsAt && this.endsAt <= this.validUntil) {
      this.lose("max_hold", `${this.what}: the lease has reached its maximum hold`);
    } else {
      const why = this.error !== null ? `: ${this.error}` : this.isRenewed ? "" : ": it is not renewed automatically";
      this.lose("expired", `${this.what}: the lease was not renewed in time${why}`);
    }
  }

  /** Whether it was held. */
  lose(reason, message) {
    if (this.#state !== "held") return false;
    this.#state = "lost";
    this.#loss = { reason, message };
    this.#notify();
    return true;
  }

  /** The holder gives it up. Whether it was held. */
  end() {
    if (!this.isHeld) return false;
    this.#state = "ended";
    this.#notify();
    return true;
  }

  /** A renewal was confirmed. It does not bring back a lease whose time was over. */
  extend(validUntil) {
    if (this.isHeld) this.validUntil = Math.max(this.validUntil, validUntil);
  }

  /** Calls `ended` once the lease has ended, with the reason of its loss, or null. Returns how to stop that. */
  watch(ended) {
    if (!this.isHeld) {
      ended(this.#loss?.reason ?? null);
      return () => {};
    }
    this.#watchers.add(ended);
    return () => this.#watchers.delete(ended);
  }

  #notify() {
    const watchers = [...this.#watchers];
    this.#watchers.clear();
    for (const ended of watchers) ended(this.#loss?.reason ?? null);
  }
}

/** Renews the leases of a client, all that are due by one request. */
class Renewals {
  #send;
  #release;
  #held = new Set();
  #timer = null;

  /** `release`: of a lease at its maximum hold, which the server does not know. */
  constructor(send, release) {
    this.#send = send;
    this.#release = release;
  }

  add(held) {
    this.#held.add(held);
    this.#schedule();
  }

  discard(held) {
    this.#held.delete(held);
  }

  takeAll() {
    const held = [...this.#held];
    this.#held.clear();
    clearTimeout(this.#timer);
    return held;
  }

  get ids() {
    return [...this.#held].filter((held) => held.isHeld).flatMap((held) => held.ids);
  }

  #schedule() {
    clearTimeout(this.#timer);
    if (this.#held.size === 0) return;
    const time = now();
    let next = time + MAX_SLEEP;
    for (const held of this.#held) {
      next = Math.min(next, held.deadline());
      if (held.isRenewed && !held.isInFlight) next = Math.min(next, held.nextRenewal);
    }
    this.#timer = setTimeout(() => this.#run(), Math.max(1, next - time));
    this.#timer.unref();
  }

  #run() {
    const time = now();
    for (const held of [...this.#held]) {
      if (!held.isHeld) this.#end(held);
    }
    const idle = [...this.#held].filter((held) => held.isRenewed && !held.isInFlight);
    if (idle.some((held) => held.nextRenewal <= time)) {
      // All that were not renewed just now go along, so that they stay together.
      const due = idle.filter((held) => held.nextRenewal <= time + held.ttl / 4);
      for (const batch of batches(due)) {
        // Several batches may be in flight: a server that does not answer delays only those that it was asked for.
        for (const held of batch) held.isInFlight = true;
        this.renew(batch, true).finally(() => {
          for (const held of batch) held.isInFlight = false;
          this.#schedule();
        });
      }
    }
    this.#schedule();
  }

  /** Renews the leases, and notes what has become of each. Throws nothing. */
  async renew(batch, isBackground) {
    const ids = batch.flatMap((held) => held.ids);
    // Half of the time that is left: the other half is for another server.
    const left = Math.min(...batch.map((held) => held.deadline())) - now();
    const limit = Math.min(Math.max(left / 2, 50), MAX_RENEWAL);
    try {
      // Each server is asked once. What to do after that depends on the lease.
      const answer = await this.#send("/v1/leases/renew", ids, { limit, latest: now(), isBackground });
      const outcomes = outcomesOf(answer, ids.length);
      let at = 0;
      for (const held of batch) {
        note(held, outcomes.slice(at, at + held.grants.length), answer.sent);
        at += held.grants.length;
      }
    } catch (error) {
      const why = error instanceof LeaseholdError ? error.message : "the server's answer is not understood";
      for (const held of batch) retry(held, why);
    }
    for (const held of batch) {
      if (!held.isHeld) this.#end(held);
    }
  }

  #end(held) {
    if (!this.#held.delete(held)) return;
    const loss = held.loss();
    if (loss === null) return;
    if (loss.reason === "max_hold") this.#release(held);
    record("warn", `lease lost: ${loss.message}`);
  }
}

function outcomesOf(answer, count) {
  const outcomes = answer.content?.leases;
  if (!Array.isArray(outcomes) || outcomes.length !== count) throw new Malformed("there are other leases");
  if (!outcomes.every((found) => typeof found?.outcome === "string")) throw new Malformed("a lease has no outcome");
  return outcomes;
}

function note(held, outcomes, sent) {
  if (outcomes.every((outcome) => outcome.outcome === "renewed")) {
    held.extend(Math.min(...outcomes.map((outcome) => endOf(outcome, sent, held.ttl))));
    held.error = null;
    held.nextRenewal = sent + held.ttl / 3;
    return;
  }
  const ended = outcomes.find((outcome) => outcome.outcome === "ended");
  if (ended !== undefined) {
    held.lose("gone", `${held.what}: ${ended.detail}`);
    return;
  }
  retry(held, outcomes.filter((outcome) => outcome.outcome !== "renewed").map((outcome) => String(outcome.detail)).join("; "));
}

function retry(held, error) {
  if (held.error === null) {
    record("warn", `${held.what}: the lease was not renewed, which is tried again: ${error}`);
  }
  held.error = error;
  held.nextRenewal = now() + Math.min(RETRY_PAUSE, held.ttl / 12);
}

/** Leases that fit into one request. One that lasts briefly can't wait for as long as one that lasts long: they go in order of their ttl. */
function batches(all) {
  const found = [];
  let batch = [];
  let count = 0;
  let size = 0;
  for (const held of [...all].sort((one, other) => one.ttl - other.ttl)) {
    const more = held.grants.reduce((sum, grant) => sum + grant.id.length + 4, 0);
    const isFull = count + held.grants.length > MAX_IDS || size + more > MAX_IDS_SIZE || held.ttl > 4 * batch[0]?.ttl;
    if (batch.length > 0 && isFull) {
      found.push(batch);
      [batch, count, size] = [[], 0, 0];
    }
    batch.push(held);
    count += held.grants.length;
    size += more;
  }
  if (batch.length > 0) found.push(batch);
  return found;
}

module.exports = { Held, Malformed, Renewals, batches, endOf, grantOf, outcomesOf };
