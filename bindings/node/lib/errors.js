"use strict";
// The errors of the package. What a back end throws is one of these.

/** The class of all errors of this package. */
class LeaseholdError extends Error {
  get name() {
    return this.constructor.name;
  }
}

/** The lock was not granted within the wait, or a call was not confirmed within its timeout. */
class Timeout extends LeaseholdError {}
/** The store or the server did not answer, or the connection failed. */
class Unavailable extends LeaseholdError {}
/** The lock's queue is full. */
class QueueFull extends LeaseholdError {}
/** An argument cannot be used. */
class InvalidInput extends LeaseholdError {}
/** The store, or the kind of lock, cannot do this. */
class Unsupported extends LeaseholdError {}
/** The store refused it: a missing right, a wrong password. */
class Refused extends LeaseholdError {}
/** The client was closed, or the process exits. */
class ClientClosed extends LeaseholdError {}

/** The lease has ended although it was not released. */
class LeaseLost extends LeaseholdError {
  /**
   * @param {string} message
   * @param {string} reason `expired`, `gone`, `max_hold`, `closed`, `bridge` or `released`
   */
  constructor(message, reason) {
    super(message);
    this.reason = reason;
  }
}

module.exports = {
  LeaseholdError,
  Timeout,
  Unavailable,
  QueueFull,
  InvalidInput,
  Unsupported,
  Refused,
  ClientClosed,
  LeaseLost,
};
