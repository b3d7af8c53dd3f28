"use strict";
// Releases on signals, for programs that ask for it.

/** By signal: the clients that are closed when it arrives. @type {Map<string, Set<import("./client").Client>>} */
const clients = new Map();

async function end(signal) {
  const closing = [...(clients.get(signal) ?? [])];
  for (const name of clients.keys()) process.removeListener(name, end);
  clients.clear();
  await Promise.allSettled(closing.map((client) => client.close({ timeout: 1_000 })));
  process.kill(process.pid, signal);
}

/**
 * Releases the leases of this client when one of the signals arrives. When all clients that asked for it have done so, the process ends by the signal, as it
 * would end without this. Returns how to stop that.
 */
function releaseOnSignals(client, signals = ["SIGINT", "SIGTERM"]) {
  for (const signal of signals) {
    if (!clients.has(signal)) {
      clients.set(signal, new Set());
      process.on(signal, end);
    }
    clients.get(signal).add(client);
  }
  return () => {
    for (const signal of signals) {
      const others = clients.get(signal);
      if (others === undefined) continue;
      others.delete(client);
      if (others.size > 0) continue;
      clients.delete(signal);
      process.removeListener(signal, end);
    }
  };
}

module.exports = { releaseOnSignals };
