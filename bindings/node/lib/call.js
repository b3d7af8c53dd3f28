"use strict";
// A call of a back end, until it has ended or its signal is aborted.

const { setMaxListeners } = require("node:events");

/** Signals that may have any number of calls, each of which takes its listener away. @type {WeakSet<AbortSignal>} */
const shared = new WeakSet();

/**
 * @template T
 * @param {() => import("./backend").Call<T>} start
 * @param {AbortSignal | null} signal
 * @returns {Promise<T>}
 */
function run(start, signal) {
  if (signal === null) return start().promise;
  if (signal.aborted) return Promise.reject(signal.reason);
  const call = start();
  return new Promise((resolve, reject) => {
    let isAborted = false;
    const abort = () => {
      isAborted = true;
      call.cancel();
      reject(signal.reason);
    };
    if (!shared.has(signal)) {
      shared.add(signal);
      setMaxListeners(0, signal);
    }
    signal.addEventListener("abort", abort, { once: true });
    call.promise.then(
      (value) => {
        signal.removeEventListener("abort", abort);
        if (isAborted) abandon(value);
        else resolve(value);
      },
      (error) => {
        signal.removeEventListener("abort", abort);
        reject(error);
      },
    );
  });
}

/** A lease that was granted in the same moment. */
function abandon(value) {
  if (value !== null && typeof value === "object" && "abandon" in value) value.abandon();
}

module.exports = { run };
