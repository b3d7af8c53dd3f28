// A program whose types tsc checks: it is not run.

import leasehold, { bridge, connect, log, LeaseLost, releaseOnSignals, Timeout, type Client, type Lease, type LockInfo } from "leasehold";
import Redlock, { ExecutionError, type Lock, type RedlockAbortSignal } from "leasehold/redlock";
import { TestStore } from "leasehold/testing";
import Redis from "ioredis";

async function work(lease: Lease): Promise<number> {
  const fence: bigint = lease.token;
  await fetch("http://127.0.0.1", { signal: lease.signal, headers: { fence: String(fence) } });
  return 7;
}

export async function program(): Promise<void> {
  const client: Client = await connect("redis://127.0.0.1", { namespace: "app", ttl: 10_000 });
  const { signal } = new AbortController();
  const seven: number = await client.using("orders:42", { ttl: 10_000, wait: 30_000, signal }, work);
  const text: string = await client.using(["a", "b"], (lease) => Object.keys(lease.tokens).join());
  await using lease = await client.acquire("orders:42");
  await using perhaps = await client.tryLock("orders:42");
  if (perhaps !== null) perhaps.check();
  const once: string | undefined = await client.oncePer("nightly", 3_600_000).using(() => "done");
  const reader: Lease = await client.rwlock("prices").upgradable().acquire({ wait: null });
  const writer: Lease = await reader.upgrade({ wait: 5 });
  await (await writer.downgrade()).release({ timeout: 100 });
  for await (const leader of client.election("scheduler").observe({ every: 100 })) console.log(leader?.process.label);
  const info: LockInfo = await client.inspect("prices", "rw");
  const report = client.locked((user: number, deep?: boolean) => `report:${user}`, { busy: "skip", wait: 0 }, (user, deep) => `${user} ${deep}`);
  const reported: string | undefined = await report(7, true);
  const strict: (name: string) => Promise<number> = client.locked("strict", (name: string) => name.length);
  log.on("record", ({ level, message }) => console.log(level satisfies string, message));
  releaseOnSignals(client, ["SIGTERM"])();
  client.lock("x", { bridge: bridge.redlock(["redis://a"], "x") });
  try {
    await client.lock("x").acquire();
  } catch (error) {
    if (error instanceof Timeout) return;
    if (error instanceof LeaseLost && error.reason === "expired") return;
    throw error;
  }
  // @ts-expect-error a mistyped option
  client.lock("x", { tll: 1 });
  // @ts-expect-error a semaphore has a number of permits
  client.semaphore("x");
  // @ts-expect-error tokens are bigints
  await client.forceRelease("x", "mutex", { token: 7 });
  const address: string = new TestStore().address;
  console.log(seven, text, once, lease, info, reported, strict, address, leasehold.connect === connect);
}

export async function redlock(): Promise<void> {
  const redlock = new Redlock([new Redis(), new Redis(6380)], { retryCount: -1, bridge: false });
  redlock.on("error", (error: Error) => console.log(error));
  const lock: Lock = await redlock.acquire(["a"], 5_000);
  await (await lock.extend(5_000)).release();
  const value: number = await redlock.using(["a"], 5_000, { retryCount: 1 }, async (signal: RedlockAbortSignal) => {
    if (signal.aborted) throw signal.error;
    return 7;
  });
  const stats = await new ExecutionError("", []).attempts[0];
  console.log(value, stats?.votesAgainst.size);
  // @ts-expect-error another setting
  new Redlock([new Redis()], { retries: 1 });
}
