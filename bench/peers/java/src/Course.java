import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;

/** One run: its threads acquire and release until the end. Moments are System.nanoTime, which on Linux is the monotonic clock. */
final class Course {
    private static final int ACQUISITION_BYTES = 40;
    /** A first release loads classes, and takes longer than the others on a busy machine. */
    private static final long GRACE_MS = 3_000;

    private final Peer.Order order;
    private final AtomicInteger failures = new AtomicInteger();
    private final AtomicReference<String> failure = new AtomicReference<>();
    private FileChannel counter;
    /** The log is being written: a task that is granted the lock now was interrupted too late, and releases at once. */
    private volatile boolean isOver;

    Course(Peer.Order order) {
        this.order = order;
    }

    /** The acquisitions of one thread. */
    private final class Task extends Thread {
        private final Client.Lock lock;
        private final int number;
        private final ByteBuffer bytes = ByteBuffer.allocateDirect(8).order(ByteOrder.LITTLE_ENDIAN);
        private final Queue<long[]> acquisitions = new ConcurrentLinkedQueue<>();
        /** Between acquire and release, where no interrupt may happen. */
        private boolean isInside;

        Task(Client.Lock lock, int number) {
            this.lock = lock;
            this.number = number;
            setDaemon(true);
        }

        @Override
        public void run() {
            try {
                sleepUntil(order.startNs);
                acquireRepeatedly();
            } catch (Exception end) {
                // The run is over, and it still waited.
            }
        }

        private void acquireRepeatedly() throws Exception {
            int count = 0;
            while (System.nanoTime() < order.endNs && (order.maxAcquisitions == 0 || count < order.maxAcquisitions)) {
                boolean isShared = Math.floorMod(count * 37 + number * 61, 100) < order.readsPercent;
                long asked = System.nanoTime();
                try {
                    lock.take(isShared);
                } catch (InterruptedException end) {
                    throw end;
                } catch (Exception error) {
                    // Interrupted, it may say so in its own way.
                    if (System.nanoTime() >= order.endNs) {
                        return;
                    }
                    failed(error);
                    continue;
                }
                if (isOver) {
                    lock.give(isShared);
                    return;
                }
                long entered = System.nanoTime();
                enter();
                long left;
                try {
                    work(isShared);
                    left = System.nanoTime();
                    lock.give(isShared);
                } catch (Exception error) {
                    left = System.nanoTime();
                    failed(error);
                } finally {
                    leave();
                }
                acquisitions.add(new long[] {number, isShared ? 1 : 0, asked, entered, left, System.nanoTime()});
                count++;
            }
        }

        /** It was not waiting any more: an interruption that came just now must not end its work instead. */
        private synchronized void enter() {
            isInside = true;
            interrupted();
        }

        private synchronized void leave() {
            isInside = false;
        }

        private synchronized void callBack() {
            if (!isInside) {
                interrupt();
            }
        }

        private void work(boolean isShared) throws IOException, InterruptedException {
            boolean counts = counter != null && !isShared;
            if (counts) {
                bytes.clear();
                counter.read(bytes, 0);
            }
            if (order.holdUs > 0) {
                Thread.sleep(order.holdUs / 1000, (int) (order.holdUs % 1000) * 1000);
            }
            if (counts) {
                bytes.putLong(0, bytes.getLong(0) + 1).rewind();
                counter.write(bytes, 0);
            }
        }
    }

    void run(List<Client> clients, Map<String, Object> answer) throws Exception {
        if (!order.counter.isEmpty()) {
            counter = FileChannel.open(Path.of(order.counter), StandardOpenOption.READ, StandardOpenOption.WRITE);
        }
        List<Task> tasks = new ArrayList<>();
        for (int number = 0; number < order.tasks; number++) {
            Client client = clients.get(number % clients.size());
            Client.Lock lock = client.lock(order, order.nameOf(number, !order.ownNames));
            tasks.add(new Task(lock, order.firstTask + number));
        }
        tasks.forEach(Thread::start);
        for (Task task : tasks) {
            // Rounded up: no task is interrupted before the end.
            task.join(Math.max(1, (order.endNs - System.nanoTime()) / 1_000_000 + 1));
        }
        boolean isSpent = !callBack(tasks);
        isOver = true;
        if (counter != null) {
            counter.close();
        }
        write(tasks);
        answer.put("failures", failures.get());
        answer.put("failure", failure.get());
        answer.put("is_spent", isSpent);
    }

    /** Ends those that wait; whether all are done. */
    private static boolean callBack(List<Task> tasks) throws InterruptedException {
        long limit = System.nanoTime() + GRACE_MS * 1_000_000;
        for (Task task : tasks) {
            while (task.isAlive() && System.nanoTime() < limit) {
                task.callBack();
                task.join(1);
            }
        }
        return tasks.stream().noneMatch(Thread::isAlive);
    }

    private void failed(Exception error) throws InterruptedException {
        failures.incrementAndGet();
        failure.compareAndSet(null, String.valueOf(error));
        Thread.sleep(1);
    }

    private static void sleepUntil(long nanos) throws InterruptedException {
        long left = nanos - System.nanoTime();
        if (left > 0) {
            Thread.sleep(left / 1_000_000, (int) (left % 1_000_000));
        }
    }

    /** Those who could not be called back may still be at it: what they add from now on does not count. */
    private void write(List<Task> tasks) throws IOException {
        List<long[]> acquisitions = tasks.stream().flatMap(task -> task.acquisitions.stream()).toList();
        ByteBuffer log = ByteBuffer.allocate(acquisitions.size() * ACQUISITION_BYTES).order(ByteOrder.LITTLE_ENDIAN);
        for (long[] acquisition : acquisitions) {
            log.putInt((int) acquisition[0]).putInt((int) acquisition[1]);
            for (int moment = 2; moment < acquisition.length; moment++) {
                log.putLong(acquisition[moment]);
            }
        }
        Files.write(Path.of(order.log), log.array());
    }
}
