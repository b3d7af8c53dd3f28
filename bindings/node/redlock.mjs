import Redlock from "./redlock.js";

export const { ExecutionError, Lock, ResourceLockedError } = Redlock;
export { Redlock };
export default Redlock;
