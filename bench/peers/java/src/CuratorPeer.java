import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionStage;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.ExponentialBackoffRetry;

/** Curator's lock on ZooKeeper as a peer. */
final class CuratorPeer implements Client {
    private static final int CONNECTION_TIMEOUT_MS = 15_000;

    private final CuratorFramework client;
    private final List<InterProcessMutex> held = new ArrayList<>();

    public static void main(String[] arguments) throws Exception {
        Peer.serve("Curator " + CuratorFramework.class.getPackage().getImplementationVersion(), CuratorPeer::new);
    }

    private CuratorPeer(Peer.Order order) throws Exception {
        String server = order.urls.get(0).replace("zookeeper://", "");
        // The retries that its documentation begins with.
        ExponentialBackoffRetry retries = new ExponentialBackoffRetry(1_000, 3);
        client = CuratorFrameworkFactory.newClient(server, (int) order.ttlMs, CONNECTION_TIMEOUT_MS, retries);
        client.start();
        client.blockUntilConnected();
    }

    @Override
    public Lock lock(Peer.Order order, String name) {
        if (!order.lock.equals("mutex")) {
            throw new IllegalArgumentException("Curator's peer has no lock that is called " + order.lock);
        }
        InterProcessMutex mutex = mutex(name);
        return new Mutex(mutex);
    }

    private record Mutex(InterProcessMutex mutex) implements Lock {
        @Override
        public void take(boolean isShared) throws Exception {
            mutex.acquire();
        }

        @Override
        public void give(boolean isShared) throws Exception {
            mutex.release();
        }

        @Override
        public boolean isHeld() {
            return mutex.isOwnedByCurrentThread();
        }
    }

    private InterProcessMutex mutex(String name) {
        return new InterProcessMutex(client, "/" + name);
    }

    @Override
    public CompletionStage<?> hold(Peer.Order order, String name) throws Exception {
        InterProcessMutex mutex = mutex(name);
        mutex.acquire();
        held.add(mutex);
        return CompletableFuture.completedStage(null);
    }

    @Override
    public int stillHeld() {
        return (int) held.stream().filter(InterProcessMutex::isAcquiredInThisProcess).count();
    }

    @Override
    public void close() {
        client.close();
    }
}
