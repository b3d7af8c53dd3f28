// Distributed locks. Times are milliseconds, and may have fractions. Tokens are bigints.

import type { EventEmitter } from "node:events";

/** Options of a client. All are optional. */
export interface ClientOptions {
  /** The names of all locks begin with it and a colon. */
  namespace?: string;
  /** Of locks that set none: 10,000 by default; 30,000 over HTTP. */
  ttl?: number;
  /** A text that `inspect` shows, besides the host, the process and the program. */
  label?: string;
  /** The longest wait queue of locks that set none. */
  maxWaiters?: number;
  /** How many replicas must confirm a grant. Redis only. */
  replicas?: number;
  /** 5,000 by default on Redis. */
  connectTimeout?: number;
  /** The bearer token of a server of `leasehold serve`. */
  token?: string;
}

/** How long an acquisition waits. */
export interface WaitOptions {
  /** How long it waits in the queue. Without it, or with null or Infinity, without a limit; 0 does not wait. */
  wait?: number | null;
  /** Ends the wait: it rejects with the signal's reason, and the attempt leaves the queue. */
  signal?: AbortSignal | null;
}

/** Options of a lock. All are optional. */
export interface LockOptions extends WaitOptions {
  /** After so long the lock of a crashed holder is free. At least 100. A living holder renews it. */
  ttl?: number | null;
  /** Whether the lease is renewed until it is released: true by default. Without it the lease ends `ttl` after the grant or `renew`. */
  autoRenew?: boolean;
  /** After an earlier release the lock stays taken until so long after the grant. */
  minHold?: number;
  /** The lease is lost so long after the grant, although it is renewed. */
  maxHold?: number | null;
  /** The longest wait queue, 100,000 by default; more waiters get `QueueFull`. */
  maxWaiters?: number | null;
  /** How many replicas must confirm a grant. Redis only. */
  replicas?: number | null;
  /** A text that `inspect` shows. */
  label?: string | null;
  /** A text that `inspect` shows, for finding the trace. */
  traceId?: string | null;
  /** Lets another process renew or release a detached lease in one command. */
  detachable?: boolean;
}

/** Options of a mutex. All are optional. */
export interface MutexOptions extends LockOptions {
  /** One order among the waiters of all processes: false by default, where a lock goes from task to task of a process for up to 10 ms while others wait. */
  globalFifo?: boolean;
  /** The lock of another library that is taken too. */
  bridge?: Bridge | null;
}

/** Another library's lock. Made by a function of `bridge`. */
export interface Bridge {
  readonly terms: readonly string[];
}

/** A lock that is held, for a bounded time, which is renewed in the background until it is released. */
export interface Lease extends AsyncDisposable {
  /** The lock's name, with the client's namespace. */
  readonly name: string;
  /** The fencing token: higher than that of every earlier holder. Pass it along with each write, and let the resource refuse lower ones. */
  readonly token: bigint;
  /** The tokens by the names of the locks: several for `lockAll`. */
  readonly tokens: Readonly<Record<string, bigint>>;
  /** For how long the lease may be trusted if no further renewal succeeds. 0 once it is lost or released. */
  readonly expiresIn: number;
  /** Whether it was released or detached. */
  readonly isReleased: boolean;
  /** Whether it has ended although it was not released. Look at it before each step that the lock protects. */
  readonly isLost: boolean;
  /** Why it is lost; null while it is held, and after it was released. */
  readonly loss: LossReason | null;
  /** Aborted once the lease is lost, with a `LeaseLost` as its reason. */
  readonly signal: AbortSignal;
  /** Throws `LeaseLost` if the lease is not held any more. Sends nothing. */
  check(): void;
  /** Renews it to its whole ttl now. `LeaseLost`; `Unavailable` if the store did not confirm it. */
  renew(): Promise<void>;
  /**
   * Releases the lock, and waits for the store's confirmation. A second call does nothing.
   *
   * Rejects with `LeaseLost` if it was lost before. With `Unavailable`, and with `Timeout` after `timeout`, the release is retried in the background, and
   * the lease expires in any case.
   */
  release(options?: { timeout?: number | null }): Promise<void>;
  /** Lets the lease outlive this process. It is not renewed any more. The text is a secret; `Client.attach` takes the lease over, in any process. */
  detach(): Promise<string>;
  /** Of a writer, or an upgradable reader: becomes a reader, with no moment in which the lock is free. The returned lease replaces this one. */
  downgrade(): Promise<Lease>;
  /** Of an upgradable reader: becomes a writer. The returned lease replaces this one. After `Timeout` this one is held as before; after other errors it is lost. */
  upgrade(options?: WaitOptions): Promise<Lease>;
  /** Replaces the lock's `minHold`: 0 lets the release free the lock at once. */
  setMinHold(milliseconds: number): void;
}

/** A lock that can be acquired any number of times. Creating it sends nothing. */
export interface Lock {
  readonly name: string;
  /** Waits in the queue. `Timeout` after `wait`; `Unavailable`; `QueueFull`; `Refused`; `ClientClosed`. */
  acquire(options?: WaitOptions): Promise<Lease>;
  /** The lease if the lock is free now, or null. */
  tryAcquire(options?: { signal?: AbortSignal | null }): Promise<Lease | null>;
  /**
   * Runs the routine while the lock is held, and releases it.
   *
   * An error of the routine is passed on, whatever becomes of the release. A routine that ends under a lost lease rejects with `LeaseLost`.
   */
  using<T>(routine: (lease: Lease) => T | Promise<T>): Promise<T>;
}

/** One start in each period. */
export interface OncePer {
  readonly name: string;
  /** null for whoever does not start the work. */
  acquire(options?: WaitOptions): Promise<Lease | null>;
  tryAcquire(options?: { signal?: AbortSignal | null }): Promise<Lease | null>;
  /** Runs the routine only for the one who starts the work; undefined for the others. */
  using<T>(routine: (lease: Lease) => T | Promise<T>): Promise<T | undefined>;
}

/** Many readers or one writer. */
export interface RwLock {
  read(): Lock;
  /** Its lease can be downgraded. */
  write(): Lock;
  /** The one reader that may become a writer by `Lease.upgrade`. Other readers share it. */
  upgradable(): Lock;
}

/** One leader at a time. Holding the lock is the leadership. */
export interface Election extends Lock {
  leader(): Promise<Holder | null>;
  /** The current leader first, then each that differs from the last one; null is none. Looks every 1,000 ms, or as told. */
  observe(options?: { every?: number; signal?: AbortSignal | null }): AsyncGenerator<Holder | null, never, void>;
}

/** What a holder or a waiter says about itself. */
export interface ProcessInfo {
  host: string | null;
  pid: number | null;
  program: string | null;
  label: string | null;
  traceId: string | null;
}

export interface Holder {
  /** A name for the client: a digest of its random id. */
  client: string;
  token: bigint;
  /** Its share of the capacity. */
  weight: number;
  /** Of a read-write lock. */
  mode: "read" | "upgradable" | "write" | null;
  /** Of a reentrant lock. */
  owner: string | null;
  heldFor: number;
  /** Until the lease expires unless it is renewed. */
  expiresIn: number;
  /** Released, and kept by its minimum hold. */
  isRetained: boolean;
  /** Whether it is a holder of this client. */
  isOwn: boolean;
  process: ProcessInfo;
}

export interface Waiter {
  client: string;
  /** From 1. */
  position: number;
  weight: number;
  mode: "read" | "upgradable" | "write" | null;
  waitingFor: number;
  /** Unreachable: it keeps its position, and is skipped. */
  isSkipped: boolean;
  isOwn: boolean;
  process: ProcessInfo;
}

export interface LockInfo {
  kind: LockKind;
  name: string;
  /** 0 if the lock is unused. */
  capacity: number;
  inUse: number;
  lastToken: bigint | null;
  holders: Holder[];
  /** In queue order. */
  waiters: Waiter[];
  /** Whether another program's value is in the lock's key. */
  isForeign: boolean;
}

/** Reentrant locks and those of `oncePer` are of the kind `mutex`. */
export type LockKind = "mutex" | "rw" | "semaphore" | "election" | (string & {});

export interface Client extends AsyncDisposable {
  /** Of the store, without a password. */
  readonly address: string;
  readonly isClosed: boolean;
  /** A lock with one holder at a time. */
  lock(name: string, options?: MutexOptions): Lock;
  /** `lock(name, options).acquire()` */
  acquire(name: string, options?: MutexOptions): Promise<Lease>;
  /** The lease if the lock is free now, or null. */
  tryLock(name: string, options?: MutexOptions): Promise<Lease | null>;
  /** `lock(name, options).using(routine)`; several names are `lockAll`. */
  using<T>(name: string | readonly string[], routine: (lease: Lease) => T | Promise<T>): Promise<T>;
  using<T>(name: string | readonly string[], options: MutexOptions, routine: (lease: Lease) => T | Promise<T>): Promise<T>;
  /** A mutex that its `owner` may acquire again, from any task or process. It is free after the last of its leases. */
  reentrant(name: string, options: LockOptions & { owner: string }): Lock;
  rwlock(name: string, options?: LockOptions & { bridge?: Bridge | null }): RwLock;
  /** Up to `permits` permits (the same number everywhere), of which a holder takes `take`: 1 by default. */
  semaphore(name: string, options: LockOptions & { permits: number; take?: number }): Lock;
  /** Several mutexes, all or none, without deadlock, in any order of the names. */
  lockAll(names: Iterable<string>, options?: MutexOptions): Lock;
  /**
   * One start in each `period` (at least 1,000) among many candidates. With `atLeastOnce` the others wait until the work is done, and start it if its holder
   * fails.
   */
  oncePer(name: string, period: number, options?: LockOptions & { atLeastOnce?: boolean }): OncePer;
  election(name: string, options?: LockOptions & { bridge?: Bridge | null }): Election;
  /** The routine under a lock, whose name may be made of the arguments. With `busy: "skip"` it returns undefined if the lock was not granted within `wait`. */
  locked<A extends unknown[], T>(name: string | ((...parameters: A) => string), routine: (...parameters: A) => T | Promise<T>): (...parameters: A) => Promise<T>;
  locked<A extends unknown[], T>(
    name: string | ((...parameters: A) => string),
    options: MutexOptions & { busy: "skip" },
    routine: (...parameters: A) => T | Promise<T>,
  ): (...parameters: A) => Promise<T | undefined>;
  locked<A extends unknown[], T>(
    name: string | ((...parameters: A) => string),
    options: MutexOptions & { busy?: "reject" },
    routine: (...parameters: A) => T | Promise<T>,
  ): (...parameters: A) => Promise<T>;
  /** Takes over a lease that was detached, in any process. `LeaseLost` if it has ended. */
  attach(text: string): Promise<Lease>;
  inspect(name: string, kind?: LockKind): Promise<LockInfo>;
  /** All locks with a holder or a waiter, ordered by name: those of the client's namespace, if it has one. */
  list(): Promise<LockInfo[]>;
  /**
   * Takes the lock from its holders, or from the one with `token`. Returns the former holders. They learn it at their next renewal, so only the fencing token
   * protects what they write until then.
   */
  forceRelease(name: string, kind?: LockKind, options?: { token?: bigint | null }): Promise<Holder[]>;
  /** Releases all leases and ends all waits, and waits until the store has confirmed it. A second call does nothing. */
  close(options?: { timeout?: number | null }): Promise<void>;
}

/**
 * A client of the store at `url`, which it has reached: `redis://host[:port]`, `rediss://…`, `redis-sentinel://…`, `redis-cluster://…`, `redlock://…`,
 * `postgres://user@host/database`, `sqlite:/path/to/file`, `memory:`, or a server of `leasehold serve`: `http://…`, `https://…`, `unix:/path`.
 *
 * Close it, or use it with `await using`. An open client keeps no process alive; a pending call does. Leases are released when the process exits.
 */
export function connect(url: string | URL, options?: ClientOptions): Promise<Client>;

/** Emits "record" for what the engine reports. */
export const log: EventEmitter<{ record: [{ level: "info" | "warn" | "error"; message: string }] }>;

/** Releases this client's leases when a signal arrives, and then ends the process by it. Returns how to stop that. */
export function releaseOnSignals(client: Client, signals?: NodeJS.Signals[]): () => void;

/** Locks of other libraries that a lock takes too, so that programs which still use those are excluded. */
export const bridge: {
  redisPy(name: string): Bridge;
  pottery(name: string): Bridge;
  pythonRedisLock(name: string): Bridge;
  setNxPx(key: string): Bridge;
  redsync(name: string): Bridge;
  nodeRedlock(resource: string): Bridge;
  rslock(resource: string): Bridge;
  bsmRedislock(key: string): Bridge;
  rueidislock(name: string): Bridge;
  dapr(appId: string, resource: string): Bridge;
  springIntegration(registry: string, name: string): Bridge;
  redissonLock(name: string): Bridge;
  redissonFencedLock(name: string): Bridge;
  redissonReadWriteLock(name: string): Bridge;
  redlock(servers: readonly string[], key: string): Bridge;
  redissonRedlock(servers: readonly string[], name: string): Bridge;
};

/** The class of all errors of this package. */
export class LeaseholdError extends Error {}
/** The lock was not granted within the wait, or a call was not confirmed within its timeout. */
export class Timeout extends LeaseholdError {}
/** The store or the server did not answer. */
export class Unavailable extends LeaseholdError {}
/** The lock's queue is full. */
export class QueueFull extends LeaseholdError {}
/** An argument cannot be used. */
export class InvalidInput extends LeaseholdError {}
/** The store, or the kind of lock, cannot do this. */
export class Unsupported extends LeaseholdError {}
/** The store refused it: a missing right, a wrong password. */
export class Refused extends LeaseholdError {}
/** The client was closed, or the process exits. */
export class ClientClosed extends LeaseholdError {}

export type LossReason = "expired" | "gone" | "max_hold" | "closed" | "bridge" | "released";

/** The lease has ended although it was not released. */
export class LeaseLost extends LeaseholdError {
  constructor(message: string, reason: LossReason);
  /** `released` only from `Lease.check`. */
  readonly reason: LossReason;
}
