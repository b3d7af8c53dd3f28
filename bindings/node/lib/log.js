"use strict";
// What the engine reports: warnings of a store that does not answer, of a lease that was lost. Nothing is printed unless someone listens.

const { EventEmitter } = require("node:events");
const { isMainThread } = require("node:worker_threads");

const LEVELS = { 20: "info", 30: "warn", 40: "error" };

/** Emits "record" with `{ level, message }`. */
const log = new EventEmitter();
let follows = false;

/** Emits a record, in a turn of its own: what a listener throws ends nothing of this package. */
function record(level, message) {
  if (log.listenerCount("record") > 0) process.nextTick(() => log.emit("record", { level, message }));
}

/** Emits what the native module reports, in the main thread: its workers share the module. */
function follow(native) {
  if (follows || !isMainThread) return;
  follows = true;
  const next = () => {
    native.records().promise.then((records) => {
      for (const { level, message } of records) record(LEVELS[level] ?? "info", message);
      next();
    }, () => {});
  };
  next();
}

module.exports = { follow, log, record };
