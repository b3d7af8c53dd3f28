import java.util.concurrent.CompletionStage;

/** One client of a library, with connections of its own. */
interface Client {
    /** One task's way to the lock of this name. */
    Lock lock(Peer.Order order, String name) throws Exception;

    /** Takes the lock, and keeps it. */
    CompletionStage<?> hold(Peer.Order order, String name) throws Exception;

    /** How many of those are still held, as far as the library knows. */
    int stillHeld() throws Exception;

    void close();

    /** What a task takes and gives back. */
    interface Lock {
        /** Waits until it has it, or is interrupted. */
        void take(boolean isShared) throws Exception;

        void give(boolean isShared) throws Exception;

        /** As take, and returns the fencing token; zero if the library has none. */
        default long takeWithToken() throws Exception {
            take(false);
            return 0;
        }

        /** Whether this thread still holds it, as far as the library knows. */
        default boolean isHeld() throws Exception {
            return true;
        }

        /** One without shared acquisitions. */
        static Lock of(Step take, Step give) {
            return new Lock() {
                @Override
                public void take(boolean isShared) throws Exception {
                    take.run();
                }

                @Override
                public void give(boolean isShared) throws Exception {
                    give.run();
                }
            };
        }
    }

    interface Step {
        void run() throws Exception;
    }
}
