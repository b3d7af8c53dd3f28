"use strict";
// The clock of leases: milliseconds that pass also while the host sleeps, as far as the system tells.

const { uptime } = require("node:os");

// `performance.now` stands still while the host sleeps; `os.uptime` does not, and counts whole seconds on some systems.
const STEP = 1_500;
const behind = () => uptime() * 1_000 - performance.now();
const first = behind();
let slept = 0;

function now() {
  const more = behind() - first - slept;
  if (more >= STEP) slept += more;
  return performance.now() + slept;
}

module.exports = { now };
