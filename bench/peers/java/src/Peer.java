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

/** What the peers in Java share: the protocol, whose orders bench/peers/README.md explains. */
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
        public int maxAcquisitions;
        public int readsPercent;
        public int permits;
        public String counter;
        public String log;
        public int count;
        public String resource;
        public long longUs;
        public long longPercent;
        public long writeUs;
        public long stepUs;
        public long seed;

        String nameOf(int number, boolean isOne) {
            return isOne ? name : name + ":" + number;
        }
    }

    /** So many questions are on the way at the same time. */
    static final int AT_ONCE = 500;

    /** Connects a client. */
    interface Opening {
        Client open(Order order) throws Exception;
    }

    private final Opening opening;
    private final List<Client> clients = new ArrayList<>();

    private Peer(Opening opening) {
        this.opening = opening;
    }

    /** Carries out orders until there are no more. */
    static void serve(String library, Opening opening) throws Exception {
        ObjectMapper json = new ObjectMapper();
        json.setPropertyNamingStrategy(PropertyNamingStrategies.SNAKE_CASE);
        json.configure(DeserializationFeature.FAIL_ON_UNKNOWN_PROPERTIES, false);
        Map<String, Object> hello = new LinkedHashMap<>();
        hello.put("library", library);
        hello.put("runtime", "Java " + Runtime.version());
        System.out.println(json.writeValueAsString(hello));
        Peer peer = new Peer(opening);
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
        // The libraries' threads would keep the program alive.
        System.exit(0);
    }

    private void obey(Order order, Map<String, Object> answer) throws Exception {
        switch (order.order) {
            case "open" -> open(order);
            case "run" -> new Course(order).run(clients, answer);
            case "hold" -> hold(order);
            case "held" -> answer.put("held", stillHeld());
            case "contend" -> Contender.run(order, clients);
            case "left" -> { }
            case "close" -> close();
            default -> throw new IllegalArgumentException("no order is called " + order.order);
        }
    }

    private void open(Order order) throws Exception {
        close();
        for (int number = 0; number < order.clients; number++) {
            clients.add(opening.open(order));
        }
    }

    private void close() {
        clients.forEach(Client::close);
        clients.clear();
    }

    private void hold(Order order) throws Exception {
        List<CompletionStage<?>> some = new ArrayList<>();
        for (int number = 0; number < order.count; number++) {
            Client client = clients.get(number % clients.size());
            some.add(client.hold(order, order.nameOf(number, order.count == 1)));
            if (some.size() == AT_ONCE || number + 1 == order.count) {
                for (CompletionStage<?> one : some) {
                    one.toCompletableFuture().get();
                }
                some.clear();
            }
        }
    }

    private int stillHeld() throws Exception {
        int count = 0;
        for (Client client : clients) {
            count += client.stillHeld();
        }
        return count;
    }
}
