// The class of node-redlock 5 on the engine of leasehold.

import { EventEmitter } from "node:events";

/** A client of ioredis, whose options are read. */
export interface RedisClient {
  readonly options: object;
  evalsha(...parameters: never[]): unknown;
  quit(): Promise<unknown>;
}

export interface ExecutionStats<C = RedisClient> {
  readonly membershipSize: number;
  readonly quorumSize: number;
  /** All clients, or none: the engine decides over all servers, and does not tell their votes apart. */
  readonly votesFor: Set<C>;
  readonly votesAgainst: Map<C, Error>;
}

export interface ExecutionResult {
  readonly attempts: readonly Promise<ExecutionStats>[];
}

export interface Settings {
  readonly driftFactor: number;
  /** With `retryDelay`, how long an acquisition waits in the queue: their product. -1 is without a limit. */
  readonly retryCount: number;
  readonly retryDelay: number;
  readonly retryJitter: number;
  readonly automaticExtensionThreshold: number;
}

export interface ConstructorSettings extends Settings {
  /** Whether processes that still use the package redlock are excluded too: true by default. Set it to false once there are none. */
  readonly bridge: boolean;
  /** The servers, in place of the options of the clients. */
  readonly addresses: readonly string[];
}

export class ResourceLockedError extends Error {}

export class ExecutionError extends Error {
  constructor(message: string, attempts: readonly Promise<ExecutionStats>[]);
  readonly attempts: readonly Promise<ExecutionStats>[];
}

export class Lock {
  readonly redlock: Redlock;
  readonly resources: string[];
  /** The tokens of the resources, as a text. */
  readonly value: string;
  /** The fencing token of the first resource. */
  readonly token: bigint;
  readonly attempts: readonly Promise<ExecutionStats>[];
  expiration: number;
  release(): Promise<ExecutionResult>;
  extend(duration: number): Promise<Lock>;
}

export type RedlockAbortSignal = AbortSignal & { error?: Error };

export class Redlock extends EventEmitter {
  constructor(clients: Iterable<RedisClient>, settings?: Partial<ConstructorSettings>);
  readonly clients: Set<RedisClient>;
  readonly settings: Settings;
  /** Closes the engine's connections, and quits the clients. */
  quit(): Promise<void>;
  acquire(resources: string[], duration: number, settings?: Partial<Settings>): Promise<Lock>;
  release(lock: Lock, settings?: Partial<Settings>): Promise<ExecutionResult>;
  extend(existing: Lock, duration: number, settings?: Partial<Settings>): Promise<Lock>;
  using<T>(resources: string[], duration: number, settings: Partial<Settings>, routine: (signal: RedlockAbortSignal) => Promise<T>): Promise<T>;
  using<T>(resources: string[], duration: number, routine: (signal: RedlockAbortSignal) => Promise<T>): Promise<T>;
}

export default Redlock;
