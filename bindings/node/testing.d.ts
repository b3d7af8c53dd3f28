/** A store of this process, whose clock the test moves. */
export class TestStore {
  /** For `connect`. */
  readonly address: string;
  /** Milliseconds by its clock. */
  readonly elapsed: number;
  /** Moves the clock, and lets clients work meanwhile. */
  advance(milliseconds: number): void;
  /** Moves the clock as a host that sleeps does: no client works meanwhile. */
  suspend(milliseconds: number): void;
  /** Whether the store answers. */
  setReachable(isReachable: boolean): void;
}
