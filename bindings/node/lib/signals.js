"use strict";
// Releases on signals, for programs that ask for it.

/** Releases the leases of these clients when one of the signals arrives, and then ends the process by it, as it would end without this. */
function releaseOnSignals(client, signals = ["SIGINT", "SIGTERM"]) {
  const end = (signal) => {
    for (const name of signals) process.removeListener(name, end);
    client
      .close({ timeout: 1_000 })
      .catch(() => {})
      .finally(() => process.kill(process.pid, signal));
  };
  for (const name of signals) process.on(name, end);
  return () => {
    for (const name of signals) process.removeListener(name, end);
  };
}

module.exports = { releaseOnSignals };
