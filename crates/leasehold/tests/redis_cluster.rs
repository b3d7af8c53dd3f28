//! Hash slots that move and masters that are replaced, while locks are held and waited for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use leasehold::{Client, Guard, Kind};
use leasehold_testkit::{Cluster, Flavor, Proxy, Server, unless_paused, until, until_some};
use tokio::task::JoinHandle;
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(30);

/// Where the keys of the lock "a" are.
fn slot(cluster: &Cluster) -> u16 {
    cluster.slot_of("{mutex:a}")
}

/// One holds the lock "a", another waits for it.
async fn held_and_waited_for(cluster: &Cluster) -> (Client, Guard, JoinHandle<Guard>) {
    let (one, other) =
        (Client::connect(&cluster.url()).await.unwrap(), Client::connect(&cluster.url()).await.unwrap());
    let guard = one.mutex("a").ttl(Duration::from_secs(30)).lock().await.unwrap();
    let mutex = other.mutex("a");
    let waiting = tokio::spawn(async move { mutex.lock().await.unwrap() });
    until(async || one.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.waiters.len() == 1)).await;
    (one, guard, waiting)
}

async fn handed_over(guard: Guard, waiting: JoinHandle<Guard>) {
    let token = guard.token();
    guard.renew().await.unwrap();
    guard.release_timeout(SOON).await.unwrap();
    let next = timeout(SOON, waiting).await.unwrap().unwrap();
    assert!(next.token() > token);
    next.renew().await.unwrap();
    next.release_timeout(SOON).await.unwrap();
}

#[tokio::test]
async fn locks_move_with_their_hash_slot() {
    for flavor in [Flavor::Redis7, Flavor::Redis62] {
        let cluster = Cluster::of(&Server::builder().flavor(flavor));
        let (client, guard, waiting) = held_and_waited_for(&cluster).await;
        let slot = slot(&cluster);
        let to = (cluster.owner_of(slot) + 1) % 3;
        cluster.migrate_begin(slot, to);
        // Some keys of the lock are there and some can't be: it answers when the slot has arrived.
        let error = client.mutex("a").try_lock().await.map(drop);
        assert!(error.is_ok() || error.is_err_and(|error| error.is_unavailable()));
        cluster.migrate_keys(slot, to);
        cluster.migrate_end(slot, to);
        handed_over(guard, waiting).await;
    }
}

/// Such a cluster calls each of these nodes `?`, in its map and in redirects.
#[tokio::test]
async fn nodes_without_the_host_name_by_which_they_are_to_be_named_are_used_by_their_addresses() {
    let node = Server::builder().setting("cluster-preferred-endpoint-type", "hostname");
    let cluster = Cluster::of(&node);
    let (_client, guard, waiting) = held_and_waited_for(&cluster).await;
    let slot = slot(&cluster);
    let to = (cluster.owner_of(slot) + 1) % 3;
    cluster.migrate_begin(slot, to);
    cluster.migrate_keys(slot, to);
    cluster.migrate_end(slot, to);
    handed_over(guard, waiting).await;
}

/// Valkey 9 releases by DELIFEQ, which a node refuses or redirects like any command with one key. A release that retains the lease
/// needs rows, and waits until the slot has moved.
#[tokio::test]
async fn release_follows_its_slot() {
    for flavor in [Flavor::Redis7, Flavor::Valkey9] {
        let cluster = Cluster::of(&Server::builder().flavor(flavor));
        let client = Client::connect(&cluster.url()).await.unwrap();
        let slot = slot(&cluster);
        for min_hold in [Duration::ZERO, Duration::from_millis(1)] {
            // Nothing has moved yet, the key has moved, and all is over.
            for moved in 0..3 {
                let guard = client.mutex("a").min_hold(min_hold).lock().await.unwrap();
                let to = (cluster.owner_of(slot) + 1) % 3;
                cluster.migrate_begin(slot, to);
                if moved > 0 {
                    cluster.migrate_keys(slot, to);
                }
                if moved > 1 {
                    cluster.migrate_end(slot, to);
                }
                let mut releasing = tokio::spawn(guard.release_timeout(SOON));
                if min_hold.is_zero() {
                    (&mut releasing).await.unwrap().unwrap();
                }
                if moved < 2 {
                    cluster.migrate_keys(slot, to);
                    cluster.migrate_end(slot, to);
                }
                if !min_hold.is_zero() {
                    releasing.await.unwrap().unwrap();
                }
                let exists = ["EXISTS", "leasehold:4:{mutex:a}"];
                until(async || cluster.nodes[to].query::<u64>(&exists) == Ok(0)).await;
            }
        }
    }
}

/// While a slot is being moved, a script may delete a key there and may not create it. What would give a plain lease rows waits.
#[tokio::test]
async fn plain_lease_survives_every_command_while_its_slot_migrates() {
    for flavor in [Flavor::Redis7, Flavor::Redis62, Flavor::Valkey9] {
        let cluster = Cluster::of(&Server::builder().flavor(flavor));
        let client = Client::connect(&cluster.url()).await.unwrap();
        let other = Client::connect(&cluster.url()).await.unwrap();
        let guard = client.mutex("a").ttl(Duration::from_secs(600)).lock().await.unwrap();
        let slot = slot(&cluster);
        let to = (cluster.owner_of(slot) + 1) % 3;
        cluster.migrate_begin(slot, to);
        let mutex = other.mutex("a");
        let waits = tokio::spawn({
            let mutex = mutex.clone();
            // Until it is queued, two lost answers end an attempt, for example if the machine pauses.
            async move {
                loop {
                    match mutex.lock().await {
                        Err(error) if error.is_unavailable() => {}
                        guard => return guard.unwrap().release_timeout(SOON).await,
                    }
                }
            }
        });
        // It is cancelled with a tombstone.
        let _ = mutex.lock_timeout(Duration::from_millis(100)).await;
        let key =
            || cluster.nodes[cluster.owner_of(slot)].query::<String>(&["TYPE", "leasehold:4:{mutex:a}"]);
        assert_eq!(key().unwrap(), "string", "{flavor:?}: the lease is there");
        cluster.migrate_keys(slot, to);
        cluster.migrate_end(slot, to);
        until(async || other.inspect(Kind::Mutex, "a").await.is_ok_and(|info| !info.waiters.is_empty()))
            .await;
        guard.renew().await.unwrap();
        assert!(!waits.is_finished());
        guard.release_timeout(SOON).await.unwrap();
        timeout(SOON, waits).await.unwrap().unwrap().unwrap();
    }
}

/// The tombstone that a request may have is a key that is not there, and then a node that gives its slot away does not say whether it is at the other one.
#[tokio::test]
async fn request_that_waits_is_found_while_its_slot_migrates() {
    for flavor in [Flavor::Redis7, Flavor::Redis62, Flavor::Valkey9] {
        let cluster = Cluster::of(&Server::builder().flavor(flavor));
        let client = Client::connect(&cluster.url()).await.unwrap();
        let other = Client::connect(&cluster.url()).await.unwrap();
        let request = |client: &Client, id| client.mutex("a").request([id; 16]);
        let guard = client.mutex("a").ttl(Duration::from_secs(600)).lock().await.unwrap();
        let waits = tokio::spawn({
            let mutex = request(&client, 7);
            async move { mutex.lock().await?.release_timeout(SOON).await }
        });
        let waiters = async || client.inspect(Kind::Mutex, "a").await.map_or(0, |view| view.waiters.len());
        until(async || waiters().await == 1).await;
        let slot = slot(&cluster);
        let to = (cluster.owner_of(slot) + 1) % 3;
        cluster.migrate_begin(slot, to);
        // Each of the two asks again where the other one has asked.
        let slice = request(&other, 7).lock_timeout(Duration::from_millis(300)).await;
        assert!(slice.as_ref().is_ok_and(Option::is_none), "{flavor:?}: {slice:?}");
        // Another request waits for the move.
        let new = request(&other, 8).lock_timeout(Duration::from_millis(300)).await;
        assert!(new.as_ref().map_or_else(leasehold::Error::is_unavailable, Option::is_none), "{new:?}");
        assert_eq!(waiters().await, 1, "{flavor:?}");
        cluster.migrate_keys(slot, to);
        cluster.migrate_end(slot, to);
        guard.release_timeout(SOON).await.unwrap();
        timeout(SOON, waits).await.unwrap().unwrap().unwrap();
    }
}

#[tokio::test]
async fn attempt_queues_at_the_importing_node() {
    let cluster = Cluster::start();
    let (client, guard, waiting) = held_and_waited_for(&cluster).await;
    let slot = slot(&cluster);
    let to = (cluster.owner_of(slot) + 1) % 3;
    cluster.migrate_begin(slot, to);
    cluster.migrate_keys(slot, to);
    // The old node sends it on, and the new one serves what is announced by ASKING.
    let mutex = Client::connect(&cluster.url()).await.unwrap().mutex("a");
    let newcomer = tokio::spawn(async move { mutex.lock().await?.release_timeout(SOON).await });
    let is_queued = async || client.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.waiters.len() == 2);
    until(async || newcomer.is_finished() || is_queued().await).await;
    assert!(!newcomer.is_finished(), "{:?}", newcomer.await.unwrap());
    cluster.migrate_end(slot, to);
    handed_over(guard, waiting).await;
    timeout(SOON, newcomer).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn lock_calls_succeed_while_their_slot_migrates() {
    let cluster = Cluster::start();
    let is_over = Arc::new(AtomicBool::new(false));
    let mut workers = Vec::new();
    for _ in 0..4 {
        let mutex = Client::connect(&cluster.url()).await.unwrap().mutex("a");
        let is_over = is_over.clone();
        workers.push(tokio::spawn(async move {
            let (mut grants, mut failures) = (0, 0);
            while !is_over.load(Ordering::SeqCst) {
                // One node of a busy machine may not answer twice. A migration fails no call, in any of the rounds.
                let guard = match mutex.lock().await {
                    Err(error) if error.is_unavailable() && failures == 0 => {
                        failures += 1;
                        continue;
                    }
                    granted => granted?,
                };
                grants += 1;
                tokio::time::sleep(Duration::from_millis(2)).await;
                // Its lease ends by itself where this is not answered.
                let _ = guard.release_timeout(SOON).await;
            }
            Ok::<u32, leasehold::Error>(grants)
        }));
    }
    let slot = slot(&cluster);
    let cluster = tokio::task::spawn_blocking(move || {
        for _ in 0..6 {
            let to = (cluster.owner_of(slot) + 1) % 3;
            cluster.migrate_begin(slot, to);
            cluster.migrate_keys(slot, to);
            std::thread::sleep(Duration::from_millis(100));
            cluster.migrate_end(slot, to);
        }
        cluster
    });
    let _cluster = cluster.await.unwrap();
    is_over.store(true, Ordering::SeqCst);
    for worker in workers {
        let grants = timeout(SOON * 2, worker).await.unwrap().unwrap();
        assert!(grants.as_ref().is_ok_and(|grants| *grants > 0), "{grants:?}");
    }
}

/// The slot's keys, each alone.
fn migrate_key(cluster: &Cluster, key: &str, slot: u16, to: usize) {
    let port = cluster.nodes[to].port().to_string();
    cluster.nodes[cluster.owner_of(slot)].run(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
}

/// The clock of tokens is an hour ahead, so no clock of a server gives tokens that are as high: the new master must have it before it grants
/// anything, whichever key is moved first.
#[tokio::test]
async fn tokens_rise_while_the_slot_is_migrated_with_the_clock_before_or_after_the_lock() {
    for flavor in [Flavor::Redis7, Flavor::Redis62] {
        let cluster = Cluster::of(&Server::builder().flavor(flavor));
        let client = Client::connect(&cluster.url()).await.unwrap();
        let other = Client::connect(&cluster.url()).await.unwrap();
        let (slot, lock) = (slot(&cluster), "leasehold:4:{mutex:a}");
        let mut last = client.mutex("a").lock().await.unwrap().token().get();
        let find = || {
            let keys: Vec<String> =
                cluster.nodes[cluster.owner_of(slot)].query(&["KEYS", "leasehold:4:clock:{*"]).unwrap();
            keys.into_iter().find(|key| cluster.slot_of(key) == slot).unwrap()
        };
        let clock = find();
        let ahead = format!("{}-0", last / 2_048 + 3_600_000);
        cluster.nodes[cluster.owner_of(slot)].run(&["XADD", &clock, "MAXLEN", "0", &ahead, "t", ""]);
        last += 3_600_000 * 2_048;
        for (first, second) in [(clock.as_str(), lock), (lock, clock.as_str())] {
            // Held and waited for, so that the lock has a key to move.
            let guard = client.mutex("a").ttl(Duration::from_secs(30)).lock().await.unwrap();
            assert!(guard.token().get() > last, "{flavor:?}");
            last = guard.token().get();
            let to = (cluster.owner_of(slot) + 1) % 3;
            cluster.migrate_begin(slot, to);
            for key in [first, second] {
                migrate_key(&cluster, key, slot, to);
                // It may be refused in between, and must not be granted.
                assert!(!matches!(other.mutex("a").try_lock().await, Ok(Some(_))), "{flavor:?}: two holders");
            }
            guard.release_timeout(SOON).await.unwrap();
            // The lock's key is gone at both nodes, and the clock is at the new one: an attempt may have to wait for the end of the move.
            let during = other.mutex("a").try_lock().await.ok().flatten();
            cluster.migrate_keys(slot, to);
            cluster.migrate_end(slot, to);
            if let Some(guard) = during {
                assert!(guard.token().get() > last, "{flavor:?}: {first} first");
                last = guard.token().get();
                guard.release_timeout(SOON).await.unwrap();
            }
            let guard = timeout(SOON, other.mutex("a").lock()).await.unwrap().unwrap();
            assert!(guard.token().get() > last, "{flavor:?}: {first} first");
            last = guard.token().get();
            guard.release_timeout(SOON).await.unwrap();
        }
    }
}

#[tokio::test]
async fn new_lock_waits_for_its_slot_migration() {
    let cluster = Cluster::start();
    let client = Client::connect(&cluster.url()).await.unwrap();
    let slot = slot(&cluster);
    let to = (cluster.owner_of(slot) + 1) % 3;
    cluster.migrate_begin(slot, to);
    // Redis runs no command with several keys there until all of them are, or none can be elsewhere.
    let error = client.mutex("a").try_lock().await.unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("is being moved"), "{error}");
    let mutex = client.mutex("a");
    let patient = tokio::spawn(async move { mutex.lock().await.unwrap() });
    cluster.migrate_keys(slot, to);
    cluster.migrate_end(slot, to);
    let guard = timeout(SOON, patient).await.unwrap().unwrap();
    assert_eq!(cluster.nodes[to].query::<Vec<String>>(&["KEYS", "leasehold:*mutex:a*"]).unwrap().len(), 1);
    guard.renew().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn holder_and_waiter_follow_a_cluster_failover() {
    let mut cluster = Cluster::start();
    let (client, guard, waiting) = held_and_waited_for(&cluster).await;
    let master = cluster.owner_of(slot(&cluster));
    cluster.fail_over(master);
    handed_over(guard, waiting).await;

    let (guard, waiting) = {
        let guard = client.mutex("a").ttl(Duration::from_secs(30)).lock().await.unwrap();
        let mutex = Client::connect(&cluster.url()).await.unwrap().mutex("a");
        (guard, tokio::spawn(async move { mutex.lock().await.unwrap() }))
    };
    until(async || client.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.waiters.len() == 1)).await;
    let master = cluster.owner_of(slot(&cluster));
    until(async || cluster.nodes[master].query::<i64>(&["WAIT", "1", "100"]).is_ok_and(|count| count >= 1))
        .await;
    cluster.kill(master);
    until(async || guard.renew().await.is_ok()).await;
    handed_over(guard, waiting).await;
}

/// A server that is stopped when this value is dropped.
struct Stopped(std::process::Child);

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Until a replica takes over, the address of its master leads to a server that is not of this cluster.
#[tokio::test]
async fn other_server_that_gets_the_address_of_a_node_is_not_used() {
    holder_keeps_its_lease_beside_another_server("+@all").await;
}

/// As of a container without a disk.
#[tokio::test]
async fn cluster_of_one_node_that_is_made_anew_is_used() {
    let mut node = Server::builder().setting("cluster-enabled", "yes").start();
    let slots = ["CLUSTER", "ADDSLOTSRANGE", "0", "16383"];
    node.run(&slots);
    let port = node.port().to_string();
    until(async || {
        node.query::<String>(&["CLUSTER", "INFO"]).is_ok_and(|info| info.contains("cluster_state:ok"))
    })
    .await;
    let client = Client::connect(&format!("redis://127.0.0.1:{port}")).await.unwrap();
    let lost = client.mutex("a").lock().await.unwrap();
    node.stop();
    let folder = tempfile::tempdir().unwrap();
    let other = std::process::Command::new("redis-server")
        .args(["--cluster-enabled", "yes", "--port", &port, "--bind", "127.0.0.1", "--save", "", "--dir"])
        .arg(folder.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let _other = Stopped(other);
    let anew = redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap();
    until(async || {
        let Ok(mut anew) = anew.get_multiplexed_async_connection().await else { return false };
        redis::cmd(slots[0]).arg(&slots[1..]).exec_async(&mut anew).await.is_ok()
    })
    .await;
    until(async || matches!(client.mutex("a").try_lock().await, Ok(Some(_)))).await;
    assert!(!lost.is_held() || lost.renew().await.is_err());
}

/// As with the rights that the documents name: they are for a cluster's nodes.
#[tokio::test]
async fn other_server_that_does_not_tell_whether_it_is_of_the_cluster_is_not_used() {
    holder_keeps_its_lease_beside_another_server("+@all -cluster").await;
}

/// `rights`: those of the user at the other server.
async fn holder_keeps_its_lease_beside_another_server(rights: &str) {
    let mut cluster = Cluster::start();
    for node in &cluster.nodes {
        node.run(&["ACL", "SETUSER", "locks", "on", ">pass", "~*", "&*", "+@all"]);
    }
    let url = cluster.url().replace("://", "://locks:pass@");
    let client = Client::connect(&url).await.unwrap();
    let guard = client.mutex("a").ttl(Duration::from_secs(60)).lock().await.unwrap();
    let master = cluster.owner_of(slot(&cluster));
    until(async || cluster.nodes[master].query::<i64>(&["WAIT", "1", "100"]).is_ok_and(|count| count >= 1))
        .await;
    let (port, folder) = (cluster.nodes[master].port().to_string(), tempfile::tempdir().unwrap());
    cluster.nodes[master].stop();
    let other = std::process::Command::new("redis-server")
        // Otherwise the replica would take over its data, of which there is none.
        .args(["--rename-command", "PSYNC", "", "--rename-command", "SYNC", ""])
        .args("--user locks on >pass ~* &*".split(' ').chain(rights.split(' ')))
        .args(["--port", &port, "--bind", "127.0.0.1", "--save", "", "--dir"])
        .arg(folder.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let _other = Stopped(other);
    let stranger = redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap();
    let second = Client::connect(&url).await.unwrap();
    until(async || {
        let taken = second.mutex("a").try_lock().await;
        assert!(!matches!(taken, Ok(Some(_))), "{taken:?}");
        let renewed = guard.renew().await;
        assert!(guard.is_held(), "{renewed:?}");
        renewed.is_ok()
    })
    .await;
    let mut stranger = stranger.get_multiplexed_async_connection().await.unwrap();
    let keys: Vec<String> = redis::cmd("KEYS").arg("*mutex*").query_async(&mut stranger).await.unwrap();
    assert!(keys.is_empty(), "{keys:?}");
    guard.release().await.unwrap();
}

/// A node of a cluster, which has no slots yet.
fn new_node() -> Server {
    // One that loses its last slot stays a master.
    let stays = ("cluster-allow-replica-migration", "no");
    Server::builder().setting("cluster-enabled", "yes").setting(stays.0, stays.1).start()
}

/// One that has all slots.
async fn one_node_cluster() -> Server {
    let node = new_node();
    node.run(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    until(async || serves(&node)).await;
    node
}

fn serves(node: &Server) -> bool {
    node.query::<String>(&["CLUSTER", "INFO"]).is_ok_and(|info| info.contains("cluster_state:ok"))
}

fn id_of(node: &Server) -> String {
    node.query(&["CLUSTER", "MYID"]).unwrap()
}

/// Waits until each of these nodes has a map with all of them, and serves.
async fn until_agreed(nodes: &[&Server]) {
    // The fields of a node are followed by its slots.
    let has_slots = |line: &str, port: u16| {
        line.contains(&format!(":{port}@")) && line.split(' ').count() > 8 && !line.contains("handshake")
    };
    let knows = |node: &Server, other: &Server| {
        let nodes = node.query::<String>(&["CLUSTER", "NODES"]);
        nodes.is_ok_and(|nodes| nodes.lines().any(|line| has_slots(line, other.port())))
    };
    let agree = |node: &&Server| serves(node) && nodes.iter().all(|other| knows(node, other));
    until(async || nodes.iter().all(agree)).await;
}

/// Tells these nodes that `of` has the slots.
fn assign(slots: std::ops::Range<u16>, of: &Server, nodes: &[&Server]) -> redis::RedisResult<()> {
    let id = id_of(of);
    nodes.iter().try_for_each(|node| {
        let mut commands = redis::pipe();
        for slot in slots.clone() {
            commands.cmd("CLUSTER").arg("SETSLOT").arg(slot).arg("NODE").arg(&id);
        }
        commands.exec(&mut node.admin())
    })
}

/// As by `redis-cli --cluster del-node` and `add-node`: the node keeps its id.
#[tokio::test]
async fn node_that_has_joined_another_cluster_leads_no_client_there() {
    let mut nodes: Vec<Server> = (0..3).map(|_| new_node()).collect();
    // A client asks the connected nodes in the order of their ports.
    nodes.sort_by_key(Server::port);
    let ([left, one, two], other) = (<[Server; 3]>::try_from(nodes).ok().unwrap(), one_node_cluster().await);
    for (node, epoch, slots) in
        [(&left, "1", ["0", "999"]), (&one, "2", ["1000", "8999"]), (&two, "3", ["9000", "16383"])]
    {
        node.run(&["CLUSTER", "SET-CONFIG-EPOCH", epoch]);
        node.run(&["CLUSTER", "ADDSLOTSRANGE", slots[0], slots[1]]);
        node.run(&["CLUSTER", "MEET", "127.0.0.1", &left.port().to_string()]);
    }
    until_agreed(&[&left, &one, &two]).await;
    let name_in = |slots: std::ops::Range<u16>| {
        let is_there = |name: &String| {
            let key = format!("{{mutex:{name}}}");
            left.query(&["CLUSTER", "KEYSLOT", &key]).is_ok_and(|slot: u16| slots.contains(&slot))
        };
        (0..).map(|number: u32| number.to_string()).find(is_there).unwrap()
    };
    let (moved, held) = (name_in(0..999), name_in(1_000..9_000));
    let url = format!("redis-cluster://127.0.0.1:{}", one.port());
    let client = Client::connect(&url).await.unwrap();
    let holder = Client::connect(&url).await.unwrap();
    let guard = holder.mutex(held.as_str()).ttl(Duration::from_secs(60)).lock().await.unwrap();

    assign(0..1_000, &one, &[&one, &two]).unwrap();
    // A client may write its record meanwhile, and a node with keys keeps its slots.
    until(async || {
        left.run(&["FLUSHALL"]);
        assign(0..1_000, &one, &[&left]).is_ok()
    })
    .await;
    for node in [&one, &two] {
        node.run(&["CLUSTER", "FORGET", &id_of(&left)]);
    }
    let id = id_of(&left);
    left.run(&["CLUSTER", "RESET", "SOFT"]);
    assert_eq!(id_of(&left), id);
    other.run(&["CLUSTER", "MEET", "127.0.0.1", &left.port().to_string()]);
    until(async || {
        let knows = |node: &Server, id: &str| {
            node.query::<String>(&["CLUSTER", "NODES"]).is_ok_and(|nodes| nodes.contains(id))
        };
        knows(&other, &id) && knows(&left, &id_of(&other))
    })
    .await;
    assign(16_000..16_001, &left, &[&left, &other]).unwrap();
    until_agreed(&[&left, &other]).await;

    let granted = until_some(async || {
        let taken = client.mutex(held.as_str()).try_lock().await;
        assert!(!matches!(taken, Ok(Some(_))), "two holders: {taken:?}");
        client.mutex(moved.as_str()).try_lock().await.ok().flatten()
    })
    .await;
    let locks = |node: &Server| node.query::<Vec<String>>(&["KEYS", "*{mutex:*"]).unwrap();
    assert_eq!((locks(&left), locks(&other)), (Vec::new(), Vec::new()));
    assert_eq!(locks(&one).len(), 2);
    assert!(guard.is_held());
    granted.release().await.unwrap();
}

/// The address of a node that is gone belongs to a node of another cluster by now.
#[tokio::test]
async fn cluster_of_most_addresses_is_used_although_one_leads_to_another_cluster() {
    let cluster = Cluster::with_masters(&Server::builder(), 3, false);
    let other = one_node_cluster().await;
    let own: Vec<String> = cluster.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
    let stranger = format!("127.0.0.1:{}", other.port());
    for at in 0..=own.len() {
        let mut hosts = own.clone();
        hosts.insert(at, stranger.clone());
        let client = Client::connect(&format!("redis-cluster://{}", hosts.join(","))).await.unwrap();
        for name in ["a", "b", "c", "d", "e", "f"] {
            client.mutex(name).lock().await.unwrap().release().await.unwrap();
        }
        assert_eq!(other.query::<Vec<String>>(&["KEYS", "leasehold:4:clock*"]).unwrap(), [""; 0]);
    }
    // Half of them are not most of them.
    let url = format!("redis-cluster://{},{stranger}", own[0]);
    let error = Client::connect(&url).await.expect_err("they are of two clusters");
    assert!(error.to_string().contains("of different clusters"), "{error}");
}

/// The address of one belongs to a node of another cluster by now, which is nearer.
#[tokio::test]
async fn addresses_of_different_clusters_are_refused_although_one_is_far() {
    unless_paused(Duration::from_millis(100), async || {
        let (far, near) = (one_node_cluster().await, one_node_cluster().await);
        let proxy = Proxy::before(&far);
        let (far, near) = (proxy.port(), near.port());
        let urls =
            [(far, near), (near, far)].map(|(a, b)| format!("redis-cluster://127.0.0.1:{a},127.0.0.1:{b}"));
        for url in &urls {
            proxy.delay_replies(Duration::from_millis(200));
            let error = Client::connect(url).await.expect_err("they are of two clusters");
            assert!(error.to_string().contains("of different clusters"), "{error}");
            // One that is down is waited for only for a while.
            proxy.delay_replies(Duration::ZERO);
            proxy.hold_replies(true);
            let began = Instant::now();
            Client::connect(url).await.unwrap();
            assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
            proxy.hold_replies(false);
            proxy.release_held();
        }
    })
    .await;
}

/// The channels of hash slots are sharded since Redis 7: a client goes by the node that has the slot, and not by the one at which it was opened.
#[tokio::test]
async fn waiters_of_clients_from_before_an_upgrade_are_told_of_a_release() {
    let node = Server::builder().setting("cluster-enabled", "yes");
    let (old, new) = (node.clone().flavor(Flavor::Redis62).start(), node.flavor(Flavor::Redis7).start());
    let slots: Vec<String> = (0..16_384).map(|slot| slot.to_string()).collect();
    old.run(&["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str)).collect::<Vec<_>>());
    new.run(&["CLUSTER", "MEET", "127.0.0.1", &old.port().to_string()]);
    until(async || new.query::<()>(&["CLUSTER", "REPLICATE", &id_of(&old)]).is_ok()).await;
    until(async || serves(&old) && old.query::<i64>(&["WAIT", "1", "100"]) == Ok(1)).await;
    let url = |node: &Server| format!("redis-cluster://127.0.0.1:{}", node.port());
    let before = Client::connect(&url(&old)).await.unwrap();
    before.mutex("a").lock().await.unwrap().release().await.unwrap();
    new.run(&["CLUSTER", "FAILOVER", "TAKEOVER"]);
    until(async || serves(&new) && new.query::<(String, redis::Value, redis::Value)>(&["ROLE"]).is_ok())
        .await;
    let after = Client::connect(&url(&new)).await.unwrap();
    for (holder, waiter) in [(&before, &after), (&after, &before)] {
        let long = Duration::from_secs(600);
        let guard = until_some(async || holder.mutex("a").ttl(long).lock().await.ok()).await;
        let mutex = waiter.mutex("a").ttl(long);
        let waiting = tokio::spawn(async move { mutex.lock().await.unwrap() });
        until(async || after.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.waiters.len() == 1)).await;
        guard.release_timeout(SOON).await.unwrap();
        // Without a push it would ask when the lease would have ended, or after 25 s.
        let granted = timeout(Duration::from_secs(15), waiting).await.expect("it is told").unwrap();
        granted.release_timeout(SOON).await.unwrap();
    }
}

/// A master and one of its replicas are cut off from the other nodes, where another replica has become the master. Clients reach all of
/// them, and these two sooner than the others.
#[tokio::test]
async fn clients_leave_a_master_that_is_cut_off_with_one_of_its_replicas() {
    let node = Server::builder().flavor(Flavor::Valkey9).setting("enable-debug-command", "yes");
    let cluster = Cluster::of(&node);
    let old = cluster.owner_of(slot(&cluster));
    let others: Vec<usize> = (0..3).filter(|master| *master != old).collect();
    let (stale, new) = (cluster.replica_of(old), cluster.replica_of(others[0]));
    let far = [others[0], others[1], cluster.replica_of(others[1]), new].map(|number| &cluster.nodes[number]);
    let (old, stale, new) = (&cluster.nodes[old], &cluster.nodes[stale], &cluster.nodes[new]);
    new.run(&["CLUSTER", "REPLICATE", &id_of(old)]);
    // A new client connects to the master with the lowest port first.
    let mut proxies: Vec<Proxy> = (0..5).map(|_| Proxy::before(old)).collect();
    proxies.sort_by_key(Proxy::port);
    for (proxy, node) in proxies.iter().zip([old].into_iter().chain(far)) {
        proxy.redirect_to(node.port());
        node.run(&["CONFIG", "SET", "cluster-announce-port", &proxy.port().to_string()]);
    }
    let replicas = |node: &Server| {
        let nodes = node.query::<String>(&["CLUSTER", "NODES"]).unwrap();
        let of_old = nodes.lines().filter(|line| line.contains(&format!("slave {}", id_of(old)))).count();
        (of_old, proxies.iter().filter(|proxy| nodes.contains(&format!(":{}@", proxy.port()))).count())
    };
    until(async || cluster.nodes.iter().all(|node| replicas(node) == (2, 5) && serves(node))).await;
    until(async || old.query::<i64>(&["WAIT", "2", "100"]) == Ok(2)).await;

    // One that is connected to the old master only: its record, too, is in a slot of this one.
    let is_used =
        |node: &Server| node.query::<String>(&["CLIENT", "LIST"]).unwrap().contains("lib-name=leasehold");
    let client = until_some(async || {
        let client =
            Client::connect(&format!("redis-cluster://127.0.0.1:{}", proxies[0].port())).await.unwrap();
        client.mutex("a").lock().await.unwrap().release().await.unwrap();
        let is_recorded = async || old.query::<Vec<String>>(&["KEYS", "*client*"]).unwrap().len() == 1;
        let _ = timeout(Duration::from_secs(1), until(is_recorded)).await;
        let is_apart = !far.iter().any(|node| is_used(node)) && is_recorded().await;
        if is_apart {
            return Some(client);
        }
        client.close().await.unwrap();
        cluster.nodes[..3].iter().for_each(|master| drop(master.run(&["FLUSHALL"])));
        None
    })
    .await;

    proxies[1..].iter().for_each(|proxy| proxy.delay_replies(Duration::from_millis(20)));
    [old, stale].iter().for_each(|node| drop(node.run(&["DEBUG", "DROP-CLUSTER-PACKET-FILTER", "-2"])));
    until(async || far.iter().all(|node| serves(node)) && !serves(old) && !serves(stale)).await;

    until(async || client.mutex("a").try_lock().await.is_ok_and(|granted| granted.is_some())).await;
    // A new one compares the maps of its addresses.
    unless_paused(Duration::from_millis(100), async || {
        let seeds: Vec<String> =
            proxies[..3].iter().map(|proxy| format!("127.0.0.1:{}", proxy.port())).collect();
        let client = Client::connect(&format!("redis-cluster://{}", seeds.join(","))).await.unwrap();
        let scripts = || {
            let stats: String = old.query(&["INFO", "commandstats"]).unwrap();
            stats.lines().filter(|line| line.contains("evalsha")).map(str::to_owned).collect::<Vec<_>>()
        };
        let before = scripts();
        client.mutex("a").try_lock().await.unwrap();
        assert_eq!(scripts(), before, "the old master was not asked for it");
    })
    .await;
}

#[tokio::test]
async fn hung_cluster_node_delays_no_new_client() {
    let cluster = Cluster::start();
    let masters = &cluster.nodes[..3];
    unless_paused(Duration::from_millis(300), async || {
        // Any of them may be the first one that is asked.
        for hung in masters {
            hung.signal("STOP");
            let seed = masters.iter().find(|master| master.port() != hung.port()).unwrap();
            let began = Instant::now();
            let client = Client::connect(&format!("redis-cluster://127.0.0.1:{}", seed.port())).await;
            let took = began.elapsed();
            hung.signal("CONT");
            client.unwrap();
            assert!(took < Duration::from_secs(3), "{took:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn hung_cluster_node_delays_no_other_nodes_leases() {
    let cluster = Cluster::start();
    let attempt = async || other_leases_are_kept_while_a_node_hangs(&cluster).await;
    unless_paused(Duration::from_millis(300), attempt).await;
}

async fn other_leases_are_kept_while_a_node_hangs(cluster: &Cluster) {
    let client = Client::connect(&cluster.url()).await.unwrap();
    let mut names: Vec<_> = (0..30)
        .map(|number| format!("lock:{number}"))
        .map(|name| (cluster.node_of(&format!("{{mutex:{name}}}")), name))
        .collect();
    // Those of the node that hangs come last: when they have expired, the others have been renewed.
    names.sort_by_key(|(node, _)| *node == 0);
    let mut guards = Vec::new();
    for (node, name) in names {
        guards.push((node, client.mutex(name).ttl(Duration::from_secs(3)).lock().await.unwrap()));
    }
    let held = |node: usize| guards.iter().filter(|guard| guard.0 == node && guard.1.is_held()).count();
    let before = [held(1), held(2)];
    assert!(held(0) > 0, "this one has some");
    cluster.nodes[0].signal("STOP");
    until(async || held(0) == 0).await;
    let after = [held(1), held(2)];
    cluster.nodes[0].signal("CONT");
    assert_eq!(after, before, "the leases of the other nodes were renewed");
}

#[tokio::test]
async fn cluster_node_opened_as_server_is_used_as_its_cluster() {
    let cluster = Cluster::start();
    let url = format!("redis://127.0.0.1:{}", cluster.nodes[0].port());
    let client = Client::connect(&url).await.unwrap();
    let other = Client::connect(&cluster.url()).await.unwrap();
    for number in 0..20 {
        let (mine, theirs) = (client.mutex(format!("{number}")), other.mutex(format!("{number}")));
        let guard = theirs.lock().await.unwrap();
        let waiting = tokio::spawn(async move { mine.lock().await.unwrap() });
        let name = number.to_string();
        until(async || client.inspect(Kind::Mutex, &name).await.is_ok_and(|info| info.waiters.len() == 1))
            .await;
        guard.release().await.unwrap();
        timeout(SOON, waiting).await.unwrap().unwrap().release().await.unwrap();
    }
    // Replicas that have not replicated anything yet may not be named.
    assert!(client.diagnose().await.unwrap().components.len() > 3, "each master was diagnosed");
}

/// All slots on one server, as in many a test setup.
#[tokio::test]
async fn single_node_of_a_cluster_opened_as_server_serves_locks() {
    for flavor in [Flavor::Redis7, Flavor::Valkey9] {
        let server = Server::builder().flavor(flavor).setting("cluster-enabled", "yes").start();
        server.run(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
        until(async || {
            server.query::<String>(&["CLUSTER", "INFO"]).is_ok_and(|info| info.contains("cluster_state:ok"))
        })
        .await;
        let client = Client::connect(&server.url()).await.unwrap();
        for number in 0..20 {
            client.mutex(format!("{number}")).lock().await.unwrap().release().await.unwrap();
        }
    }
}

#[tokio::test]
async fn cluster_node_opened_with_resp2_gets_an_error_with_the_cluster_url() {
    let cluster = Cluster::start();
    let port = cluster.nodes[0].port();
    let client = Client::connect(&format!("redis://127.0.0.1:{port}?protocol=2")).await.unwrap();
    let mut errors = Vec::new();
    for number in 0..20 {
        errors.extend(client.mutex(format!("lock:{number}")).try_lock().await.err());
    }
    assert!(errors.iter().any(|error| error.to_string().contains("redis-cluster://")), "{errors:?}");
    let server = Server::on_port();
    let error = Client::connect(&format!("redis-cluster://127.0.0.1:{}", server.port())).await.unwrap_err();
    assert!(error.to_string().contains("is no cluster"), "{error}");
}

#[tokio::test]
async fn attempt_dropped_at_once_keeps_the_slot_subscription_retryable() {
    let cluster = Cluster::start();
    let holder = Client::connect(&cluster.url()).await.unwrap();
    for round in 0..12 {
        // Its first attempt in this slot is dropped while it is being sent.
        let client = Client::connect(&cluster.url()).await.unwrap();
        let guard = holder.mutex("a").ttl(Duration::from_secs(60)).lock().await.unwrap();
        let mutex = client.mutex("a");
        let dropped = tokio::spawn({
            let mutex = mutex.clone();
            async move { mutex.lock().await.map(drop) }
        });
        for _ in 0..round % 4 {
            tokio::task::yield_now().await;
        }
        dropped.abort();
        let waiting = tokio::spawn(async move { mutex.lock().await.unwrap() });
        until(async || holder.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.waiters.len() == 1))
            .await;
        guard.release().await.unwrap();
        let next = timeout(Duration::from_secs(15), waiting).await.expect("it hears of its grant").unwrap();
        next.release().await.unwrap();
    }
}

/// It waits in no queue, so that nothing but its own commands subscribes it.
#[tokio::test]
async fn holder_that_has_not_waited_is_told_of_a_forced_release() {
    let cluster = Cluster::start();
    let (one, admin) =
        (Client::connect(&cluster.url()).await.unwrap(), Client::connect(&cluster.url()).await.unwrap());
    let mutex = one.mutex("a").ttl(Duration::from_secs(600));
    let guard = mutex.try_lock().await.unwrap().expect("it is free");
    admin.force_release(Kind::Mutex, "a").await.unwrap();
    timeout(SOON, guard.lost()).await.expect("it is told before its renewal");
    drop(guard);
    // Over new connections, too: for commands, and for messages.
    for kind in ["normal", "pubsub"] {
        let guard = mutex.lock().await.unwrap();
        cluster.nodes.iter().for_each(|node| drop(node.run(&["CLIENT", "KILL", "TYPE", kind])));
        until(async || guard.renew().await.is_ok()).await;
        until(async || listens_again(&cluster)).await;
        until(async || admin.force_release(Kind::Mutex, "a").await.is_ok()).await;
        timeout(SOON, guard.lost()).await.expect("it is told over a new connection");
    }
}

/// Whether a client listens to the inbox of a slot.
fn listens_again(cluster: &Cluster) -> bool {
    let channels =
        |node: &Server| node.query::<Vec<String>>(&["PUBSUB", "SHARDCHANNELS"]).unwrap_or_default();
    cluster.nodes.iter().any(|node| !channels(node).is_empty())
}

/// The attempt and the subscription go over two connections: it may be queued, and its turn may come, before the client listens.
#[tokio::test]
async fn first_waiter_of_a_slot_asks_again_once_it_listens() {
    let cluster = Cluster::start();
    let (one, other) =
        (Client::connect(&cluster.url()).await.unwrap(), Client::connect(&cluster.url()).await.unwrap());
    let wait = |client: &Client| {
        let mutex = client.mutex("a").global_fifo().ttl(Duration::from_secs(600));
        tokio::spawn(async move { mutex.lock().await.unwrap() })
    };
    // No client holds it: a holder asks, too, when it is told that others wait.
    wait(&one).await.unwrap().detach().await.unwrap();
    let node = &cluster.nodes[cluster.node_of("{mutex:a}")];
    let attempts = || {
        let stats: String = node.query(&["INFO", "commandstats"]).unwrap();
        let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:"));
        let field = |name: &str| {
            let value = line?.split(',').find_map(|field| field.strip_prefix(name));
            value?.parse::<u32>().ok()
        };
        // The first one finds that the server does not know the script.
        field("calls=").unwrap_or(0) - field("failed_calls=").unwrap_or(0)
    };
    let mut waiters = Vec::new();
    for expected in [2, 1] {
        node.run(&["CONFIG", "RESETSTAT"]);
        waiters.push(wait(&other));
        until(async || attempts() >= expected).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(attempts(), expected);
    }
    one.force_release(Kind::Mutex, "a").await.unwrap();
    for waiter in waiters {
        timeout(SOON, waiter).await.unwrap().unwrap().release().await.unwrap();
    }
}
