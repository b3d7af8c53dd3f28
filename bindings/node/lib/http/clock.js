"use strict";
// The clock of leases: milliseconds that pass also while the host sleeps, as far as the system tells.
//
// `performance.now` stands still while the host sleeps; `os.uptime` does not, but it reads a file. So it is asked only when the time of day has jumped, as it
// does when a host wakes, and at least once a second.

const { platform, uptime } = require("node:os");

// `os.uptime` has hundredths of a second on Linux, and counts whole seconds on some systems.
const STEP = platform() === "linux" ? 50 : 1_500;
const INTERVAL = 1_000;

const first = uptime() * 1_000 - performance.now();
let slept = 0;
let lastLook = -Infinity;
let lastDay = 0;

function now() {
  const time = performance.now();
  const day = Date.now() - time;
  if (time - lastLook >= INTERVAL || Math.abs(day - lastDay) >= STEP / 2) {
    lastLook = time;
    lastDay = day;
    const more = uptime() * 1_000 - time - first - slept;
    if (more >= STEP) slept += more;
  }
  return time + slept;
}

module.exports = { now };
