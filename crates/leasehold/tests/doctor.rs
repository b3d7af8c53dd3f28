//! What the doctor says about real servers and files, and that what it says to set helps.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use leasehold::{Client, Component, Diagnosis, Finding, Severity};
use leasehold_testkit::{
    Builder, Certificates, Cluster, Flavor, LIMIT, Sentinels, Server, until, wait_until,
};

async fn diagnose(url: &str) -> Diagnosis {
    let client = Client::connect(url).await.unwrap();
    client.diagnose().await.unwrap()
}

/// What is not fine, of all components or of those whose name begins like this. The time of the test lock depends on what else runs.
fn problems<'a>(diagnosis: &'a Diagnosis, component: &str) -> Vec<&'a Finding> {
    let components = diagnosis.components.iter().filter(|found| found.name.starts_with(component));
    let findings = components.flat_map(|component| &component.findings);
    findings.filter(|finding| finding.severity != Severity::Fine && finding.id != "lock-cost").collect()
}

#[track_caller]
fn find<'a>(diagnosis: &'a Diagnosis, severity: Severity, what: &str) -> &'a Finding {
    let mut all = diagnosis.components.iter().flat_map(|component| &component.findings);
    let found = all.find(|finding| finding.severity == severity && finding.what.contains(what));
    found.unwrap_or_else(|| panic!("no {severity} says {what:?}: {:?}", problems(diagnosis, "")))
}

#[track_caller]
fn fact(component: &Component, name: &str) -> String {
    let found = component.facts.iter().find(|fact| fact.name == name);
    found.unwrap_or_else(|| panic!("{name} was not seen: {:?}", component.facts)).value.clone()
}

/// A server that forgets nothing. What is slow on a busy machine says nothing about it.
fn sound(flavor: Flavor) -> Builder {
    let builder = Server::builder().flavor(flavor).setting("slowlog-log-slower-than", "-1");
    builder.setting("appendonly", "yes").setting("appendfsync", "always")
}

/// Pastes what a finding says into the server's console.
fn paste(server: &Server, remedy: &str) {
    server.run(&remedy.split(' ').collect::<Vec<_>>());
}

/// Everything that could be left behind.
fn traces(server: &Server) -> (Vec<String>, Vec<String>, BTreeMap<String, String>) {
    let mut keys: Vec<String> = server.query(&["KEYS", "*"]).unwrap();
    keys.sort();
    (keys, server.query(&["PUBSUB", "CHANNELS"]).unwrap(), server.query(&["CONFIG", "GET", "*"]).unwrap())
}

#[tokio::test]
async fn well_configured_server_has_no_findings() {
    for (flavor, version) in [
        (Flavor::Redis7, "Redis "),
        (Flavor::Redis62, "Redis 6.2"),
        (Flavor::Valkey9, "Valkey 9"),
        (Flavor::Redis86, "Redis 8.6"),
    ] {
        let server = sound(flavor).start();
        for url in [server.url(), server.socket_url(), format!("{}?protocol=2", server.url())] {
            let diagnosis = diagnose(&url).await;
            assert_eq!(problems(&diagnosis, ""), Vec::<&Finding>::new(), "{flavor:?}");
            let component = &diagnosis.components[0];
            assert!(fact(component, "version").starts_with(version), "{:?}", component.facts);
            assert!(fact(component, "lock and release").ends_with("(the server's own count)"));
            fact(component, "round trip");
            fact(component, "clock");
        }
    }
}

#[tokio::test]
async fn diagnose_leaves_nothing_and_changes_nothing() {
    for flavor in Flavor::ALL {
        let server = sound(flavor).start();
        let client = Client::connect(&server.url()).await.unwrap();
        let guard = client.mutex("a").lock().await.unwrap();
        let before = traces(&server);
        client.diagnose().await.unwrap();
        // Its connection ends on this thread.
        let give_up = Instant::now() + LIMIT;
        while traces(&server) != before {
            assert!(Instant::now() < give_up, "{flavor:?}: {:?} instead of {before:?}", traces(&server));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(guard.is_held());
    }
}

#[tokio::test]
async fn lead_and_loss_of_the_clock_of_tokens_are_reported() {
    const CLOCK: &str = "leasehold:4:clock";
    const HOUR: u64 = 3_600_000;
    let server = sound(Flavor::Redis7).start();
    let client = Client::connect(&server.url()).await.unwrap();
    let guard = client.mutex("a").lock().await.unwrap();
    assert_eq!(fact(&diagnose(&server.url()).await.components[0], "clock of tokens"), "follows the server's");
    server.run(&["DEL", CLOCK]);
    find(&diagnose(&server.url()).await, Severity::Advice, "clock of tokens is missing");
    // The test lock has made a new one.
    assert_eq!(problems(&diagnose(&server.url()).await, ""), Vec::<&Finding>::new());
    let (seconds, _): (u64, u64) = server.query(&["TIME"]).unwrap();
    for (ahead, severity) in [(HOUR, Severity::Advice), (100 * 24 * HOUR, Severity::Danger)] {
        let id = format!("{}-0", seconds * 1_000 + ahead);
        server.run(&["XADD", CLOCK, "MAXLEN", "0", &id, "t", ""]);
        find(&diagnose(&server.url()).await, severity, "ahead of the server's");
    }
    // Beyond the last token.
    server.run(&["XADD", CLOCK, "MAXLEN", "0", "5000000000000-0", "t", ""]);
    let diagnosis = diagnose(&server.url()).await;
    let finding = find(&diagnosis, Severity::Danger, "test lock could not be acquired");
    assert!(finding.why.contains(CLOCK), "{finding:?}");
    drop(guard);
}

#[tokio::test]
async fn remedies_of_doctor_resolve_the_findings() {
    for flavor in Flavor::ALL {
        let builder = Server::builder().flavor(flavor).setting("maxmemory-policy", "allkeys-lfu");
        let builder = builder.setting("timeout", "200").setting("tcp-keepalive", "0");
        let server = builder.start();
        let diagnosis = diagnose(&server.url()).await;
        assert!(diagnosis.is_dangerous());
        find(&diagnosis, Severity::Danger, "maxmemory-policy is allkeys-lfu");
        find(&diagnosis, Severity::Danger, "nothing is written to disk");
        find(&diagnosis, Severity::Advice, "after 200 s");
        find(&diagnosis, Severity::Advice, "tcp-keepalive is 0");
        for finding in problems(&diagnosis, "") {
            paste(&server, finding.remedy.as_ref().unwrap());
        }
        let diagnosis = diagnose(&server.url()).await;
        assert_eq!(problems(&diagnosis, ""), Vec::<&Finding>::new(), "{flavor:?}");
    }
}

#[tokio::test]
async fn server_without_config_access_is_judged_by_info() {
    let builder = Server::builder().setting("rename-command", "CONFIG \"\"");
    let server = builder.setting("maxmemory-policy", "volatile-lru").start();
    let diagnosis = diagnose(&server.url()).await;
    find(&diagnosis, Severity::Advice, "does not answer CONFIG GET");
    let finding = find(&diagnosis, Severity::Danger, "maxmemory-policy is volatile-lru");
    assert_eq!(finding.remedy.as_deref(), Some("maxmemory-policy noeviction"), "a line for its file");
    find(&diagnosis, Severity::Danger, "no append-only file");
}

#[tokio::test]
async fn full_memory_is_a_danger() {
    let server = sound(Flavor::Redis7).start();
    let client = Client::connect(&server.url()).await.unwrap();
    server.run(&["CONFIG", "SET", "maxmemory", "1"]);
    let diagnosis = client.diagnose().await.unwrap();
    let finding = find(&diagnosis, Severity::Danger, "could not be acquired");
    assert!(finding.why.contains("raise maxmemory"), "{finding:?}");
    find(&diagnosis, Severity::Advice, "% of maxmemory is in use");
}

#[tokio::test]
async fn only_slow_scripts_of_leasehold_are_reported() {
    let server = sound(Flavor::Redis7).start();
    server.run(&["CONFIG", "SET", "slowlog-log-slower-than", "0"]);
    server.run(&["EVAL", "return 1", "1", "somebody:else"]);
    let client = Client::connect(&server.url()).await.unwrap();
    assert_eq!(problems(&client.diagnose().await.unwrap(), "server"), Vec::<&Finding>::new());
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    find(&client.diagnose().await.unwrap(), Severity::Advice, "of the slowest commands are leasehold's");
}

#[tokio::test]
async fn master_without_min_replicas_and_a_replica_are_reported() {
    let server = sound(Flavor::Redis7).setting("repl-diskless-sync-delay", "0").start();
    let master = format!("127.0.0.1 {}", server.port());
    let replica = sound(Flavor::Redis7).setting("replicaof", &master).start();
    wait_until("the replica follows", || {
        server.query::<String>(&["INFO", "replication"]).is_ok_and(|info| info.contains("state=online"))
    });
    let diagnosis = diagnose(&server.url()).await;
    let finding = find(&diagnosis, Severity::Advice, "min-replicas-to-write is 0");
    assert!(finding.why.contains("a second holder"), "{finding:?}");
    paste(&server, finding.remedy.as_ref().unwrap());
    assert_eq!(problems(&diagnose(&server.url()).await, ""), Vec::<&Finding>::new());
    server.run(&["CONFIG", "SET", "min-replicas-to-write", "2"]);
    find(&diagnose(&server.url()).await, Severity::Danger, "fewer replicas follow");

    let diagnosis = diagnose(&replica.url()).await;
    find(&diagnosis, Severity::Danger, "this server is a replica");
    assert!(fact(&diagnosis.components[0], "role").ends_with(&server.port().to_string()));
}

#[tokio::test]
async fn sentinels_and_every_possible_master_are_diagnosed() {
    let mut sentinels = Sentinels::of(&sound(Flavor::Redis7), &Server::builder());
    let url = sentinels.url(Sentinels::SERVICE);
    let diagnosis = diagnose(&url).await;
    let servers = diagnosis.components.iter().filter(|component| component.name.starts_with("server"));
    assert_eq!(servers.count(), 3, "{:?}", diagnosis.components);
    assert_eq!(problems(&diagnosis, "sentinels"), Vec::<&Finding>::new());
    let component =
        diagnosis.components.iter().find(|component| component.name.starts_with("sentinels")).unwrap();
    assert_eq!((fact(component, "sentinels"), fact(component, "quorum")), ("3".to_owned(), "2".to_owned()));
    let finding = find(&diagnosis, Severity::Danger, "min-replicas-to-write is 0");
    for server in &sentinels.servers {
        paste(server, finding.remedy.as_ref().unwrap());
    }
    assert!(!diagnose(&url).await.is_dangerous());

    let diagnosis = diagnose(&sentinels.master().url()).await;
    find(&diagnosis, Severity::Danger, "sentinels watch this server");

    sentinels.sentinels[0].stop();
    find(&diagnose(&url).await, Severity::Advice, "did not answer");
    sentinels.sentinels[1].stop();
    wait_until("the last sentinel misses the others", || {
        let asked = sentinels.sentinels[2].query::<String>(&["SENTINEL", "CKQUORUM", Sentinels::SERVICE]);
        asked.is_err_and(|error| error.to_string().contains("NOQUORUM"))
    });
    find(&diagnose(&url).await, Severity::Danger, "could not replace the master");
}

#[tokio::test]
async fn every_cluster_node_is_diagnosed_without_a_trace() {
    for flavor in [Flavor::Redis7, Flavor::Redis62] {
        let mut cluster = Cluster::of(&sound(flavor));
        let client = Client::connect(&cluster.url()).await.unwrap();
        for number in 0..20 {
            client.mutex(format!("lock:{number}")).lock().await.unwrap().release().await.unwrap();
        }
        // Who has not replicated anything is not named.
        wait_until("the nodes name all replicas", || {
            cluster.nodes.iter().all(|node| {
                let slots: Vec<Vec<redis::Value>> = node.query(&["CLUSTER", "SLOTS"]).unwrap();
                slots.len() == 3 && slots.iter().all(|entry| entry.len() == 4)
            })
        });
        // The measured locks move the clock of their slot, like any lock.
        let traces_of =
            |node| traces(node).0.into_iter().filter(|key| !key.contains(":clock")).collect::<Vec<_>>();
        let before: Vec<_> = cluster.nodes.iter().map(traces_of).collect();
        let diagnosis = client.diagnose().await.unwrap();
        let after: Vec<_> = cluster.nodes.iter().map(traces_of).collect();
        assert_eq!(before, after);
        assert_eq!(diagnosis.components.len(), 7, "six nodes and the cluster: {:?}", diagnosis.components);
        assert_eq!(problems(&diagnosis, "cluster"), Vec::<&Finding>::new());
        for finding in problems(&diagnosis, "server") {
            assert_eq!(finding.what, "min-replicas-to-write is 0");
        }
        for node in &cluster.nodes {
            paste(node, "CONFIG SET min-replicas-to-write 1");
        }
        let diagnosis = client.diagnose().await.unwrap();
        assert_eq!(problems(&diagnosis, ""), Vec::<&Finding>::new(), "{flavor:?}");
        let costs = diagnosis.components.iter().flat_map(|component| &component.facts);
        assert_eq!(costs.filter(|fact| fact.name == "lock and release").count(), 3, "of each master");

        for node in &cluster.nodes {
            paste(node, "CONFIG SET min-replicas-to-write 0");
        }
        for node in &cluster.nodes {
            node.run(&["CLUSTER", "DELSLOTS", "7"]);
        }
        wait_until("every node has noticed", || {
            cluster.nodes.iter().all(|node| {
                let info = node.query::<String>(&["CLUSTER", "INFO"]);
                info.is_ok_and(|info| info.contains("cluster_state:fail"))
            })
        });
        let diagnosis = client.diagnose().await.unwrap();
        find(&diagnosis, Severity::Danger, "the cluster is down for");
        find(&diagnosis, Severity::Danger, "1 hash slots have no master");
        let dead = cluster.replica_of(1);
        cluster.nodes[dead].stop();
        find(&client.diagnose().await.unwrap(), Severity::Advice, "could not be examined");
    }
}

#[tokio::test]
async fn server_with_tls_and_a_password_can_be_diagnosed() {
    let files = Certificates::new();
    let server = sound(Flavor::Redis7).tls(&files.server, &files.authority).password("secret").start();
    let url = format!("{}?ca={}", server.url(), files.authority.display());
    let diagnosis = diagnose(&url).await;
    assert_eq!(problems(&diagnosis, ""), Vec::<&Finding>::new());
    assert!(!format!("{diagnosis:?}").contains("secret"));
}

#[tokio::test]
async fn client_from_a_redis_client_can_be_diagnosed() {
    let server = sound(Flavor::Redis7).start();
    let own = redis::Client::open(server.url()).unwrap();
    let diagnosis = Client::from_redis_client(own).await.unwrap().diagnose().await.unwrap();
    assert_eq!(problems(&diagnosis, ""), Vec::<&Finding>::new());
    assert_eq!(diagnosis.components[0].name, format!("server 127.0.0.1:{}", server.port()));
}

#[tokio::test]
async fn unresponsive_server_is_an_error() {
    let server = Server::on_port();
    let client = Client::connect(&server.url()).await.unwrap();
    server.signal("STOP");
    let error = client.diagnose().await.unwrap_err();
    server.signal("CONT");
    assert!(error.is_unavailable() && error.to_string().contains("no answer within"), "{error}");
}

#[tokio::test]
async fn file_is_diagnosed_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let url = format!("sqlite:{}", path.display());
    let client = Client::connect(&url).await.unwrap();
    let guard = client.mutex("a").lock().await.unwrap();
    let diagnosis = client.diagnose().await.unwrap();
    let [component] = &diagnosis.components[..] else { panic!("{diagnosis:?}") };
    assert_eq!(component.name, format!("file {}", path.canonicalize().unwrap().display()));
    find(&diagnosis, Severity::Fine, "the file is whole");
    assert_eq!(fact(component, "synchronous"), "normal");
    assert!(guard.is_held());
}

#[tokio::test]
async fn damaged_file_is_a_danger() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let client = Client::connect(&format!("sqlite:{}", path.display())).await.unwrap();
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    {
        // What is still in the log would hide the damage.
        let connection = rusqlite::Connection::open(&path).unwrap();
        connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    }
    let mut bytes = std::fs::read(&path).unwrap();
    // Beyond the first page, which says what is where.
    bytes[1_024..].fill(0x5a);
    std::fs::write(&path, bytes).unwrap();
    let diagnosis = client.diagnose().await.unwrap();
    find(&diagnosis, Severity::Danger, "the file is damaged");
}

#[tokio::test]
async fn memory_store_is_named_as_such() {
    let diagnosis = diagnose("memory:").await;
    assert!(!diagnosis.is_dangerous());
    find(&diagnosis, Severity::Fine, "in this process");
    let client = leasehold::blocking::Client::connect("memory:").unwrap();
    assert_eq!(client.diagnose().unwrap().components.len(), 1);
}

#[tokio::test]
async fn voting_servers_are_diagnosed_singly_and_as_a_quorum() {
    let servers: Vec<Server> = (0..3).map(|_| Server::on_port()).collect();
    let hosts = |which: &[usize]| {
        let hosts: Vec<String> =
            which.iter().map(|at| format!("127.0.0.1:{}", servers[*at].port())).collect();
        format!("redlock://{}", hosts.join(","))
    };
    let diagnosis = diagnose(&format!("{}?max_ttl_ms=300", hosts(&[0, 1, 2]))).await;
    assert_eq!(diagnosis.components.len(), 4);
    find(&diagnosis, Severity::Fine, "the nodes are independent");
    assert_eq!(fact(&diagnosis.components[0], "nodes"), "3, of which 2 must agree");
    assert!(!diagnosis.is_dangerous(), "{:?}", problems(&diagnosis, ""));

    // Without that a restart is forgotten at once.
    let diagnosis = diagnose(&hosts(&[0, 1, 2])).await;
    find(&diagnosis, Severity::Danger, "nothing is written to disk");

    let port = servers[0].port().to_string();
    servers[1].run(&["REPLICAOF", "127.0.0.1", &port]);
    until(async || {
        let info: String = servers[1].query(&["INFO", "replication"]).unwrap();
        info.contains("master_link_status:up")
    })
    .await;
    let diagnosis = diagnose(&hosts(&[0, 1, 2])).await;
    find(&diagnosis, Severity::Danger, "are replicas of one another");
    find(&diagnosis, Severity::Danger, "this server is a replica");
}

#[tokio::test]
async fn locks_of_other_libraries_are_named() {
    let server = sound(Flavor::Redis7).start();
    let before = diagnose(&server.url()).await;
    assert!(before.components[0].facts.iter().all(|fact| fact.name != "locks of other libraries"));
    server.run(&["HSET", "jobs", "9557684a-c856-4883-9094-904228b43691:27", "1"]);
    server.run(&["PEXPIRE", "jobs", "60000"]);
    server.run(&["HSET", "money", "9557684a-c856-4883-9094-904228b43691:27", "1"]);
    server.run(&["PEXPIRE", "money", "60000"]);
    server.run(&["SET", "redisson_lock_token:{money}", "7"]);
    server.run(&["HSET", "prices", "mode", "read", "9557684a-c856-4883-9094-904228b43691:27", "1"]);
    server.run(&["PEXPIRE", "prices", "60000"]);
    server.run(&["SET", "report", "UcCWk/JMjsVw3kqcyKZanQ==", "PX", "60000"]);
    server.run(&["SET", "session", "UcCWk/JMjsVw3kqcyKZanQ=="]);
    let diagnosis = diagnose(&server.url()).await;
    let shown = fact(&diagnosis.components[0], "locks of other libraries");
    let mut shown: Vec<&str> = shown.split("), ").map(|lock| lock.trim_end_matches(')')).collect();
    shown.sort_unstable();
    let expected = [
        "\"jobs\" (like Redisson RLock",
        "\"money\" (like Redisson RFencedLock",
        "\"prices\" (like Redisson RReadWriteLock",
        "\"report\" (like redsync",
    ];
    assert_eq!(shown, expected);
    find(&diagnosis, Severity::Fine, "look like locks of other libraries");
    assert!(problems(&diagnosis, "").is_empty());
}
