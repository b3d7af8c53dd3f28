import leasehold from "./index.js";

export const {
  ClientClosed,
  InvalidInput,
  LeaseLost,
  LeaseholdError,
  QueueFull,
  Refused,
  Timeout,
  Unavailable,
  Unsupported,
  bridge,
  connect,
  log,
  releaseOnSignals,
} = leasehold;
export default leasehold;
