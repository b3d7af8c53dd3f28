"use strict";
// Stores of tests, whose clock the test moves.

const { TestStore: Native, errorOf } = require("./lib/native");
const { milliseconds } = require("./lib/terms");

/** A store of this process. `connect(store.address)` opens clients of it. */
class TestStore {
  #store = new Native();

  get address() {
    return this.#store.address;
  }

  get elapsed() {
    return this.#store.elapsed();
  }

  advance(by) {
    check(this.#store.advance(milliseconds(by, "by")));
  }

  suspend(by) {
    check(this.#store.suspend(milliseconds(by, "by")));
  }

  setReachable(isReachable) {
    this.#store.setReachable(Boolean(isReachable));
  }
}

function check(failed) {
  if (failed !== null && failed !== undefined) throw errorOf(failed);
}

module.exports = { TestStore };
