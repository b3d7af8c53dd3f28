import com.fasterxml.jackson.databind.DeserializationFeature;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.PropertyNamingStrategies;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletionStage;
import org.redisson.Redisson;
import org.redisson.api.RLock;

/** Redisson as a peer of the benchmark; bench/peers/README.md says what the orders mean. */
public final class Peer {
    /** An order; each uses some of the fields. */
    static final class Order {
        public String order;
        public List<String> urls;
        public int clients;
        public long ttlMs;
        public String lock;
        public boolean isTuned;
        public String name;
        public boolean ownNames;
        public int tasks;
        public int firstTask;
        public int allTasks;
        public long holdUs;
        public long startNs;
        public long endNs;
        public int turns;
        public int readsPercent;
        public int permits;
        public String counter;
        public String log;
        public int count;

        String nameOf(int number, boolean isOne) {
            return isOne ? name : name + ":" + number;
        }
    }

    private static final int AT_ONCE = 500;
    /** Whoever holds for the peer itself: an id that no thread of a run has. */
    private static final long HOLDER = -1;

    private final List<Client> clients = new ArrayList<>();
    private final List<RLock> held = new ArrayList<>();

    public static void main(String[] arguments) throws Exception {
        ObjectMapper json = new ObjectMapper();
        json.setPropertyNamingStrategy(PropertyNamingStrategies.SNAKE_CASE);
        json.configure(DeserializationFeature.FAIL_ON_UNKNOWN_PROPERTIES, false);
        Map<String, Object> hello = new LinkedHashMap<>();
        hello.put("library", "Redisson " + Redisson.class.getPackage().getImplementationVersion());
        hello.put("runtime", "Java " + Runtime.version());
        System.out.println(json.writeValueAsString(hello));
        Peer peer = new Peer();
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in));
        for (String line = orders.readLine(); line != null; line = orders.readLine()) {
            Map<String, Object> answer = new LinkedHashMap<>();
            try {
                peer.obey(json.readValue(line, Order.class), answer);
            } catch (Exception error) {
                answer.put("error", String.valueOf(error));
            }
            System.out.println(json.writeValueAsString(answer));
        }
        // Its threads would keep the program alive.
        System.exit(0);
    }

    private void obey(Order order, Map<String, Object> answer) throws Exception {
        switch (order.order) {
            case "open" -> open(order);
            case "run" -> new Course(order).run(clients, answer);
            case "hold" -> hold(order);
            case "held" -> answer.put("held", stillHeld());
            case "close" -> close();
            default -> throw new IllegalArgumentException("no order is called " + order.order);
        }
    }

    private void open(Order order) {
        close();
        for (int number = 0; number < order.clients; number++) {
            clients.add(new Client(order));
        }
    }

    private void close() {
        clients.forEach(Client::close);
        clients.clear();
        held.clear();
    }

    /** Some hundred at a time. */
    private void hold(Order order) throws Exception {
        List<CompletionStage<Void>> some = new ArrayList<>();
        for (int number = 0; number < order.count; number++) {
            String name = order.nameOf(number, order.count == 1);
            RLock lock = clients.get(number % clients.size()).mutex(order.lock, name);
            held.add(lock);
            some.add(lock.lockAsync(HOLDER));
            if (some.size() == AT_ONCE || number + 1 == order.count) {
                for (CompletionStage<Void> one : some) {
                    one.toCompletableFuture().get();
                }
                some.clear();
            }
        }
    }

    private int stillHeld() throws Exception {
        int count = 0;
        for (int first = 0; first < held.size(); first += AT_ONCE) {
            List<CompletionStage<Boolean>> some = new ArrayList<>();
            for (RLock lock : held.subList(first, Math.min(held.size(), first + AT_ONCE))) {
                some.add(lock.isLockedAsync());
            }
            for (CompletionStage<Boolean> one : some) {
                count += one.toCompletableFuture().get() ? 1 : 0;
            }
        }
        return count;
    }
}
