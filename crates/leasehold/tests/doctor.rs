//! What the doctor says about real servers and files, and that what it says to set helps.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use leasehold::{Client, Examination, Finding, Severity, Subject};
use leasehold_testkit::{
    Builder, Certificates, Cluster, Flavor, LIMIT, Sentinels, Server, until, wait_until,
};

async fn examine(url: &str) -> Examination {
    let client = Client::connect(url).await.unwrap();
    client.examine().await.unwrap()
}

/// What is not fine, of all subjects or of those whose name begins like this.
fn troubles<'a>(examination: &'a Examination, subject: &str) -> Vec<&'a Finding> {
    let subjects = examination.subjects.iter().filter(|found| found.name.starts_with(subject));
    let findings = subjects.flat_map(|subject| &subject.findings);
    findings.filter(|finding| finding.severity != Severity::Fine).collect()
}

#[track_caller]
fn find<'a>(examination: &'a Examination, severity: Severity, what: &str) -> &'a Finding {
    let mut all = examination.subjects.iter().flat_map(|subject| &subject.findings);
    let found = all.find(|finding| finding.severity == severity && finding.what.contains(what));
    found.unwrap_or_else(|| panic!("no {severity} says {what:?}: {:?}", troubles(examination, "")))
}

#[track_caller]
fn fact(subject: &Subject, name: &str) -> String {
    let found = subject.facts.iter().find(|fact| fact.name == name);
    found.unwrap_or_else(|| panic!("{name} was not seen: {:?}", subject.facts)).value.clone()
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
async fn a_sound_server_of_any_make_has_nothing_to_mend() {
    for (flavor, version) in
        [(Flavor::Redis7, "Redis "), (Flavor::Redis62, "Redis 6.2"), (Flavor::Valkey9, "Valkey 9")]
    {
        let server = sound(flavor).start();
        for url in [server.url(), server.socket_url(), format!("{}?protocol=2", server.url())] {
            let examination = examine(&url).await;
            assert_eq!(troubles(&examination, ""), Vec::<&Finding>::new(), "{flavor:?}");
            let subject = &examination.subjects[0];
            assert!(fact(subject, "version").starts_with(version), "{:?}", subject.facts);
            assert!(fact(subject, "lock and release").ends_with("(the server's own count)"));
            fact(subject, "round trip");
            fact(subject, "clock");
        }
    }
}

#[tokio::test]
async fn the_doctor_leaves_nothing_behind_and_changes_nothing() {
    for flavor in Flavor::ALL {
        let server = sound(flavor).start();
        let client = Client::connect(&server.url()).await.unwrap();
        let guard = client.mutex("a").lock().await.unwrap();
        let before = traces(&server);
        client.examine().await.unwrap();
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
async fn what_the_doctor_says_to_set_helps() {
    for flavor in Flavor::ALL {
        let builder = Server::builder().flavor(flavor).setting("maxmemory-policy", "allkeys-lfu");
        let builder = builder.setting("timeout", "200").setting("tcp-keepalive", "0");
        let server = builder.start();
        let examination = examine(&server.url()).await;
        assert!(examination.is_dangerous());
        find(&examination, Severity::Danger, "maxmemory-policy is allkeys-lfu");
        find(&examination, Severity::Danger, "nothing is written to disk");
        find(&examination, Severity::Advice, "idle for 200 s");
        find(&examination, Severity::Advice, "tcp-keepalive is 0");
        for finding in troubles(&examination, "") {
            paste(&server, finding.remedy.as_ref().unwrap());
        }
        let examination = examine(&server.url()).await;
        assert_eq!(troubles(&examination, ""), Vec::<&Finding>::new(), "{flavor:?}");
    }
}

#[tokio::test]
async fn a_server_that_hides_its_settings_is_judged_by_what_it_shows() {
    let builder = Server::builder().setting("rename-command", "CONFIG \"\"");
    let server = builder.setting("maxmemory-policy", "volatile-lru").start();
    let examination = examine(&server.url()).await;
    find(&examination, Severity::Advice, "does not answer CONFIG GET");
    let finding = find(&examination, Severity::Danger, "maxmemory-policy is volatile-lru");
    assert_eq!(finding.remedy.as_deref(), Some("maxmemory-policy noeviction"), "a line for its file");
    find(&examination, Severity::Danger, "no append-only file");
}

#[tokio::test]
async fn a_memory_that_is_full_is_a_danger() {
    let server = sound(Flavor::Redis7).start();
    let client = Client::connect(&server.url()).await.unwrap();
    server.run(&["CONFIG", "SET", "maxmemory", "1"]);
    let examination = client.examine().await.unwrap();
    let finding = find(&examination, Severity::Danger, "could not be taken");
    assert!(finding.why.contains("raise maxmemory"), "{finding:?}");
    find(&examination, Severity::Advice, "% of maxmemory are in use");
}

#[tokio::test]
async fn slow_scripts_are_noticed_and_those_of_others_are_not() {
    let server = sound(Flavor::Redis7).start();
    server.run(&["CONFIG", "SET", "slowlog-log-slower-than", "0"]);
    server.run(&["EVAL", "return 1", "1", "somebody:else"]);
    let client = Client::connect(&server.url()).await.unwrap();
    assert_eq!(troubles(&client.examine().await.unwrap(), "server"), Vec::<&Finding>::new());
    client.mutex("a").lock().await.unwrap().release().await.unwrap();
    find(&client.examine().await.unwrap(), Severity::Advice, "of the slowest commands are leasehold's");
}

#[tokio::test]
async fn a_master_whose_replicas_need_not_know_is_noticed_and_so_is_a_replica() {
    let server = sound(Flavor::Redis7).setting("repl-diskless-sync-delay", "0").start();
    let master = format!("127.0.0.1 {}", server.port());
    let replica = sound(Flavor::Redis7).setting("replicaof", &master).start();
    wait_until("the replica follows", || {
        server.query::<String>(&["INFO", "replication"]).is_ok_and(|info| info.contains("state=online"))
    });
    let examination = examine(&server.url()).await;
    let finding = find(&examination, Severity::Advice, "min-replicas-to-write is 0");
    assert!(finding.why.contains("another holder"), "{finding:?}");
    paste(&server, finding.remedy.as_ref().unwrap());
    assert_eq!(troubles(&examine(&server.url()).await, ""), Vec::<&Finding>::new());
    server.run(&["CONFIG", "SET", "min-replicas-to-write", "2"]);
    find(&examine(&server.url()).await, Severity::Danger, "fewer replicas follow");

    let examination = examine(&replica.url()).await;
    find(&examination, Severity::Danger, "this server is a replica");
    assert!(fact(&examination.subjects[0], "role").ends_with(&server.port().to_string()));
}

#[tokio::test]
async fn sentinels_are_asked_and_all_servers_that_may_become_the_master_are_looked_at() {
    let mut sentinels = Sentinels::of(&sound(Flavor::Redis7), &Server::builder());
    let url = sentinels.url(Sentinels::SERVICE);
    let examination = examine(&url).await;
    let servers = examination.subjects.iter().filter(|subject| subject.name.starts_with("server"));
    assert_eq!(servers.count(), 3, "{:?}", examination.subjects);
    assert_eq!(troubles(&examination, "sentinels"), Vec::<&Finding>::new());
    let subject = examination.subjects.iter().find(|subject| subject.name.starts_with("sentinels")).unwrap();
    assert_eq!((fact(subject, "sentinels"), fact(subject, "quorum")), ("3".to_owned(), "2".to_owned()));
    let finding = find(&examination, Severity::Danger, "min-replicas-to-write is 0");
    for server in &sentinels.servers {
        paste(server, finding.remedy.as_ref().unwrap());
    }
    assert!(!examine(&url).await.is_dangerous());

    let examination = examine(&sentinels.master().url()).await;
    find(&examination, Severity::Danger, "sentinels watch this server");

    sentinels.sentinels[0].stop();
    find(&examine(&url).await, Severity::Advice, "could not be asked");
    sentinels.sentinels[1].stop();
    wait_until("the last sentinel misses the others", || {
        let asked = sentinels.sentinels[2].query::<String>(&["SENTINEL", "CKQUORUM", Sentinels::SERVICE]);
        asked.is_err_and(|error| error.to_string().contains("NOQUORUM"))
    });
    find(&examine(&url).await, Severity::Danger, "could not replace the master");
}

#[tokio::test]
async fn every_node_of_a_cluster_is_looked_at_and_leaves_nothing() {
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
        let before: Vec<_> = cluster.nodes.iter().map(|node| traces(node).0).collect();
        let examination = client.examine().await.unwrap();
        let after: Vec<_> = cluster.nodes.iter().map(|node| traces(node).0).collect();
        assert_eq!(before, after);
        assert_eq!(examination.subjects.len(), 7, "six nodes and the cluster: {:?}", examination.subjects);
        assert_eq!(troubles(&examination, "cluster"), Vec::<&Finding>::new());
        for finding in troubles(&examination, "server") {
            assert_eq!(finding.what, "min-replicas-to-write is 0");
        }
        for node in &cluster.nodes {
            paste(node, "CONFIG SET min-replicas-to-write 1");
        }
        let examination = client.examine().await.unwrap();
        assert_eq!(troubles(&examination, ""), Vec::<&Finding>::new(), "{flavor:?}");
        let costs = examination.subjects.iter().flat_map(|subject| &subject.facts);
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
        let examination = client.examine().await.unwrap();
        find(&examination, Severity::Danger, "the cluster is down for");
        find(&examination, Severity::Danger, "1 hash slots have no master");
        let dead = cluster.replica_of(1);
        cluster.nodes[dead].stop();
        find(&client.examine().await.unwrap(), Severity::Advice, "could not be looked at");
    }
}

#[tokio::test]
async fn a_server_with_tls_and_a_password_can_be_examined() {
    let files = Certificates::new();
    let server = sound(Flavor::Redis7).tls(&files.server, &files.authority).password("secret").start();
    let url = format!("{}?ca={}", server.url(), files.authority.display());
    let examination = examine(&url).await;
    assert_eq!(troubles(&examination, ""), Vec::<&Finding>::new());
    assert!(!format!("{examination:?}").contains("secret"));
}

#[tokio::test]
async fn a_connection_of_the_caller_s_own_can_be_examined() {
    let server = sound(Flavor::Redis7).start();
    let own = redis::Client::open(server.url()).unwrap();
    let examination = Client::connect_with(own).await.unwrap().examine().await.unwrap();
    assert_eq!(troubles(&examination, ""), Vec::<&Finding>::new());
    assert_eq!(examination.subjects[0].name, format!("server 127.0.0.1:{}", server.port()));
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_an_error() {
    let server = Server::on_port();
    let client = Client::connect(&server.url()).await.unwrap();
    server.signal("STOP");
    let error = client.examine().await.unwrap_err();
    server.signal("CONT");
    assert!(error.is_unavailable() && error.to_string().contains("no answer within"), "{error}");
}

#[tokio::test]
async fn a_file_is_checked_and_told_where_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let url = format!("sqlite:{}", path.display());
    let client = Client::connect(&url).await.unwrap();
    let guard = client.mutex("a").lock().await.unwrap();
    let examination = client.examine().await.unwrap();
    let [subject] = &examination.subjects[..] else { panic!("{examination:?}") };
    assert_eq!(subject.name, format!("file {}", path.canonicalize().unwrap().display()));
    find(&examination, Severity::Fine, "the file is whole");
    assert_eq!(fact(subject, "synchronous"), "normal");
    assert!(guard.is_held());
}

#[tokio::test]
async fn a_damaged_file_is_a_danger() {
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
    let examination = client.examine().await.unwrap();
    find(&examination, Severity::Danger, "the file is damaged");
}

#[tokio::test]
async fn the_store_of_one_process_says_so() {
    let examination = examine("memory:").await;
    assert!(!examination.is_dangerous());
    find(&examination, Severity::Fine, "in this process");
    let client = leasehold::blocking::Client::connect("memory:").unwrap();
    assert_eq!(client.examine().unwrap().subjects.len(), 1);
}

#[tokio::test]
async fn servers_that_vote_are_looked_at_one_by_one_and_together() {
    let servers: Vec<Server> = (0..3).map(|_| Server::on_port()).collect();
    let hosts = |which: &[usize]| {
        let hosts: Vec<String> =
            which.iter().map(|at| format!("127.0.0.1:{}", servers[*at].port())).collect();
        format!("redlock://{}", hosts.join(","))
    };
    let examination = examine(&format!("{}?longest_ttl_ms=300", hosts(&[0, 1, 2]))).await;
    assert_eq!(examination.subjects.len(), 4);
    find(&examination, Severity::Fine, "the nodes are independent");
    assert_eq!(fact(&examination.subjects[0], "nodes"), "3, of which 2 have to agree");
    assert!(!examination.is_dangerous(), "{:?}", troubles(&examination, ""));

    // Without that a restart is forgotten at once.
    let examination = examine(&hosts(&[0, 1, 2])).await;
    find(&examination, Severity::Danger, "nothing is written to disk");

    let port = servers[0].port().to_string();
    servers[1].run(&["REPLICAOF", "127.0.0.1", &port]);
    until(async || {
        let info: String = servers[1].query(&["INFO", "replication"]).unwrap();
        info.contains("master_link_status:up")
    })
    .await;
    let examination = examine(&hosts(&[0, 1, 2])).await;
    find(&examination, Severity::Danger, "are replicas of one another");
    find(&examination, Severity::Danger, "this server is a replica");
}
