import io.netty.channel.EventLoopGroup;
import io.netty.channel.MultiThreadIoEventLoopGroup;
import io.netty.channel.nio.NioIoHandler;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.redisson.Redisson;
import org.redisson.RedissonRedLock;
import org.redisson.api.RLock;
import org.redisson.api.RReadWriteLock;
import org.redisson.api.RSemaphore;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;
import org.redisson.config.SingleServerConfig;

/** One client of the library: a RedissonClient for each server. */
final class Client {
    /** Where there are many clients they share their threads, since each would bring dozens of its own. */
    private static final int SHARED_THREADS = 16;
    private static EventLoopGroup sharedLoops;
    private static ExecutorService sharedExecutor;

    private final List<RedissonClient> servers = new ArrayList<>();

    Client(Peer.Order order) {
        for (String url : order.urls) {
            Config config = new Config();
            config.setLockWatchdogTimeout(order.ttlMs);
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

    /** One task's way to the lock of this name. */
    Lock lock(Peer.Order order, String name) {
        return switch (order.lock) {
            case "read-write" -> new ReadWrite(servers.get(0).getReadWriteLock(name));
            case "semaphore" -> {
                RSemaphore semaphore = servers.get(0).getSemaphore(name);
                semaphore.trySetPermits(order.permits);
                yield new Permits(semaphore);
            }
            default -> new Mutex(mutex(order.lock, name));
        };
    }

    RLock mutex(String kind, String name) {
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
            default -> throw new IllegalArgumentException("Redisson's peer has no lock that is called " + kind);
        };
    }

    @SuppressWarnings("deprecation")
    private RLock redLock(String name) {
        return new RedissonRedLock(servers.stream().map(server -> server.getLock(name)).toArray(RLock[]::new));
    }

    void close() {
        servers.forEach(RedissonClient::shutdown);
    }

    /** What a task takes and gives back. */
    interface Lock {
        void take(boolean isShared) throws InterruptedException;

        void give(boolean isShared);
    }

    private record Mutex(RLock lock) implements Lock {
        @Override
        public void take(boolean isShared) throws InterruptedException {
            lock.lockInterruptibly();
        }

        @Override
        public void give(boolean isShared) {
            lock.unlock();
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

    private record Permits(RSemaphore semaphore) implements Lock {
        @Override
        public void take(boolean isShared) throws InterruptedException {
            semaphore.acquire();
        }

        @Override
        public void give(boolean isShared) {
            semaphore.release();
        }
    }
}
