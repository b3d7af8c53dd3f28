//! Bridged locks under faults: connections that are cut, servers that are replaced or forget their scripts, and servers that report
//! nothing.

use std::time::{Duration, Instant};

use leasehold::bridge::Foreign;
use leasehold::{Client, Kind, Loss, Mutex};
use leasehold_testkit::{Flavor, Proxy, Sentinels, Server, unless_paused, until, until_some};
use redis::Value;

const KEY: &str = "jobs";
const LONG: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(60);

/// One for each protocol.
fn all() -> [Foreign; 6] {
    [
        Foreign::set_nx_px(KEY),
        Foreign::redisson_lock(KEY),
        Foreign::redisson_fenced_lock(KEY),
        Foreign::spring_integration("registry", KEY),
        Foreign::python_redis_lock(KEY),
        Foreign::rueidislock(KEY),
    ]
}

fn mutex(client: &Client, foreign: &Foreign) -> Mutex {
    client.mutex("own").bridge(foreign.clone())
}

/// How many keys there are besides leasehold's.
fn keys(server: &Server) -> usize {
    let keys: Vec<String> = server.query(&["KEYS", "*"]).unwrap();
    let is_lock = |key: &&String| !["leasehold:", "signal", "token"].iter().any(|part| key.contains(part));
    keys.iter().filter(is_lock).count()
}

fn pttl(server: &Server, foreign: &Foreign) -> i64 {
    server.query(&["PTTL", foreign.key()]).unwrap()
}

fn take_as_other(server: &Server, foreign: &Foreign) {
    if foreign.to_string().starts_with("redisson") {
        server.run(&["HSET", foreign.key(), "7a79a1d0-961b-4a34-8777-c1a19aba6efa:28", "1"]);
        server.run(&["PEXPIRE", foreign.key(), "60000"]);
    } else {
        let taken: Value = server.run(&["SET", foreign.key(), "other", "NX", "PX", "60000"]);
        assert_eq!(taken, Value::Okay);
    }
}

/// As soon as the server answers.
async fn own_is_free(client: &Client) -> bool {
    until_some(async || client.inspect(Kind::Mutex, "own").await.ok()).await.holders.is_empty()
}

/// Otherwise the lease would be at one server and the other library's lock at another.
#[tokio::test]
async fn bridge_whose_address_leads_to_another_server_makes_the_client_reconnect() {
    for has_info in [true, false] {
        let (first, second) = (Server::on_port(), Server::on_port());
        if !has_info {
            for server in [&first, &second] {
                server.run(&["ACL", "SETUSER", "default", "-info"]);
            }
        }
        let proxy = Proxy::before(&first);
        let client = Client::connect(&proxy.url()).await.unwrap();
        client.mutex("other").lock().await.unwrap().release().await.unwrap();
        // The connection for the bridge is opened when it is first needed.
        proxy.redirect_to(second.port());
        let foreign = Foreign::set_nx_px(KEY);
        let held = |server: &Server| server.query::<Vec<String>>(&["KEYS", "*mutex:own*"]).unwrap().len();
        // A lease of the first server may still be granted while the client reconnects: it is lost then.
        let mut guard = None;
        until(async || {
            guard = mutex(&client, &foreign).try_lock().await.ok().flatten();
            guard.is_some() && held(&second) == 1 && keys(&second) == 1
        })
        .await;
        assert_eq!(keys(&first), 0);
    }
}

#[tokio::test]
async fn connection_cut_between_the_two_legs_leaves_one_holder_and_nothing_behind() {
    let server = Server::on_port();
    for foreign in all() {
        let proxy = Proxy::before(&server);
        let client = Client::connect(&proxy.url()).await.unwrap();
        take_as_other(&server, &foreign);
        let waiter = tokio::spawn({
            let mutex = mutex(&client, &foreign);
            async move { mutex.lock().await }
        });
        // The own leg is held, and the foreign one is waited for.
        until(async || !own_is_free(&client).await).await;
        proxy.cut();
        assert_eq!(keys(&server), 1, "{foreign}");
        server.run(&["DEL", foreign.key()]);
        let guard = tokio::time::timeout(SOON, waiter).await.expect("reconnects").unwrap().unwrap();
        assert!(guard.is_held() && keys(&server) > 0, "{foreign}");
        // While it is held, too.
        proxy.cut();
        guard.renew().await.unwrap();
        guard.release().await.unwrap();
        until(async || keys(&server) == 0 && own_is_free(&client).await).await;
    }
}

#[tokio::test]
async fn server_that_does_not_answer_between_the_two_legs_is_an_error_that_names_the_bridge() {
    let server = Server::on_port();
    let observer = Client::connect(&server.url()).await.unwrap();
    for foreign in all() {
        let proxy = Proxy::before(&server);
        let client = Client::connect(&proxy.url()).await.unwrap();
        take_as_other(&server, &foreign);
        let waiter = tokio::spawn({
            // A part of its ttl is waited for an answer, since the server may only be restarting.
            let mutex = mutex(&client, &foreign).ttl(Duration::from_secs(6));
            async move { mutex.lock().await }
        });
        // Its own answer follows that of the own leg, so the foreign one is waited for.
        until(async || !own_is_free(&client).await).await;
        proxy.refuse(true);
        proxy.cut();
        let error = tokio::time::timeout(SOON, waiter).await.expect("gives up").unwrap().unwrap_err();
        assert!(error.is_unavailable() || error.is_lost(), "{error}");
        assert!(error.to_string().contains(&format!("bridged to {foreign}")), "{error}");
        proxy.refuse(false);
        server.run(&["DEL", foreign.key()]);
        until(async || keys(&server) == 0 && own_is_free(&observer).await).await;
    }
}

/// The user may not use the other library's key any more, and still those of leasehold.
#[tokio::test]
async fn loss_of_the_other_librarys_lock_says_why_it_was_not_renewed() {
    let server = Server::on_port();
    server.run(&["ACL", "SETUSER", "locks", "on", "nopass", "~*", "&*", "+@all"]);
    let client = Client::connect(&format!("redis://locks:any@127.0.0.1:{}", server.port())).await.unwrap();
    for foreign in all() {
        let guard = mutex(&client, &foreign).ttl(Duration::from_secs(6)).lock().await.unwrap();
        server.run(&["ACL", "SETUSER", "locks", "resetkeys", "~leasehold:*"]);
        let loss = tokio::time::timeout(SOON, guard.lost()).await.unwrap();
        assert_eq!(loss, Loss::Bridge, "{foreign}: {:?}", guard.renewal_error());
        let why = guard.renewal_error().expect("a renewal has failed").to_string();
        assert!(why.contains("this user may not"), "{foreign}: {why:?}");
        let error = guard.renew().await.unwrap_err();
        assert!(error.is_lost() && error.to_string().ends_with(&why), "{foreign}: {error}");
        drop(guard);
        let error = mutex(&client, &foreign).lock_timeout(SOON).await.unwrap_err();
        assert!(error.is_refused() && error.to_string().contains("this user may not"), "{foreign}: {error}");
        server.run(&["ACL", "SETUSER", "locks", "~*"]);
        until(async || keys(&server) == 0).await;
    }
}

#[tokio::test]
async fn refused_release_of_the_other_librarys_lock_is_told_in_the_servers_words() {
    let server = Server::on_port();
    server.run(&["ACL", "SETUSER", "locks", "on", "nopass", "~*", "&*", "+@all"]);
    let client = Client::connect(&format!("redis://locks:any@127.0.0.1:{}", server.port())).await.unwrap();
    for foreign in all() {
        let guard = mutex(&client, &foreign).ttl(Duration::from_secs(20)).lock().await.unwrap();
        server.run(&["ACL", "SETUSER", "locks", "resetkeys", "~leasehold:*"]);
        let error = guard.release().await.unwrap_err();
        assert!(error.is_refused() && error.to_string().contains("this user may not"), "{foreign}: {error}");
        let refusal = client.refusal().map(|refusal| refusal.to_string()).unwrap_or_default();
        assert!(refusal.contains("this user may not"), "{foreign}: {refusal}");
        // It is repeated in the background.
        server.run(&["ACL", "SETUSER", "locks", "~*"]);
        until(async || keys(&server) == 0).await;
        until(async || client.refusal().is_none()).await;
    }
}

/// Other users who may write the key may write any number where the other library counts.
#[tokio::test]
async fn number_that_another_user_has_written_does_not_block_the_server() {
    let server = Server::on_port();
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = client.rw_lock("own").bridge(Foreign::redisson_read_write_lock(KEY));
    for number in ["99999999999", "1e300", "inf", "nan", "x", "-5"] {
        server.run(&["HSET", KEY, "mode", "read", "other", number]);
        server.run(&["PEXPIRE", KEY, "60000"]);
        let guard = lock.read().await.unwrap();
        tokio::time::timeout(SOON, guard.release()).await.expect("the server answers").unwrap();
        server.run(&["DEL", KEY]);
    }
    // A reader's own key without an expiry keeps the lock.
    server.run(&["HSET", KEY, "mode", "read", "other", "1"]);
    server.run(&["PEXPIRE", KEY, "60000"]);
    server.run(&["SET", &format!("{{{KEY}}}:other:rwlock_timeout:1"), "1"]);
    lock.read().await.unwrap().release().await.unwrap();
    assert_eq!(server.query::<i64>(&["HEXISTS", KEY, "other"]).unwrap(), 1);
}

#[tokio::test]
async fn server_that_forgets_its_scripts_is_sent_them_again() {
    let server = Server::on_socket();
    let client = Client::connect(&server.url()).await.unwrap();
    for foreign in all() {
        for step in 0..3 {
            if step == 0 {
                server.run(&["SCRIPT", "FLUSH"]);
            }
            let guard = mutex(&client, &foreign).ttl(LONG).lock().await.unwrap();
            if step == 1 {
                server.run(&["SCRIPT", "FLUSH"]);
            }
            guard.renew().await.unwrap();
            assert!(pttl(&server, &foreign) > 3_000, "{foreign}");
            if step == 2 {
                server.run(&["SCRIPT", "FLUSH"]);
            }
            guard.release().await.unwrap();
            assert_eq!(keys(&server), 0, "{foreign}");
        }
    }
}

/// Over RESP2, and for a user without the right to `CLIENT TRACKING`, nothing is reported.
#[tokio::test]
async fn loss_is_seen_by_the_next_renewal_where_nothing_is_reported() {
    let server = Server::on_port();
    let rule = ["ACL", "SETUSER", "locks", "on", ">password", "~*", "&*", "+@all", "-client|tracking"];
    assert_eq!(server.run(&rule), Value::Okay);
    let address = format!("127.0.0.1:{}", server.port());
    for url in [format!("redis://{address}/?protocol=2"), format!("redis://locks:password@{address}")] {
        for foreign in all() {
            unless_paused(Duration::from_millis(500), async || {
                // What an earlier attempt has left.
                server.run(&["FLUSHALL"]);
                renewal_sees_the_loss(&server, &url, &foreign).await;
            })
            .await;
        }
    }
}

/// The connections for commands that use RESP3.
fn resp3(server: &Server) -> Vec<String> {
    let list: String = server.query(&["CLIENT", "LIST", "TYPE", "normal"]).unwrap();
    let open = list.lines().filter(|line| line.contains("resp=3"));
    open.filter_map(|line| Some(line.split_once("id=")?.1.split(' ').next()?.to_owned())).collect()
}

/// A user with CLIENT TRACKING can redirect the names of changed keys to the connection of a bridge, which tracks keys.
#[tokio::test]
async fn bridge_evades_redirected_names_and_then_polls() {
    let server = Server::on_port();
    let url = format!("{}?protocol=3", server.url());
    let other_servers = [Server::on_port(), Server::on_port()];
    let voters = [&server, &other_servers[0], &other_servers[1]].map(Server::url);
    for foreign in [Foreign::set_nx_px(KEY), Foreign::redlock(voters, KEY).unwrap()] {
        let client = Client::connect(&url).await.unwrap();
        client.mutex("other").lock().await.unwrap().release().await.unwrap();
        until(async || resp3(&server).len() == 2).await;
        let others = resp3(&server);
        let guard = mutex(&client, &foreign).ttl(LONG).lock().await.unwrap();
        // What the client asked for does not count as redirected.
        for _ in 0..3 {
            guard.renew().await.unwrap();
        }
        let bridges: Vec<_> = resp3(&server).into_iter().filter(|id| !others.contains(id)).collect();
        assert_eq!(bridges.len(), 1, "{foreign}");
        let mut stranger = server.admin();
        let mut track = redis::cmd("CLIENT");
        track.arg("TRACKING").arg("ON").arg("REDIRECT").arg(&bridges[0]).arg("BCAST");
        track.exec(&mut stranger).unwrap();
        for number in 0..100 {
            server.run(&["SET", &format!("stranger:{number}"), "x", "PX", "1"]);
        }
        until(async || !resp3(&server).contains(&bridges[0])).await;
        guard.renew().await.unwrap();
        guard.release().await.unwrap();
        assert!(resp3(&server).iter().all(|id| others.contains(id)), "{foreign}: it came back with RESP3");
        // Nothing is reported from now on.
        take_as_other(&server, &foreign);
        other_servers.iter().for_each(|server| take_as_other(server, &foreign));
        let waiter = tokio::spawn({
            let mutex = mutex(&client, &foreign);
            async move { mutex.lock().await }
        });
        until(async || !own_is_free(&client).await).await;
        server.run(&["DEL", KEY]);
        other_servers.iter().for_each(|server| drop(server.run(&["DEL", KEY])));
        let guard = tokio::time::timeout(SOON, waiter).await.expect("polls").unwrap().unwrap();
        guard.release().await.unwrap();
        client.close().await.unwrap();
        until(async || resp3(&server).is_empty()).await;
    }
}

async fn renewal_sees_the_loss(server: &Server, url: &str, foreign: &Foreign) {
    let client = Client::connect(url).await.unwrap();
    let ttl = Duration::from_secs(6);
    let guard = mutex(&client, foreign).ttl(ttl).lock().await.unwrap();
    until(async || guard.remaining() > Duration::from_secs(3)).await;
    server.run(&["DEL", foreign.key()]);
    take_as_other(server, foreign);
    let taken_over = Instant::now();
    assert_eq!(guard.lost().await, Loss::Bridge, "{foreign}");
    assert!(taken_over.elapsed() < ttl, "{foreign}: {:?}", taken_over.elapsed());
    let error = guard.release().await.unwrap_err();
    assert!(error.is_lost() && error.to_string().contains("other library"), "{error}");
    assert!(pttl(server, foreign) > 30_000, "the other program still has it");
    // A waiter polls.
    let waiter = tokio::spawn({
        let mutex = mutex(&client, foreign);
        async move { mutex.lock().await }
    });
    until(async || !own_is_free(&client).await).await;
    server.run(&["DEL", foreign.key()]);
    let guard = tokio::time::timeout(SOON, waiter).await.expect("polls").unwrap().unwrap();
    guard.release().await.unwrap();
    until(async || keys(server) == 0).await;
}

#[tokio::test]
async fn lock_goes_on_at_the_replica_that_becomes_the_master() {
    let mut sentinels = Sentinels::start();
    let client = Client::connect(&sentinels.url(Sentinels::SERVICE)).await.unwrap();
    let foreign = Foreign::set_nx_px(KEY);
    let limit = Duration::from_secs(60);
    let guard = mutex(&client, &foreign).ttl(Duration::from_secs(40)).lock().await.unwrap();
    until(async || guard.remaining() > Duration::from_secs(3)).await;
    for is_crash in [false, true] {
        let has_followed =
            async || sentinels.master().query::<i64>(&["WAIT", "1", "100"]).is_ok_and(|count| count >= 1);
        until(has_followed).await;
        let new = if is_crash { sentinels.kill_master() } else { sentinels.fail_over() };
        until(async || guard.renew().await.is_ok()).await;
        assert!(guard.is_held());
        assert_eq!(keys(&sentinels.servers[new]), 1);
        assert!(pttl(&sentinels.servers[new], &foreign) > 3_000);
    }
    guard.release_timeout(limit).await.unwrap();
    let master = sentinels.master_number();
    assert_eq!(keys(&sentinels.servers[master]), 0);
    // The lock of a master that had not reached its replica is lost.
    let guard = mutex(&client, &foreign).ttl(Duration::from_secs(40)).lock().await.unwrap();
    until(async || guard.remaining() > Duration::from_secs(3)).await;
    sentinels.servers[master].run(&["DEL", KEY]);
    assert_eq!(tokio::time::timeout(SOON, guard.lost()).await.expect("told"), Loss::Bridge);
}

/// A script with its keys, and its arguments.
type Call = (&'static str, &'static [&'static str], &'static [&'static str]);

/// The scripts that need more than one command for what expires. A client undoes what they leave, unless it ends.
const SCRIPTS: [Call; 5] = [
    (include_str!("../src/bridge/scripts/take_hash.lua"), &[KEY], &["uuid:1", "60000"]),
    (include_str!("../src/bridge/scripts/take_hash.lua"), &[KEY], &["uuid:1", "60000", "write"]),
    (include_str!("../src/bridge/scripts/take_hash_shared.lua"), &[KEY, "{jobs}:own"], &["uuid:1", "60000"]),
    (include_str!("../src/bridge/scripts/take_hash_token.lua"), &[KEY, "token"], &["uuid:1", "60000", "7"]),
    (include_str!("../src/bridge/scripts/release_value_list.lua"), &["mine"], &["value", "signal", "1000"]),
];

/// The server keeps what a script has written that is refused half-way.
#[test]
fn script_of_a_user_who_may_not_set_an_expiry_leaves_nothing_that_stays() {
    for flavor in Flavor::ALL {
        let server = Server::builder().flavor(flavor).on_socket().start();
        for right in ["pexpire", "set", "hset", "lpush", "incrby"] {
            for (script, keys, arguments) in SCRIPTS {
                server.run(&["SET", "mine", "value", "PX", "60000"]);
                server.run(&["ACL", "SETUSER", "default", &format!("-{right}")]);
                let count = keys.len().to_string();
                let call = [&["EVAL", script, &count], keys, arguments].concat();
                let result = server.query::<i64>(&call);
                server.run(&["ACL", "SETUSER", "default", &format!("+{right}")]);
                let taken = script.contains("Takes") && result.is_ok();
                let all: Vec<String> = server.query(&["KEYS", "*"]).unwrap();
                for key in all.iter().filter(|key| *key != "token") {
                    let left: i64 = server.query(&["PTTL", key]).unwrap();
                    assert_ne!(
                        left, -1,
                        "{flavor:?} without {right}: {key} stays after {result:?} of {script}"
                    );
                }
                assert_eq!(
                    taken,
                    all.iter().any(|key| key == KEY),
                    "{flavor:?} without {right}: {result:?} of {script}"
                );
                server.run(&["FLUSHALL"]);
            }
        }
    }
}
