import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletionStage;
import org.springframework.data.redis.connection.RedisStandaloneConfiguration;
import org.springframework.data.redis.connection.jedis.JedisConnectionFactory;
import org.springframework.data.redis.core.StringRedisTemplate;
import org.springframework.integration.redis.util.RedisLockRegistry;
import org.springframework.integration.redis.util.RedisLockRegistry.RedisLockType;

/** Spring Integration's lock registry as a peer. Its waiters poll by default; the kind `pub-sub` waits for a message. */
final class SpringPeer implements Client {
    private static final String REGISTRY = "registry";

    private final JedisConnectionFactory connections;
    private final long ttlMs;
    private final List<RedisLockRegistry> registries = new ArrayList<>();

    public static void main(String[] arguments) throws Exception {
        Package library = RedisLockRegistry.class.getPackage();
        Peer.serve("Spring Integration " + library.getImplementationVersion(), SpringPeer::new);
    }

    private SpringPeer(Peer.Order order) {
        String[] address = order.urls.get(0).replace("redis://", "").split(":");
        connections = new JedisConnectionFactory(
                new RedisStandaloneConfiguration(address[0], Integer.parseInt(address[1])));
        connections.afterPropertiesSet();
        connections.start();
        ttlMs = order.ttlMs;
    }

    @Override
    public Lock lock(Peer.Order order, String name) {
        RedisLockRegistry registry = registry(order.lock);
        // The first unlock loads classes, for longer than the end of a run allows.
        String firstName = name + "-first-" + registries.size() + ProcessHandle.current().pid();
        java.util.concurrent.locks.Lock first = registry.obtain(firstName);
        first.lock();
        first.unlock();
        if (new StringRedisTemplate(connections).hasKey(REGISTRY + ":" + firstName)) {
            throw new IllegalStateException("unlock has left the key");
        }
        java.util.concurrent.locks.Lock lock = registry.obtain(name);
        return Lock.of(lock::lockInterruptibly, lock::unlock);
    }

    /** A registry is a holder: its locks are reentrant for the threads of this process. */
    private RedisLockRegistry registry(String kind) {
        RedisLockRegistry registry = new RedisLockRegistry(connections, REGISTRY, ttlMs);
        switch (kind) {
            case "mutex" -> registry.setRedisLockType(RedisLockType.SPIN_LOCK);
            case "pub-sub" -> registry.setRedisLockType(RedisLockType.PUB_SUB_LOCK);
            default -> throw new IllegalArgumentException("Spring's peer has no lock that is called " + kind);
        }
        registries.add(registry);
        return registry;
    }

    @Override
    public CompletionStage<?> hold(Peer.Order order, String name) {
        throw new UnsupportedOperationException("Spring's peer is for bridges: it keeps no locks");
    }

    @Override
    public int stillHeld() {
        return 0;
    }

    @Override
    public void close() {
        registries.forEach(RedisLockRegistry::destroy);
        connections.destroy();
    }
}
