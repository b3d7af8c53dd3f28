import testing from "./testing.js";

export const { TestStore } = testing;
export default testing;
