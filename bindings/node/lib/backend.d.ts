// What a back end offers: lib/native.js for stores, lib/http for servers. Times are milliseconds, and null is no limit.
//
// A pending call keeps the process alive, except one of `lost`. What is held does not. What a back end throws, or rejects with, is an error of errors.js.

/** A started call. */
export interface Call<T> {
  promise: Promise<T>;
  /** Ends it without a result: the promise stays pending. A lease that is granted meanwhile is released in the background. Does nothing once it is settled. */
  cancel(): void;
  /** It was refused before it started, so that a lease that it would have ended is held as before. */
  isRefused?: boolean;
}

export interface Terms {
  kind: "mutex" | "reentrant" | "read" | "write" | "upgradable" | "semaphore" | "once_per" | "election" | "set";
  /** One name; several for a `set` of mutexes, all or none. */
  names: string[];
  /** null: the client's. */
  ttl: number | null;
  autoRenew: boolean;
  minHold: number;
  maxHold: number | null;
  maxWaiters: number | null;
  replicas: number | null;
  label: string | null;
  traceId: string | null;
  /** Of a reentrant lock. */
  owner: string | null;
  /** How many this holder takes of a semaphore. */
  permits: number;
  /** How many a semaphore has. */
  capacity: number;
  /** Of `once_per`. */
  period: number;
  atLeastOnce: boolean;
  globalFifo: boolean;
  detachable: boolean;
  /** The other library's lock that is taken too: the name of a function of `bridge`, and its arguments. */
  bridge: string[] | null;
}

export interface Settings {
  ttl: number | null;
  label: string | null;
  maxWaiters: number | null;
  replicas: number | null;
  connectTimeout: number | null;
  /** The bearer token of a server. */
  token: string | null;
}

export interface Lease {
  readonly name: string;
  readonly token: bigint;
  /** By name: one, or those of a set. */
  readonly tokens: Record<string, bigint>;
  /** For how long the lease may be trusted. 0 once it is lost, released or detached. */
  remaining(): number;
  /** Why it is lost. null while it is held, and after it was released or detached. */
  loss(): string | null;
  lossError(): string;
  /** Ends with the reason once the lease is lost, with null when it is released or detached. */
  lost(): Call<string | null>;
  renew(): Call<void>;
  /** The lease is not held from here on, also if the call is cancelled. */
  release(timeout: number | null): Call<void>;
  detach(): Call<string>;
  downgrade(): Call<Lease>;
  upgrade(wait: number | null): Call<Lease | null>;
  setMinHold(milliseconds: number): void;
  /** Releases it in the background. */
  abandon(): void;
}

export interface Lock {
  acquire(wait: number | null): Call<Lease | null>;
}

export interface Backend {
  /** Without passwords. */
  readonly address: string;
  lock(terms: Terms): Lock;
  connect(): Call<void>;
  attach(text: string): Call<Lease>;
  /** JSON, as `GET /v1/locks/{kind}/{name}` of a server answers. */
  inspect(kind: string, name: string): Call<string>;
  list(): Call<string>;
  /** A JSON array of the holders that were released. */
  forceRelease(kind: string, name: string, token: bigint | null): Call<string>;
  close(timeout: number | null): Call<void>;
}

export interface Module {
  open(url: string, settings: Settings): Backend;
}
