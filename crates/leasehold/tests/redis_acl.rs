//! Users with exactly the rights that docs/operations.md names.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::{Client, Kind, Severity};
use leasehold_testkit::{Cluster, Flavor, Sentinels, Server, unless_paused, until};
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(20);

const DOCUMENT: &str = include_str!("../guide/operations.md");

const PASSWORD: &str = "a-long-password";

/// The first line of the document with this word in it that sets a user up.
fn rule(word: &str) -> Vec<&'static str> {
    let mut lines = DOCUMENT.lines().filter(|line| line.starts_with("ACL SETUSER "));
    let line = lines.find(|line| line.split(' ').any(|part| part == word));
    line.unwrap_or_else(|| panic!("no line has {word}")).split(' ').collect()
}

/// What is needed everywhere, and then also in a cluster.
fn locks() -> Vec<&'static str> {
    with_password(rule("+evalsha"))
}

/// As `locks`, with what this version knows in addition.
fn locks_of(flavor: Flavor) -> Vec<&'static str> {
    let mut words = locks();
    let delete = match flavor {
        Flavor::Valkey9 => "+delifeq",
        Flavor::Redis86 => "+delex",
        _ => return words,
    };
    words.extend(rule(delete).into_iter().filter(|word| word.starts_with('+')));
    words
}

fn with_password(rule: Vec<&'static str>) -> Vec<&'static str> {
    rule.into_iter().map(|word| if word == ">PASSWORD" { ">a-long-password" } else { word }).collect()
}

fn url(server: &Server) -> String {
    format!("redis://locks:{PASSWORD}@127.0.0.1:{}", server.port())
}

/// What the user was refused, apart from what the client library asks for.
fn refused(server: &Server) -> Vec<String> {
    let log: Vec<redis::Value> = server.query(&["ACL", "LOG"]).unwrap();
    let entries = log.iter().map(|entry| {
        redis::from_redis_value_ref::<std::collections::HashMap<String, redis::Value>>(entry).unwrap()
    });
    let objects = entries.map(|entry| redis::from_redis_value_ref::<String>(&entry["object"]).unwrap());
    objects
        .filter(|object| !["client|setinfo", "client|tracking", "client"].contains(&object.as_str()))
        .collect()
}

/// Everything that a client does.
async fn use_everything(url: &str) {
    let (one, other) = (Client::connect(url).await.unwrap(), Client::connect(url).await.unwrap());
    let guard = one.mutex("a").lock().await.unwrap();
    assert!(other.mutex("a").try_lock().await.unwrap().is_none());
    let mutex = other.mutex("a");
    let waiting = tokio::spawn(async move { mutex.lock().await.unwrap() });
    until(async || one.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.waiters.len() == 1)).await;
    assert_eq!(one.list().await.unwrap().len(), 1);
    guard.renew().await.unwrap();
    guard.release().await.unwrap();
    let next = timeout(SOON, waiting).await.unwrap().unwrap();
    next.renew().await.unwrap();
    assert_eq!(one.force_release(Kind::Mutex, "a").await.unwrap().len(), 1);

    let semaphore = one.semaphore("s", 3);
    let permits = [semaphore.acquire(1).await.unwrap(), semaphore.acquire(1).await.unwrap()];
    assert!(other.semaphore("s", 3).try_acquire(2).await.unwrap().is_none());
    drop(permits);
    let reader = one.rw_lock("r").read().await.unwrap();
    let lock = other.rw_lock("r");
    let writer = tokio::spawn(async move { lock.write().await.unwrap() });
    until(async || one.inspect(Kind::ReadWrite, "r").await.is_ok_and(|view| view.waiters.len() == 1)).await;
    reader.release().await.unwrap();
    timeout(SOON, writer).await.unwrap().unwrap().release().await.unwrap();
    let owner = one.reentrant_mutex("o", "me");
    let guards = [owner.lock().await.unwrap(), owner.lock().await.unwrap()];
    drop(guards);
    let impatient = one.mutex("a").lock_timeout(Duration::from_millis(1)).await.unwrap();
    drop(impatient);
    one.close().await.unwrap();
    other.close().await.unwrap();
}

#[tokio::test]
async fn documented_rights_suffice_for_every_command() {
    for flavor in Flavor::WITH_NEWEST {
        let server = Server::builder().flavor(flavor).start();
        server.run(&locks_of(flavor));
        use_everything(&url(&server)).await;
        use_everything(&format!("{}?protocol=2", url(&server))).await;
        assert_eq!(refused(&server), Vec::<String>::new(), "{flavor:?}");
        let error = Client::connect(&format!("{}/1", url(&server))).await.unwrap_err();
        assert!(format!("{error:#}").contains("'select'"), "{error:#}");
        server.run(&["ACL", "LOG", "RESET"]);
        server.run(&rule("+select"));
        use_everything(&format!("{}/1", url(&server))).await;
        assert_eq!(refused(&server), Vec::<String>::new(), "{flavor:?}");
    }
}

#[tokio::test]
async fn documented_rights_suffice_in_a_cluster() {
    for (flavor, words) in
        [(Flavor::Redis7, &["+asking", "+ssubscribe"][..]), (Flavor::Redis62, &["+asking"])]
    {
        let cluster = Cluster::of(&Server::builder().flavor(flavor));
        for node in &cluster.nodes {
            node.run(&locks());
            words.iter().for_each(|word| drop(node.run(&rule(word))));
        }
        use_everything(&cluster.url().replace("//", &format!("//locks:{PASSWORD}@"))).await;
        for node in &cluster.nodes {
            assert_eq!(refused(node), Vec::<String>::new(), "{flavor:?}");
        }
    }
}

/// The users `locks` at the servers and `watchers` at the sentinels.
fn sentinels_with_users() -> Sentinels {
    let sentinels = Sentinels::start();
    for server in &sentinels.servers {
        server.run(&locks());
        server.run(&rule("+role"));
    }
    for sentinel in &sentinels.sentinels {
        sentinel.run(&with_password(rule("+sentinel|get-master-addr-by-name")));
    }
    sentinels
}

#[tokio::test]
async fn documented_rights_suffice_for_sentinels() {
    let sentinels = sentinels_with_users();
    for sentinel in &sentinels.sentinels {
        // Only this user's rights count.
        sentinel.run(&["ACL", "SETUSER", "default", "resetpass", ">another"]);
    }
    let url = sentinels.url(Sentinels::SERVICE).replace("//", &format!("//locks:{PASSWORD}@"));
    let url = format!("{url}?sentinel_user=watchers&sentinel_password={PASSWORD}");
    use_everything(&url).await;
    for server in &sentinels.servers {
        assert_eq!(refused(server), Vec::<String>::new());
    }
}

/// A client whose password is in a file keeps its lease and its place in the queue when the password is changed and all of its connections are
/// closed.
async fn outlives_a_changed_password(url: &str, file: &Path, change: impl Fn(&str)) {
    let (holder, waiter) = (Client::connect(url).await.unwrap(), Client::connect(url).await.unwrap());
    let guard = holder.mutex("a").ttl(Duration::from_secs(6)).lock().await.unwrap();
    let mutex = waiter.mutex("a");
    let waiting = tokio::spawn(async move { mutex.lock().await.unwrap() });
    until(async || holder.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.waiters.len() == 1)).await;
    for number in 0..3 {
        let password = format!("password-{number}");
        fs::write(file, format!("{password}\n")).unwrap();
        change(&password);
        until(async || guard.renew().await.is_ok()).await;
        until(async || waiter.inspect(Kind::Mutex, "a").await.is_ok_and(|view| view.waiters.len() == 1))
            .await;
    }
    assert!(!waiting.is_finished());
    until(async || holder.list().await.is_ok()).await;
    guard.release_timeout(SOON).await.unwrap();
    timeout(SOON, waiting).await.unwrap().unwrap().release_timeout(SOON).await.unwrap();
    // While the file can't be read, it is the password before.
    fs::remove_file(file).unwrap();
    change("password-2");
    until(async || holder.mutex("b").try_lock().await.is_ok()).await;
    let error = Client::connect(url).await.unwrap_err();
    assert!(error.is_invalid() && error.to_string().contains(&file.display().to_string()), "{error}");
}

fn change_password(server: &Server, user: &str, password: &str) {
    let set = format!(">{password}");
    server.run(&["ACL", "SETUSER", user, "resetpass", &set]);
    server.run(&["CLIENT", "KILL", "USER", user]);
}

#[tokio::test]
async fn password_of_a_file_is_read_for_each_connection() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    let of = |file: &Path| file.display().to_string().replace('/', "%2F");
    let parameter = format!("password_file={}", of(&file));
    let begin = || fs::write(&file, PASSWORD).unwrap();

    begin();
    let server = Server::builder().start();
    server.run(&locks());
    let url = format!("redis://locks@127.0.0.1:{}?{parameter}", server.port());
    outlives_a_changed_password(&url, &file, |password| change_password(&server, "locks", password)).await;

    begin();
    let cluster = Cluster::start();
    for node in &cluster.nodes {
        node.run(&locks());
        ["+asking", "+ssubscribe"].iter().for_each(|word| drop(node.run(&rule(word))));
    }
    let change = |password: &str| {
        cluster.nodes.iter().for_each(|node| change_password(node, "locks", password));
    };
    let url = format!("{}?{parameter}", cluster.url().replace("//", "//locks@"));
    outlives_a_changed_password(&url, &file, change).await;

    begin();
    let sentinels = sentinels_with_users();
    let url = sentinels.url(Sentinels::SERVICE).replace("//", "//locks@");
    let url = format!("{url}?{parameter}&sentinel_user=watchers&sentinel_{parameter}");
    let change = |password: &str| {
        sentinels.sentinels.iter().for_each(|sentinel| change_password(sentinel, "watchers", password));
        sentinels.servers.iter().for_each(|server| change_password(server, "locks", password));
    };
    outlives_a_changed_password(&url, &file, change).await;
}

#[tokio::test]
async fn password_is_in_the_address_or_in_a_file() {
    for url in [
        "redis://me:secret@127.0.0.1?password_file=%2Ftmp%2Fno",
        "redis+unix:///tmp/no?pass=secret&password_file=%2Ftmp%2Fno",
        "redis-sentinel://a/s?sentinel_password=secret&sentinel_password_file=%2Ftmp%2Fno",
    ] {
        let error = Client::connect(url).await.unwrap_err();
        assert!(error.is_invalid() && error.to_string().contains("not in both"), "{url}: {error}");
        assert!(!format!("{error:?}").contains("secret"), "{error:?}");
    }
}

#[tokio::test]
async fn documented_rights_suffice_for_redlock() {
    for flavor in Flavor::WITH_NEWEST {
        // The leases are short, because new servers abstain for as long.
        let attempt = async || documented_rights_suffice_on_a_quorum_of(flavor).await;
        unless_paused(Duration::from_millis(300), attempt).await;
    }
}

async fn documented_rights_suffice_on_a_quorum_of(flavor: Flavor) {
    let servers: Vec<Server> = (0..3).map(|_| Server::builder().flavor(flavor).start()).collect();
    servers.iter().for_each(|server| drop(server.run(&locks_of(flavor))));
    let nodes: Vec<String> = servers.iter().map(url).collect();
    let nodes = format!("redlock:{} ?max_ttl_ms=2000", nodes.join(" "));
    let (one, other) = (Client::connect(&nodes).await.unwrap(), Client::connect(&nodes).await.unwrap());
    let mutex = |client: &Client| client.mutex("a").ttl(Duration::from_secs(2));
    let guard = timeout(SOON, mutex(&one).lock()).await.unwrap().unwrap();
    assert!(mutex(&other).try_lock().await.unwrap().is_none());
    let waiting = mutex(&other);
    let waiting = tokio::spawn(async move { waiting.lock().await.unwrap() });
    until(async || mutex(&one).inspect().await.is_ok_and(|view| view.waiters.len() == 1)).await;
    guard.renew().await.unwrap();
    guard.release().await.unwrap();
    let next = timeout(SOON, waiting).await.unwrap().unwrap();
    next.renew().await.unwrap();
    assert_eq!(one.list().await.unwrap().len(), 1);
    assert_eq!(one.force_release(Kind::Mutex, "a").await.unwrap().len(), 1);
    one.close().await.unwrap();
    other.close().await.unwrap();
    for server in &servers {
        assert_eq!(refused(server), Vec::<String>::new(), "{flavor:?}");
    }
}

/// Sets the user up anew without this right, and ends none of its connections.
fn without<'a>(all: &[&'a str], left_out: &str) -> Vec<&'a str> {
    let rest = all[3..].iter().copied().filter(|word| *word != left_out);
    ["ACL", "SETUSER", "locks", "reset"].into_iter().chain(rest).collect()
}

/// An operator takes the right away, and then the connection for messages is lost: nothing that needs none ends.
#[tokio::test]
async fn lease_is_kept_by_a_user_who_may_not_subscribe_any_more() {
    for protocol in ["3", "2"] {
        let server = Server::on_port();
        let all = locks();
        server.run(&all);
        let client = Client::connect(&format!("{}?protocol={protocol}", url(&server))).await.unwrap();
        let guard = client.mutex("a").ttl(Duration::from_secs(2)).lock().await.unwrap();
        server.run(&without(&all, "+subscribe"));
        assert!(server.query::<i64>(&["CLIENT", "KILL", "TYPE", "pubsub"]).unwrap() >= 1);
        until(async || client.warnings().iter().any(|warning| warning.contains("+subscribe"))).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        guard.release_timeout(SOON).await.unwrap();
    }
}

#[tokio::test]
async fn missing_right_is_reported() {
    for flavor in Flavor::WITH_NEWEST {
        let server = Server::builder().flavor(flavor).start();
        let all = locks_of(flavor);
        let rights: Vec<&str> =
            all.iter().copied().filter(|word| word.starts_with(['+', '~', '&'])).collect();
        assert!(rights.len() > 15, "{rights:?}");
        for left_out in rights {
            server.run(&["ACL", "DELUSER", "locks"]);
            server.run(&all.iter().copied().filter(|word| *word != left_out).collect::<Vec<_>>());
            let is_for_some = ["+scan", "+wait", "+info", "+delifeq", "+delex"].contains(&left_out);
            match Client::connect(&url(&server)).await {
                Err(error) => {
                    assert!(!is_for_some, "{flavor:?} without {left_out}: {error}");
                    let remedy = format!("ACL SETUSER locks {left_out} ");
                    assert!(error.to_string().contains(&remedy), "{flavor:?} without {left_out}: {error}");
                }
                Ok(client) => {
                    assert!(is_for_some, "{flavor:?}: connected without {left_out}");
                    client.close().await.unwrap();
                }
            }
            // The right is taken away after the client has connected.
            server.run(&all);
            let client = Client::connect(&url(&server)).await.unwrap();
            server.run(&without(&all, left_out));
            let diagnosis = client.diagnose().await.unwrap();
            let mut findings = diagnosis.components.iter().flat_map(|component| &component.findings);
            // A server that does not vote works without it.
            let says = if left_out == "+info" { "right to run INFO" } else { "lacks rights" };
            let found = findings.find(|finding| finding.what.contains(says));
            let found = found.unwrap_or_else(|| panic!("{flavor:?} without {left_out}: {diagnosis:?}"));
            let severity = if is_for_some { Severity::Advice } else { Severity::Danger };
            assert_eq!(found.severity, severity, "{left_out}");
            let remedy = found.remedy.as_ref().unwrap();
            assert_eq!(*remedy, format!("ACL SETUSER locks {left_out}"), "{flavor:?}");
            server.run(&remedy.split(' ').collect::<Vec<_>>());
            let diagnosis = client.diagnose().await.unwrap();
            let mut findings = diagnosis.components.iter().flat_map(|component| &component.findings);
            assert!(findings.all(|finding| !finding.what.contains(says)), "{left_out}");
        }
    }
}

#[tokio::test]
async fn missing_right_in_a_cluster_is_reported() {
    let cluster = Cluster::start();
    let url = cluster.url().replace("//", &format!("//locks:{PASSWORD}@"));
    let own = [rule("+asking"), rule("+ssubscribe")].concat();
    for left_out in own.iter().filter(|word| word.starts_with('+')) {
        for node in &cluster.nodes {
            node.run(&["ACL", "DELUSER", "locks"]);
            node.run(&locks());
            let kept = own[3..].iter().filter(|word| word.starts_with('+') && *word != left_out);
            node.run(&["ACL", "SETUSER", "locks"].into_iter().chain(kept.copied()).collect::<Vec<_>>());
        }
        match Client::connect(&url).await {
            Err(error) => {
                assert!(!["+asking", "+ssubscribe"].contains(left_out), "{left_out}: {error}");
                assert!(error.to_string().contains(&format!(" {left_out} (")), "{left_out}: {error}");
            }
            Ok(client) => {
                assert!(["+asking", "+ssubscribe"].contains(left_out), "connected without {left_out}");
                let diagnosis = client.diagnose().await.unwrap();
                let findings = diagnosis.components.iter().flat_map(|component| &component.findings);
                let found = findings.filter(|finding| finding.what.contains("lacks rights"));
                let remedies: Vec<&str> = found.filter_map(|finding| finding.remedy.as_deref()).collect();
                // Replicas that have not replicated anything yet may not be named.
                assert!(remedies.len() >= 3, "{diagnosis:?}");
                assert!(remedies.iter().all(|remedy| *remedy == format!("ACL SETUSER locks {left_out}")));
            }
        }
    }
}

#[tokio::test]
async fn documented_rights_of_doctor_suffice() {
    for flavor in Flavor::WITH_NEWEST {
        let server = Server::builder().flavor(flavor).start();
        server.run(&locks_of(flavor));
        let client = Client::connect(&url(&server)).await.unwrap();
        let whats = async || {
            let diagnosis = client.diagnose().await.unwrap();
            let findings = diagnosis.components.into_iter().flat_map(|component| component.findings);
            findings.map(|finding| finding.what).collect::<Vec<_>>()
        };
        let blind = whats().await;
        assert!(blind.iter().any(|what| what.contains("CONFIG GET")), "{blind:?}");
        server.run(&["ACL", "LOG", "RESET"]);
        server.run(&rule("+config|get"));
        let seeing = whats().await;
        assert!(
            !seeing.iter().any(|what| what.contains("may not") || what.contains("CONFIG GET")),
            "{seeing:?}"
        );
        assert_eq!(refused(&server), Vec::<String>::new(), "{flavor:?}");
    }
}

#[tokio::test]
async fn rights_to_look_for_locks_of_other_libraries_suffice() {
    let server = Server::on_port();
    server.run(&locks());
    server.run(&rule("+config|get"));
    server.run(&["SET", "jobs", "696bb90ee6de11f1a35602fc00000001", "PX", "60000"]);
    server.run(&["HSET", "list", "9557684a-c856-4883-9094-904228b43691:27", "1"]);
    server.run(&["PEXPIRE", "list", "60000"]);
    let client = Client::connect(&url(&server)).await.unwrap();
    let found = async || {
        let diagnosis = client.diagnose().await.unwrap();
        let findings = diagnosis.components.into_iter().flat_map(|component| component.findings);
        let whats = findings.filter(|finding| finding.id == "foreign-locks");
        whats.map(|finding| finding.what).collect::<Vec<_>>().join("; ")
    };
    let blind = found().await;
    assert!(blind.contains("is not known") && !blind.contains("jobs"), "{blind}");
    server.run(&rule("+getrange"));
    let seeing = found().await;
    assert!(!seeing.contains("is not known"), "{seeing}");
    for lock in ["\"jobs\" (like redis-py)", "\"list\" (like Redisson RLock)"] {
        assert!(seeing.contains(lock), "{seeing}");
    }
}

/// A message of the kinds 1 to 4, with this proof.
fn forged(kind: u8, sequence: u64, numbers: [f64; 4], proof: &[u8]) -> Vec<u8> {
    let numbers: Vec<u8> = numbers.into_iter().flat_map(f64::to_be_bytes).collect();
    [&[kind][..], &sequence.to_be_bytes(), &numbers, proof].concat()
}

/// How many scripts the server has run.
fn scripts_run(server: &Server) -> u64 {
    let info: String = server.query(&["INFO", "commandstats"]).unwrap();
    let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    line.and_then(|line| line.split(',').next()?.parse().ok()).unwrap_or(0)
}

/// A user without a right to any key of leasehold, but with all channels, as every new user of Redis 6.2 has: it lists the channels,
/// listens, publishes what it likes, and repeats what it has heard.
#[tokio::test]
async fn stranger_on_the_channels_grants_nothing_and_ends_nothing() {
    for flavor in Flavor::WITH_NEWEST {
        let server = Server::builder().flavor(flavor).start();
        server.run(&locks_of(flavor));
        let rights = ["~other:*", "&*", "+@all", "-@dangerous"];
        server.run(&[&["ACL", "SETUSER", "stranger", "on", ">stranger"][..], &rights].concat());
        let holder = Client::connect(&url(&server)).await.unwrap();
        let waiter = Client::connect(&url(&server)).await.unwrap();
        let guard = holder.mutex("a").ttl(Duration::from_secs(60)).lock().await.unwrap();
        let waiting = |mutex: leasehold::Mutex| tokio::spawn(async move { mutex.lock().await.unwrap() });
        let until_waiting = async || {
            until(async || holder.mutex("a").inspect().await.is_ok_and(|view| view.waiters.len() == 1)).await;
        };
        let waits = waiting(waiter.mutex("a"));
        until_waiting().await;

        let address = format!("redis://stranger:stranger@127.0.0.1:{}", server.port());
        let stranger = redis::Client::open(address).unwrap();
        let mut commands = stranger.get_connection().unwrap();
        let channels: Vec<String> =
            redis::cmd("PUBSUB").arg("CHANNELS").arg("*").query(&mut commands).unwrap();
        assert_eq!(channels.len(), 2, "{channels:?}");
        let mut listening = stranger.get_connection().unwrap();
        let mut inboxes = listening.as_pubsub();
        inboxes.subscribe(&channels).unwrap();
        inboxes.set_read_timeout(Some(SOON)).unwrap();

        // A grant of the highest token for 600 s, and hints to ask at once or in the far future.
        let time: (u64, u64) = redis::cmd("TIME").query(&mut commands).unwrap();
        #[allow(clippy::cast_precision_loss, reason = "times are below 2^53")]
        let now = (time.0 * 1_000_000 + time.1) as f64;
        let (token, far) = (9_007_199_254_740_990.0, now + 3.6e9);
        let (before, began) = (scripts_run(&server), std::time::Instant::now());
        let mut flood = |messages: &[Vec<u8>]| {
            for (channel, message) in
                channels.iter().flat_map(|channel| messages.iter().map(move |m| (channel, m)))
            {
                redis::cmd("PUBLISH").arg(channel).arg(message).exec(&mut commands).unwrap();
            }
        };
        for _ in 0..50 {
            for sequence in 1..=6 {
                let near = now / 1e3 * 2_048.0;
                flood(&[
                    forged(1, sequence, [now, token, token, 6e8], &[b'0'; 40]),
                    forged(
                        1,
                        sequence,
                        [now, near.floor(), near.floor(), 3e6],
                        b"0123456789abcdef0123456789abcdef01234567",
                    ),
                    forged(1, sequence, [now, token, token, 6e8], b""),
                    forged(2, sequence, [now, 0.0, 0.0, 0.0], b""),
                    forged(2, sequence, [now, far, 0.0, 0.0], b""),
                    forged(3, sequence, [now, 0.0, 0.0, 0.0], b""),
                    forged(4, sequence, [now, 0.0, 0.0, 0.0], b""),
                    b"anything".to_vec(),
                ]);
            }
        }
        // Each attempt and lease asks once a second, and a holder also renews.
        let most = 4 + 4 * began.elapsed().as_secs();
        let asked = scripts_run(&server) - before;
        assert!(asked <= most, "{flavor:?}: {asked} commands, and {most} would do");
        assert!(!waits.is_finished() && guard.is_held(), "{flavor:?}");
        let view = holder.mutex("a").inspect().await.unwrap();
        assert_eq!((view.holders.len(), view.waiters.len()), (1, 1), "{flavor:?}");

        // It hears a genuine grant, which counts once.
        let first = guard.token();
        guard.release().await.unwrap();
        let second = timeout(SOON, waits).await.unwrap().unwrap();
        assert!(second.token() > first, "{flavor:?}");
        let message = loop {
            let message = inboxes.get_message().unwrap().get_payload_bytes().to_vec();
            if message.len() == 81 && !message.ends_with(b"0000") && !message.ends_with(b"4567") {
                break message;
            }
        };
        second.release().await.unwrap();
        let guard = holder.mutex("a").ttl(Duration::from_secs(60)).lock().await.unwrap();
        let waits = waiting(waiter.mutex("a"));
        until_waiting().await;
        for sequence in 1..=12_u64 {
            flood(&[[&message[..1], &sequence.to_be_bytes(), &message[9..]].concat()]);
        }
        until(async || scripts_run(&server) > before).await;
        assert!(!waits.is_finished() && guard.is_held(), "{flavor:?}");
        guard.release().await.unwrap();
        timeout(SOON, waits).await.unwrap().unwrap().release().await.unwrap();
    }
}

/// How many clients believe that they hold the lock.
#[derive(Default)]
struct Inside(AtomicUsize);

impl Inside {
    fn enter(&self) {
        assert_eq!(self.0.fetch_add(1, Ordering::SeqCst), 0, "two clients hold the lock");
    }

    fn leave(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Takes the lock "a" again and again, until it is stopped.
async fn contend(client: Client, inside: Arc<Inside>, stopped: Arc<AtomicBool>) -> usize {
    let mutex = client.mutex("a").ttl(Duration::from_secs(12));
    let mut count = 0;
    while !stopped.load(Ordering::SeqCst) {
        // A grant that was not pushed is found later.
        let Ok(Some(guard)) = mutex.lock_timeout(SOON).await else { continue };
        inside.enter();
        tokio::task::yield_now().await;
        inside.leave();
        guard.release().await.unwrap();
        count += 1;
    }
    count
}

/// Uses the lock once. Returns what the store refused.
async fn use_once(client: &Client, inside: &Inside) -> Vec<String> {
    let mut refused = Vec::new();
    let mutex = client.mutex("a").ttl(Duration::from_secs(12));
    match timeout(SOON, mutex.lock_timeout(Duration::from_millis(500))).await.expect("it ends") {
        Ok(None) => {}
        Ok(Some(guard)) => {
            inside.enter();
            tokio::task::yield_now().await;
            refused.extend(guard.renew().await.err().map(|error| format!("renew: {error:#}")));
            inside.leave();
            if let Err(error) = guard.release_timeout(Duration::from_millis(300)).await {
                // It is repeated when the right is back.
                refused.push(format!("release: {error:#}"));
            }
        }
        Err(error) => refused.push(format!("lock: {error:#}")),
    }
    refused.extend(client.inspect(Kind::Mutex, "a").await.err().map(|error| format!("inspect: {error:#}")));
    refused
}

/// Takes every right away from a client that is connected, one at a time, while two others contend for the lock.
async fn take_each_right_away(flavor: Flavor) {
    let server = Server::builder().flavor(flavor).start();
    let all = locks_of(flavor);
    let optional = ["+scan", "+wait", "+info", "+delifeq", "+delex"];
    let rights = all.iter().copied().filter(|word| word.starts_with('+') && !optional.contains(word));
    let (inside, stopped) = (Arc::new(Inside::default()), Arc::new(AtomicBool::new(false)));
    let mut contending = Vec::new();
    for _ in 0..2 {
        let client = Client::connect(&server.url()).await.unwrap();
        contending.push(tokio::spawn(contend(client, inside.clone(), stopped.clone())));
    }
    let (mut refused, mut table) = (0, Vec::new());
    for right in rights {
        server.run(&all);
        let client = Client::connect(&url(&server)).await.unwrap();
        server.run(&without(&all, right));
        let errors = use_once(&client, &inside).await;
        for error in &errors {
            let is_late = error.starts_with("release:");
            assert!(is_late || error.contains(right), "{flavor:?} without {right}: {error}");
        }
        refused += usize::from(!errors.is_empty());
        table.push((right, errors));
        server.run(&all);
        let _ = client.close().await;
    }
    stopped.store(true, Ordering::SeqCst);
    for contending in contending {
        assert!(timeout(SOON, contending).await.expect("it ends").unwrap() > 0);
    }
    assert!(refused > 3, "{flavor:?}: {table:#?}");
}

#[tokio::test]
async fn right_that_is_taken_away_lets_no_second_holder_in_on_redis_7() {
    take_each_right_away(Flavor::Redis7).await;
}

#[tokio::test]
async fn right_that_is_taken_away_lets_no_second_holder_in_on_redis_6_2() {
    take_each_right_away(Flavor::Redis62).await;
}

#[tokio::test]
async fn right_that_is_taken_away_lets_no_second_holder_in_on_valkey_9() {
    take_each_right_away(Flavor::Valkey9).await;
}

#[tokio::test]
async fn right_that_is_taken_away_lets_no_second_holder_in_on_redis_8_6() {
    take_each_right_away(Flavor::Redis86).await;
}

#[tokio::test]
async fn disabled_command_is_named_at_connect() {
    for flavor in [Flavor::Redis7, Flavor::Redis62] {
        let server = Server::builder().flavor(flavor).setting("rename-command", "HDEL \"\"").start();
        let error = Client::connect(&server.url()).await.unwrap_err().to_string();
        assert!(error.contains("HDEL") && error.contains("rename-command"), "{flavor:?}: {error}");
    }
}
