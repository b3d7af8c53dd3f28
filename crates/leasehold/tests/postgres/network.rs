//! Hosts that do not answer, connections that vanish, and poolers.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::{join_all, select_all};
use futures_util::stream::{FuturesUnordered, StreamExt};
use leasehold::Client;
use leasehold::tokio_postgres::{NoTls, SimpleQueryMessage, connect};
use leasehold_testkit::{PgBouncer, Postgres, Proxy, unless_paused, until};

use super::{LONG, client_of, lock, refusal};

fn url_of(ports: &[u16]) -> String {
    let hosts: Vec<_> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    format!("postgres://postgres@{}/postgres?sslmode=disable", hosts.join(","))
}

fn port_of(url: &str) -> u16 {
    let (_, behind) = url.rsplit_once(':').expect("the address names a port");
    behind.split('/').next().and_then(|port| port.parse().ok()).expect("the port is a number")
}

/// The sessions that listen: each keeps the key of its client.
const LISTENS: &str = "pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory')";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn host_that_accepts_and_never_answers_does_not_keep_the_client_from_the_next_one() {
    let server = Postgres::on_port();
    let silent = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = silent.local_addr().unwrap().port();
    let client = Client::connect(&url_of(&[port, server.port()])).await.unwrap();
    lock(&client, "a").await.release().await.unwrap();
    let error = refusal(&url_of(&[port])).await;
    assert!(error.is_unavailable() && error.to_string().contains("did not answer"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_outlive_connections_that_vanish_while_another_host_answers() {
    unless_paused(Duration::from_millis(500), async || {
        let server = Postgres::on_port();
        let proxy = Proxy::before_postgres(&server);
        let client = Client::connect(&url_of(&[proxy.port(), server.port()])).await.unwrap();
        let of = |number: usize| client.mutex(format!("lock {number}")).ttl(Duration::from_secs(10));
        // All connections of the client lead through the proxy.
        let guards = join_all((0..16).map(|number| {
            let mutex = of(number);
            async move { mutex.lock_timeout(LONG).await.unwrap().expect("it is free") }
        }))
        .await;
        assert!(proxy.connections() > 2, "{} connections", proxy.connections());
        proxy.drop_requests(true);
        proxy.drop_replies(true);
        let lost = select_all(guards.iter().map(|guard| Box::pin(guard.lost())));
        let lost = tokio::time::timeout(Duration::from_secs(12), lost).await;
        assert!(lost.is_err(), "a lease was lost: {:?}", lost.map(|(loss, ..)| loss));
        assert!(guards.iter().all(leasehold::Guard::is_held));
        lock(&client, "another").await.release().await.unwrap();
    })
    .await;
}

/// The handshakes of a new connection take longer than a renewal may.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_outlives_its_connections_on_a_slow_network() {
    unless_paused(Duration::from_millis(300), async || {
        let server = Postgres::on_port();
        let proxy = Proxy::before_postgres(&server);
        proxy.delay_requests(Duration::from_millis(110));
        proxy.delay_replies(Duration::from_millis(110));
        let client = Client::connect(&url_of(&[proxy.port()])).await.unwrap();
        let mutex = client.mutex("a").ttl(Duration::from_secs(3));
        let guard = mutex.lock_timeout(LONG).await.unwrap().expect("it is free");
        proxy.cut();
        let lost = tokio::time::timeout(Duration::from_secs(9), guard.lost()).await;
        assert!(lost.is_err(), "the lease was lost: {lost:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_of_a_pooler_keep_no_settings_and_no_locks_of_the_client() {
    let server = Postgres::builder().setting("lock_timeout=7s").start();
    let pooler = PgBouncer::start(&server);
    let urls = [
        pooler.url(),
        format!("{}?pooler=yes", pooler.url()),
        format!("{}?listen={}", pooler.url(), server.url()),
        // It listens in a session that others use, but its commands leave nothing there.
        format!("{}?pooler=no", pooler.url()),
    ];
    for url in urls {
        let client = Client::connect(&url).await.unwrap();
        join_all((0..8).map(async |number| {
            lock(&client, &format!("lock {number}")).await.release().await.unwrap();
        }))
        .await;
        let (database, connection) = connect(&pooler.url(), NoTls).await.unwrap();
        tokio::spawn(connection);
        for _ in 0..20 {
            let rows = database.simple_query(
                "SELECT current_setting('idle_in_transaction_session_timeout'), current_setting('enable_seqscan'),
                    current_setting('lock_timeout'), current_setting('synchronous_commit')",
            );
            let rows = rows.await.unwrap();
            let SimpleQueryMessage::Row(row) = &rows[1] else { panic!("{rows:?}") };
            let settings: Vec<_> = (0..4).map(|at| row.get(at).unwrap()).collect();
            assert_eq!(settings, ["0", "on", "7s", "on"], "{url}");
        }
        if !url.contains("pooler=no") {
            let through_pooler = "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
                WHERE locktype = 'advisory' AND client_addr IS NULL";
            assert_eq!(server.run(through_pooler), "0", "{url}");
        }
    }
}

#[tokio::test]
async fn listen_address_of_another_database_is_refused() {
    let server = Postgres::on_port();
    server.run("CREATE DATABASE other");
    let other = format!("{}/other", server.url().trim_end_matches("/postgres"));
    assert_ne!(other, server.url());
    let error = refusal(&format!("{}?listen={other}", server.url())).await;
    assert!(error.to_string().contains("another database"), "{error}");
}

#[tokio::test]
async fn listen_address_of_a_pooler_is_refused() {
    let server = Postgres::on_port();
    let pooler = PgBouncer::start(&server);
    let error = refusal(&format!("{}?listen={}", pooler.url(), pooler.url())).await;
    assert!(error.to_string().contains("a pooler is in between"), "{error}");
}

/// The client waits for a lock while no reply reaches it, and later no request either if `is_request_late`: the server ends the session
/// within the transaction. Returns how long it was within one.
async fn wait_in_silence(server: &Postgres, holder: &Client, url: &str, is_request_late: bool) -> Duration {
    let port = port_of(url);
    let proxy = Proxy::before_port(port, |at| url.replace(&format!(":{port}"), &format!(":{at}")));
    let client = Client::connect(&proxy.url()).await.unwrap();
    let held = lock(holder, "a").await;
    // The client knows then that the lock takes a transaction, and has prepared its statements.
    let in_vain = client.mutex("a").lock_timeout(Duration::from_millis(100)).await;
    assert!(in_vain.unwrap().is_none());
    super::until_waiting(holder, 0).await;
    proxy.hold_replies(true);
    let waiting = tokio::spawn(async move { lock(&client, "a").await.release().await });
    until(async || proxy.held() > 0).await;
    let answered = Instant::now();
    if is_request_late {
        // COMMIT is on its way when the server ends the session.
        proxy.hold_requests(true);
        proxy.hold_replies(false);
        proxy.release_held();
    }
    let open = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'";
    until(async || server.run(open) == "0").await;
    let silent = answered.elapsed();
    proxy.hold_replies(false);
    proxy.hold_requests(false);
    proxy.release_held();
    super::until_waiting(holder, 1).await;
    held.release().await.unwrap();
    waiting.await.unwrap().unwrap();
    silent
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_that_the_server_ended_because_the_client_was_silent_is_run_again() {
    let server = Postgres::on_port();
    let pooler = PgBouncer::start(&server);
    let holder = client_of(&server).await;
    for (url, is_request_late) in
        [(server.url(), false), (server.url(), true), (pooler.url(), false), (pooler.url(), true)]
    {
        // The first reply may be one to the attempt before, and then there is no transaction yet.
        until(async || {
            wait_in_silence(&server, &holder, &url, is_request_late).await > Duration::from_millis(800)
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_whose_mail_is_lost_on_its_way_is_found_at_once() {
    unless_paused(Duration::from_secs(1), async || {
        let server = Postgres::on_port();
        let proxy = Proxy::before_postgres(&server);
        let holder = client_of(&server).await;
        let waiter = Client::connect(&format!("{}?pooler=yes", proxy.url())).await.unwrap();
        let held = lock(&holder, "a").await;
        let waiting = tokio::spawn(async move { (lock(&waiter, "a").await, waiter) });
        super::until_waiting(&holder, 1).await;
        server.run(
            "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1); RETURN OLD; END $$;
            CREATE TRIGGER slowly BEFORE DELETE ON leasehold.mail FOR EACH ROW EXECUTE FUNCTION slowly()",
        );
        held.release().await.unwrap();
        let sleeping = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
        until(async || server.run(sleeping) == "1").await;
        proxy.drop_replies(true);
        // The client has read it, and gets no answer.
        until(async || server.run("SELECT count(*) FROM leasehold.mail") == "0").await;
        server.run("DROP TRIGGER slowly ON leasehold.mail");
        proxy.drop_replies(false);
        proxy.cut();
        // Its next regular question is later.
        let granted = tokio::time::timeout(Duration::from_secs(6), waiting).await;
        let (guard, _waiter) = granted.expect("it asks again").unwrap();
        guard.release().await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_listens_again_gets_the_grant_of_an_entry_that_says_it_does_not() {
    unless_paused(Duration::from_secs(1), async || {
        let server = Postgres::on_port();
        let (holder, waiter) = (client_of(&server).await, client_of(&server).await);
        let held = lock(&holder, "a").await;
        let waiting: Vec<_> = (0..2)
            .map(|_| {
                let mutex = waiter.mutex("a").global_fifo();
                tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() })
            })
            .collect();
        super::until_waiting(&holder, 2).await;
        let listening = |which: &str| format!("SELECT {which} FROM pg_stat_activity WHERE {LISTENS}");
        let before = server.run(&listening("string_agg(pid::text, ',')"));
        server.run(&listening("pg_terminate_backend(pid)"));
        let new = listening(&format!("count(*) FILTER (WHERE pid NOT IN ({before}))"));
        until(async || server.run(&new) == "2").await;
        until(async || server.run("SELECT bool_or(polls) FROM leasehold.waiter") == "f").await;
        // As long as it has not asked again for this one.
        server.run(
            "UPDATE leasehold.waiter SET polls = true WHERE place = (SELECT max(place) FROM leasehold.waiter)",
        );
        held.release().await.unwrap();
        for task in waiting {
            let granted = tokio::time::timeout(Duration::from_secs(6), task).await;
            granted.expect("it looks for mail").unwrap();
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_cannot_listen_any_more_is_granted_its_locks() {
    unless_paused(Duration::from_secs(1), async || {
        let server = Postgres::on_port();
        let holder = client_of(&server).await;
        server.run("CREATE ROLE app LOGIN; GRANT USAGE ON SCHEMA leasehold TO app");
        server.run("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA leasehold TO app");
        let app = Client::connect(&server.url().replace("postgres@", "app@")).await.unwrap();
        // Its connections for commands are open.
        join_all(
            (0..8).map(async |number| lock(&app, &format!("lock {number}")).await.release().await.unwrap()),
        )
        .await;
        let held = lock(&holder, "a").await;
        let waiting = tokio::spawn({
            let app = app.clone();
            async move { lock(&app, "a").await }
        });
        super::until_waiting(&holder, 1).await;
        server.run("ALTER ROLE app CONNECTION LIMIT 1");
        server.run(&format!(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app' AND {LISTENS}"
        ));
        until(async || server.run("SELECT bool_and(polls) FROM leasehold.waiter") == "t").await;
        held.release().await.unwrap();
        let granted = tokio::time::timeout(Duration::from_secs(10), waiting).await;
        granted.expect("it finds its grant in a table").unwrap().release().await.unwrap();
    })
    .await;
}

/// Any role that may connect can take it once the client has lost its connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_of_a_listener_that_a_stranger_holds_costs_no_sessions() {
    let server = Postgres::builder().setting("log_connections=on").start();
    server.run("CREATE ROLE app LOGIN; CREATE ROLE stranger LOGIN; GRANT CREATE ON DATABASE postgres TO app");
    let app = Client::connect(&server.url().replace("postgres@", "app@")).await.unwrap();
    lock(&app, "a").await.release().await.unwrap();
    let key = server.run(&format!(
        "SELECT (classid::int8 << 32) | objid::int8 FROM pg_locks WHERE locktype = 'advisory' AND {LISTENS}"
    ));
    let (stranger, connection) =
        connect(&server.url().replace("postgres@", "stranger@"), NoTls).await.unwrap();
    tokio::spawn(connection);
    let take = format!("SELECT pg_advisory_lock({key})");
    let taken = tokio::spawn(async move {
        stranger.batch_execute(&take).await.unwrap();
        stranger
    });
    until(async || {
        server.run("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted") == "1"
    })
    .await;
    server.run("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted");
    let _stranger = taken.await.unwrap();
    let connects = || server.log().matches("connection authorized: user=app").count();
    let before = connects();
    until(async || connects() >= before + 4).await;
    let waiting = server.run("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted");
    assert_eq!(waiting, "0", "no session waits for the stranger");
    let sessions = server.run("SELECT count(*) FROM pg_stat_activity WHERE usename = 'app'");
    assert!(sessions.parse::<u32>().unwrap() <= 3, "{sessions}");
    lock(&app, "a").await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_that_waits_for_a_standby_grants_nothing() {
    let server = Postgres::on_port();
    let (client, other) = (client_of(&server).await, client_of(&server).await);
    let guard = client.mutex("a").ttl(Duration::from_secs(60)).lock().await.unwrap();
    let mut waiter = tokio::spawn(async move { other.mutex("a").global_fifo().lock().await });
    until(async || client.mutex("a").inspect().await.is_ok_and(|view| view.waiters.len() == 1)).await;
    server.run("ALTER SYSTEM SET synchronous_standby_names = 'gone'");
    server.run("SELECT pg_reload_conf()");
    until(async || server.run("SHOW synchronous_standby_names") == "gone").await;
    let release = tokio::spawn(guard.release());
    // Longer than a command may take.
    assert!(
        tokio::time::timeout(Duration::from_secs(8), &mut waiter).await.is_err(),
        "no standby has the grant"
    );
    server.run("ALTER SYSTEM RESET synchronous_standby_names");
    server.run("SELECT pg_reload_conf()");
    waiter.await.unwrap().unwrap().release().await.unwrap();
    drop(release.await.unwrap());
}

#[tokio::test]
async fn database_with_another_encoding_is_refused() {
    let server = Postgres::on_port();
    server.run("CREATE DATABASE old ENCODING 'LATIN1' TEMPLATE template0 LOCALE 'C'");
    let error = refusal(&format!("{}/old", server.url().trim_end_matches("/postgres"))).await;
    assert!(error.to_string().contains("UTF8"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_behind_a_pooler_send_no_more_than_their_clients_do() {
    const SPAN: Duration = Duration::from_secs(5);
    let server = Postgres::on_port();
    let pooler = PgBouncer::start(&server);
    let holder = client_of(&server).await;
    let held = holder.mutex("a").ttl(Duration::from_secs(60)).lock().await.unwrap();
    let clients = join_all((0..3).map(async |_| Client::connect(&pooler.url()).await.unwrap())).await;
    let mut waiting: FuturesUnordered<_> = (0..300)
        .map(|number| {
            let mutex = clients[number % 3].mutex("a").global_fifo();
            // The row of the lock may be busy for longer than a command waits for it, if the machine is.
            tokio::spawn(async move {
                loop {
                    match mutex.lock().await {
                        Ok(guard) => break drop(guard.release().await),
                        Err(error) => assert!(error.is_unavailable(), "{error}"),
                    }
                }
            })
        })
        .collect();
    super::until_waiting(&holder, 300).await;
    let count = || -> u64 {
        let sql = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = 'postgres'";
        server.run(sql).parse().unwrap()
    };
    let (before, begun) = (count(), Instant::now());
    tokio::time::sleep(SPAN).await;
    let per_second = Duration::from_secs(count() - before).div_duration_f64(begun.elapsed());
    assert!(per_second < 100.0, "{per_second} transactions a second");
    held.release().await.unwrap();
    while let Some(task) = tokio::time::timeout(LONG, waiting.next()).await.expect("the next is granted") {
        task.unwrap();
    }
}

/// A name or a virtual address that moves, while the connections to the earlier server go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_connection_to_another_server_makes_the_client_leave_the_earlier_one() {
    let (first, second) = (Postgres::on_port(), Postgres::on_port());
    // It creates the tables.
    client_of(&second).await.close().await.unwrap();
    let proxy = Proxy::before_postgres(&first);
    let client = Client::connect(&proxy.url()).await.unwrap();
    let guard = client.mutex("a").ttl(LONG).lock_timeout(LONG).await.unwrap().expect("it is free");
    proxy.redirect_to(second.port());
    // Commands that take long have all of the client's connections, so that one more needs another connection.
    let (database, connection) = connect(&first.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    database.batch_execute("BEGIN; LOCK TABLE leasehold.resource IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let slow: Vec<_> = (0..=proxy.connections())
        .map(|number| {
            let mutex = client.mutex(format!("slow {number}")).ttl(LONG);
            tokio::spawn(async move { mutex.try_lock().await })
        })
        .collect();
    // Long before the next renewal is due.
    let lost = tokio::time::timeout(LONG / 6, guard.lost()).await;
    assert!(lost.is_ok(), "the holder is not told that its lease is at the earlier server");
    let other = client.mutex("a").ttl(LONG).lock_timeout(LONG).await.unwrap().expect("it is free there");
    database.batch_execute("ROLLBACK").await.unwrap();
    // What the earlier server grants after that is not believed.
    let granted: Vec<_> = join_all(slow).await.into_iter().filter_map(|slow| slow.unwrap().ok()?).collect();
    assert!(!granted.is_empty());
    let held = "SELECT count(*) FROM leasehold.resource WHERE name LIKE 'slow%' AND leases > 0";
    assert!(second.run(held).parse::<usize>().unwrap() >= granted.len(), "{granted:?}");
    let sessions =
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%leasehold%' AND pid <> pg_backend_pid()";
    drop(database);
    until(async || first.run(sessions) == "0").await;
    other.release().await.unwrap();
}

/// The address of the commands moves, and what `listen=` names does not: the client listens where nothing arrives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_whose_listener_is_left_at_the_earlier_server_gets_its_turn() {
    for pooler in ["no", "yes"] {
        let (first, second) = (Postgres::on_port(), Postgres::on_port());
        let rivals = [client_of(&second).await, client_of(&second).await];
        let proxy = Proxy::before_postgres(&first);
        let url = format!("{}?pooler={pooler}&listen={}", proxy.url(), first.url());
        let client = Client::connect(&url).await.unwrap();
        lock(&client, "other").await.release().await.unwrap();
        // A stranger holds the lock there that shows that the client listens.
        let key =
            first.run("SELECT (classid::int8 << 32) | objid::int8 FROM pg_locks WHERE locktype = 'advisory'");
        let _stranger =
            second.session(&format!("SELECT pg_advisory_lock_shared({key}); SELECT pg_sleep(600)"));
        proxy.redirect_to(second.port());
        proxy.cut();
        let guard = rivals[0].mutex("a").lock().await.unwrap();
        let waiting = tokio::spawn({
            let mutex = client.mutex("a");
            async move { mutex.lock().await }
        });
        until(async || rivals[0].mutex("a").inspect().await.unwrap().waiters.len() == 1).await;
        let opened = proxy.opened();
        // Others hand the lock to each other.
        let is_over = Arc::new(AtomicBool::new(false));
        let rivals = rivals.map(|rival| {
            let is_over = is_over.clone();
            tokio::spawn(async move {
                while !is_over.load(Ordering::SeqCst) {
                    let mutex = rival.mutex("a");
                    let guard = mutex.lock().await.unwrap();
                    // Until another client waits.
                    let deadline = Instant::now() + LONG;
                    while !is_over.load(Ordering::SeqCst) && mutex.inspect().await.unwrap().waiters.is_empty()
                    {
                        assert!(Instant::now() < deadline, "no client waits");
                    }
                    guard.release().await.unwrap();
                }
            })
        });
        guard.release().await.unwrap();
        let granted = tokio::time::timeout(Duration::from_secs(25), waiting).await;
        granted.expect("it looks for mail").unwrap().unwrap().release().await.unwrap();
        assert!(proxy.opened() - opened < 40, "{} connections", proxy.opened() - opened);
        is_over.store(true, Ordering::SeqCst);
        for rival in rivals {
            rival.await.unwrap();
        }
        // Once both lead to one server again, it listens again.
        proxy.redirect_to(first.port());
        proxy.cut();
        let sessions = format!("SELECT count(*) FROM pg_stat_activity WHERE {LISTENS}");
        until(async || client.mutex("b").try_lock().await.is_ok() && first.run(&sessions) == "1").await;
    }
}
