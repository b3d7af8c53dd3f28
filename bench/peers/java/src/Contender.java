import java.io.BufferedReader;
import java.io.IOException;
import java.net.StandardProtocolFamily;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.Channels;
import java.nio.channels.SocketChannel;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;

/** One thread that takes a lock again and again, and reports every section to the resource. */
final class Contender extends Thread {
    private final Peer.Order order;
    private final Client.Lock lock;
    private final int task;
    private final SocketChannel stream;
    private final BufferedReader lines;
    private long token;

    private Contender(Peer.Order order, Client.Lock lock, int task) throws IOException {
        this.order = order;
        this.lock = lock;
        this.task = task;
        stream = SocketChannel.open(StandardProtocolFamily.UNIX);
        stream.connect(UnixDomainSocketAddress.of(order.resource));
        lines = new BufferedReader(Channels.newReader(stream, StandardCharsets.UTF_8));
        setDaemon(true);
    }

    static void run(Peer.Order order, List<Client> clients) throws Exception {
        List<Contender> all = new ArrayList<>();
        for (int number = 0; number < order.tasks; number++) {
            Client.Lock lock = clients.get(number % clients.size()).lock(order, order.name);
            all.add(new Contender(order, lock, order.firstTask + number));
        }
        all.forEach(Thread::start);
        for (Contender one : all) {
            one.join();
        }
    }

    @Override
    public void run() {
        try (stream) {
            send("worker " + task + " " + ProcessHandle.current().pid());
            for (int number = 0; System.nanoTime() < order.endNs; number++) {
                acquireOnce(number);
            }
            tell("end", System.nanoTime(), "");
        } catch (Exception gone) {
            // The resource has the record of what this task did.
        }
    }

    private void acquireOnce(long number) throws Exception {
        long holdUs = part(number, 41, 53) < order.longPercent
                ? order.longUs
                : order.holdUs * (part(number, 37, 61) + 1) / 100;
        tell("want", System.nanoTime(), "");
        take();
        section(holdUs);
        tell("leave", System.nanoTime(), "");
        try {
            lock.give(false);
            tell("done", System.nanoTime(), "");
        } catch (Exception error) {
            tell("kept", System.nanoTime(), error.toString());
        }
        pause(order.holdUs * part(number, 29, 17) / 100);
    }

    private long part(long number, long a, long b) {
        return (number * a + task * b + order.seed) % 100;
    }

    private void take() throws Exception {
        while (true) {
            try {
                token = lock.takeWithToken();
                return;
            } catch (Exception error) {
                tell("fail", System.nanoTime(), error.toString());
                Thread.sleep(5);
            }
        }
    }

    /** Works while the library reports the lock as held, then writes. */
    private void section(long left) throws Exception {
        long moment = check();
        if (moment == 0) {
            return;
        }
        ask("begin", moment);
        while (left > 0) {
            long step = Math.min(left, order.stepUs);
            pause(step);
            left -= step;
            moment = check();
            if (moment == 0) {
                return;
            }
            tell("held", moment, "");
        }
        // The lock was checked, and the write is on its way.
        pause(order.writeUs);
        ask("write", moment);
    }

    /** A time at which the lock was still held: from before the library was asked. Zero if it is lost. */
    private long check() throws Exception {
        long moment = System.nanoTime();
        boolean isHeld = false;
        try {
            isHeld = lock.isHeld();
        } catch (Exception unknown) {
            // The server did not answer: the lock may be lost.
        }
        if (!isHeld) {
            tell("lost", System.nanoTime(), "");
            return 0;
        }
        return moment;
    }

    private static void pause(long micros) throws InterruptedException {
        Thread.sleep(micros / 1000, (int) (micros % 1000) * 1000);
    }

    private void tell(String event, long moment, String rest) throws IOException {
        send((event + " " + moment + " " + rest).strip().replace('\n', ' '));
    }

    private void send(String line) throws IOException {
        ByteBuffer bytes = ByteBuffer.wrap((line + "\n").getBytes(StandardCharsets.UTF_8));
        while (bytes.hasRemaining()) {
            stream.write(bytes);
        }
    }

    private void ask(String event, long moment) throws IOException {
        tell(event, moment, Long.toString(token));
        if (lines.readLine() == null) {
            throw new IOException("the resource is gone");
        }
    }
}
