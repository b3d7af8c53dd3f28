import io.netty.channel.EventLoopGroup;
import io.netty.channel.MultiThreadIoEventLoopGroup;
import io.netty.channel.nio.NioIoHandler;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletionStage;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.redisson.Redisson;
import org.redisson.RedissonRedLock;
import org.redisson.api.RFencedLock;
import org.redisson.api.RLock;
import org.redisson.api.RReadWriteLock;
import org.redisson.api.RSemaphore;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;
import org.redisson.config.SingleServerConfig;

/** Redisson as a peer: a RedissonClient for each server. */
final class RedissonPeer implements Client {
    /** Where there are many clients they share their threads, since each would bring dozens of its own. */
    private static final int SHARED_THREADS = 16;
    private static EventLoopGroup sharedLoops;
    private static ExecutorService sharedExecutor;

    /** Owner of the locks that the peer itself holds: an id that no thread of a run has. */
    private static final long HOLDER = -1;

    private final List<RedissonClient> servers = new ArrayList<>();
    private final List<RLock> held = new ArrayList<>();

    public static void main(String[] arguments) throws Exception {
        Peer.serve("Redisson " + Redisson.class.getPackage().getImplementationVersion(), RedissonPeer::new);
    }

    private RedissonPeer(Peer.Order order) {
        for (String url : order.urls) {
            Config config = new Config();
            config.setLockWatchdogTimeout(order.ttlMs);
            // A server that is down is part of the work of a quorum.
            config.setLazyInitialization(order.urls.size() > 1);
            SingleServerConfig server = config.useSingleServer().setAddress(url);
            if (order.clients > 1) {
                share(config);
                // The smallest pools that it allows.
                server.setConnectionMinimumIdleSize(1)
                        .setConnectionPoolSize(1)
                        .setSubscriptionConnectionMinimumIdleSize(1)
                        .setSubscriptionConnectionPoolSize(1);
            }
            servers.add(Redisson.create(config));
        }
    }

    private static void share(Config config) {
        if (sharedLoops == null) {
            sharedLoops = new MultiThreadIoEventLoopGroup(SHARED_THREADS, NioIoHandler.newFactory());
            sharedExecutor = Executors.newFixedThreadPool(SHARED_THREADS);
        }
        config.setEventLoopGroup(sharedLoops).setExecutor(sharedExecutor);
    }

    @Override
    public Lock lock(Peer.Order order, String name) {
        return switch (order.lock) {
            case "read-write" -> new ReadWrite(servers.get(0).getReadWriteLock(name));
            case "semaphore" -> {
                RSemaphore semaphore = servers.get(0).getSemaphore(name);
                semaphore.trySetPermits(order.permits);
                yield Lock.of(semaphore::acquire, semaphore::release);
            }
            default -> {
                yield new Mutex(mutex(order.lock, name));
            }
        };
    }

    private RLock mutex(String kind, String name) {
        RedissonClient first = servers.get(0);
        return switch (kind) {
            case "mutex" -> {
                if (servers.size() > 1) {
                    yield redLock(name);
                }
                yield first.getLock(name);
            }
            case "fair" -> first.getFairLock(name);
            case "fenced" -> first.getFencedLock(name);
            case "read" -> first.getReadWriteLock(name).readLock();
            case "write" -> first.getReadWriteLock(name).writeLock();
            default -> throw new IllegalArgumentException("Redisson's peer has no lock that is called " + kind);
        };
    }

    @SuppressWarnings("deprecation")
    private RLock redLock(String name) {
        return new RedissonRedLock(servers.stream().map(server -> server.getLock(name)).toArray(RLock[]::new));
    }

    @Override
    public CompletionStage<?> hold(Peer.Order order, String name) {
        RLock lock = mutex(order.lock, name);
        held.add(lock);
        return lock.lockAsync(HOLDER);
    }

    /** Some hundred at a time. */
    @Override
    public int stillHeld() throws Exception {
        int count = 0;
        for (int first = 0; first < held.size(); first += Peer.AT_ONCE) {
            List<CompletionStage<Boolean>> some = new ArrayList<>();
            for (RLock lock : held.subList(first, Math.min(held.size(), first + Peer.AT_ONCE))) {
                some.add(lock.isLockedAsync());
            }
            for (CompletionStage<Boolean> one : some) {
                count += one.toCompletableFuture().get() ? 1 : 0;
            }
        }
        return count;
    }

    @Override
    public void close() {
        servers.forEach(RedissonClient::shutdown);
    }

    private record Mutex(RLock lock) implements Lock {
        @Override
        public void take(boolean isShared) throws InterruptedException {
            lock.lockInterruptibly();
        }

        @Override
        public long takeWithToken() throws InterruptedException {
            if (lock instanceof RFencedLock fenced) {
                return fenced.lockAndGetToken();
            }
            lock.lockInterruptibly();
            return 0;
        }

        @Override
        public void give(boolean isShared) {
            lock.unlock();
        }

        @Override
        public boolean isHeld() {
            try {
                return lock.isHeldByCurrentThread();
            } catch (UnsupportedOperationException none) {
                // RedissonRedLock has no such question, and relies on its renewals.
                return true;
            }
        }
    }

    private record ReadWrite(RReadWriteLock lock) implements Lock {
        private RLock side(boolean isShared) {
            return isShared ? lock.readLock() : lock.writeLock();
        }

        @Override
        public void take(boolean isShared) throws InterruptedException {
            side(isShared).lockInterruptibly();
        }

        @Override
        public void give(boolean isShared) {
            side(isShared).unlock();
        }
    }
}
