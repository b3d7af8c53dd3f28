//! Clients that send their commands over a connection that the program has already.

use std::time::Duration;

use leasehold::{Client, Error, StoreConfig};
use leasehold_testkit::{Proxy, Server, until};
use redis::aio::{ConnectionLike, ConnectionManager, MultiplexedConnection};

fn redis_client(url: &str) -> redis::Client {
    redis::Client::open(url).unwrap()
}

async fn multiplexed(url: &str) -> MultiplexedConnection {
    redis_client(url).get_multiplexed_async_connection().await.unwrap()
}

async fn manager(url: &str) -> ConnectionManager {
    redis_client(url).get_connection_manager().await.unwrap()
}

async fn connect<C>(server: &Server, connection: &C) -> Result<Client, Error>
where
    C: ConnectionLike + Clone + Send + Sync + 'static,
{
    let store = StoreConfig::redis_connection(redis_client(&server.url()), connection.clone());
    Client::builder().store(store).connect().await
}

async fn id_of(connection: &mut impl ConnectionLike) -> u64 {
    redis::cmd("CLIENT").arg("ID").query_async(connection).await.unwrap()
}

/// The last command of each connection of the server, by connection.
fn commands(server: &Server) -> Vec<(u64, String)> {
    let list: String = server.query(&["CLIENT", "LIST"]).unwrap();
    let field = |line: &str, name: &str| {
        let found = line
            .split(' ')
            .find_map(|field| field.strip_prefix(name).and_then(|rest| rest.strip_prefix('=')));
        found.unwrap_or_default().to_owned()
    };
    list.lines().map(|line| (field(line, "id").parse().unwrap(), field(line, "cmd"))).collect()
}

fn is_used(server: &Server, id: u64) -> bool {
    commands(server).iter().any(|(known, command)| *known == id && command.starts_with("eval"))
}

/// A lock that a client of its own sees is in the right place.
async fn lock_is_visible_to_others(client: &Client, server: &Server, name: &str) {
    let guard = client.mutex(name).lock().await.unwrap();
    let other = Client::connect(&server.url()).await.unwrap();
    let holders = other.mutex(name).inspect().await.unwrap().holders;
    assert_eq!(holders.len(), 1, "{name}");
    assert_eq!(holders[0].token, guard.token());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn commands_use_the_shared_connection_and_two_connections_are_opened() {
    let server = Server::on_port();
    let mut shared = multiplexed(&server.url()).await;
    let id = id_of(&mut shared).await;
    // Each look has a connection of its own, and that of the last one may still be there.
    let until_open = async |expected: usize| until(async || commands(&server).len() == expected + 1).await;
    until_open(1).await;
    let client = connect(&server, &shared).await.unwrap();
    until_open(3).await;
    let guard = client.mutex("a").lock().await.unwrap();
    assert!(is_used(&server, id), "{:?}", commands(&server));
    let (waiting, released) = (client.mutex("a").global_fifo(), client.mutex("a").global_fifo());
    drop(released);
    let waiter = tokio::spawn(async move { waiting.lock().await });
    until(async || client.mutex("a").inspect().await.is_ok_and(|view| view.waiters.len() == 1)).await;
    guard.release().await.unwrap();
    waiter.await.unwrap().unwrap().release().await.unwrap();
    until_open(3).await;
}

#[tokio::test]
async fn killed_shared_connection_costs_no_lock_and_a_manager_is_used_again() {
    let server = Server::on_port();
    let mut shared = manager(&server.url()).await;
    let client = connect(&server, &shared).await.unwrap();
    let held = client.mutex("held").ttl(Duration::from_secs(12)).lock().await.unwrap();
    let id = id_of(&mut shared).await;
    server.run(&["CLIENT", "KILL", "ID", &id.to_string()]);
    for number in 0..5 {
        lock_is_visible_to_others(&client, &server, &format!("after {number}")).await;
    }
    until(async || {
        let id: Result<u64, _> = redis::cmd("CLIENT").arg("ID").query_async(&mut shared).await;
        drop(client.mutex("again").try_lock().await);
        id.is_ok_and(|id| is_used(&server, id))
    })
    .await;
    // It is renewed, too.
    let mut before = held.remaining();
    until(async || {
        let now = held.remaining();
        now > std::mem::replace(&mut before, now)
    })
    .await;
    held.release().await.unwrap();

    let mut ended = multiplexed(&server.url()).await;
    let client = connect(&server, &ended).await.unwrap();
    let id = id_of(&mut ended).await;
    server.run(&["CLIENT", "KILL", "ID", &id.to_string()]);
    for number in 0..5 {
        lock_is_visible_to_others(&client, &server, &format!("without {number}")).await;
    }
}

#[tokio::test]
async fn connection_to_another_server_or_database_is_refused() {
    let (server, other) = (Server::on_port(), Server::on_port());
    let error = connect(&server, &multiplexed(&other.url()).await).await.unwrap_err();
    assert!(error.is_invalid() && error.to_string().contains("another server or database"), "{error}");
    let mut elsewhere = multiplexed(&server.url()).await;
    redis::cmd("SELECT").arg(1).query_async::<()>(&mut elsewhere).await.unwrap();
    assert!(connect(&server, &elsewhere).await.unwrap_err().is_invalid());
}

#[tokio::test]
async fn answers_do_not_count_after_the_shared_connection_went_elsewhere() {
    let (server, other) = (Server::on_port(), Server::on_port());
    let proxy = Proxy::before(&server);
    let mut shared = manager(&proxy.url()).await;
    let client = connect(&server, &shared).await.unwrap();
    lock_is_visible_to_others(&client, &server, "before").await;
    proxy.redirect_to(other.port());
    proxy.cut();
    // It is over there now, without a command of ours in between.
    redis::cmd("SET").arg("there").arg(1).query_async::<()>(&mut shared).await.ok();
    until(async || redis::cmd("SET").arg("there").arg(1).query_async::<()>(&mut shared).await.is_ok()).await;
    assert_eq!(other.query::<Option<u32>>(&["GET", "there"]).unwrap(), Some(1));
    for number in 0..5 {
        lock_is_visible_to_others(&client, &server, &format!("after {number}")).await;
    }
}

#[tokio::test]
async fn answers_do_not_count_after_another_database_was_selected() {
    let server = Server::on_port();
    let mut shared = multiplexed(&server.url()).await;
    let client = connect(&server, &shared).await.unwrap();
    redis::cmd("SELECT").arg(1).query_async::<()>(&mut shared).await.unwrap();
    for number in 0..5 {
        lock_is_visible_to_others(&client, &server, &format!("after {number}")).await;
    }
}

#[tokio::test]
async fn list_does_not_fail_after_another_database_was_selected() {
    let server = Server::on_port();
    let mut shared = multiplexed(&server.url()).await;
    let client = connect(&server, &shared).await.unwrap();
    let _guard = client.mutex("a").lock().await.unwrap();
    redis::cmd("SELECT").arg(1).query_async::<()>(&mut shared).await.unwrap();
    assert_eq!(client.list().await.unwrap().len(), 1);
}

#[tokio::test]
async fn connection_of_either_protocol_is_used() {
    let server = Server::on_port();
    for protocol in ["resp2", "resp3"] {
        let mut shared = multiplexed(&format!("{}?protocol={protocol}", server.url())).await;
        let id = id_of(&mut shared).await;
        let client = connect(&server, &shared).await.unwrap();
        lock_is_visible_to_others(&client, &server, protocol).await;
        assert!(is_used(&server, id), "{protocol}");
    }
}

#[test]
fn connection_outside_of_a_runtime_is_refused() {
    let server = Server::on_port();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let shared = runtime.block_on(multiplexed(&server.url()));
    let error = futures_util::FutureExt::now_or_never(connect(&server, &shared)).unwrap().unwrap_err();
    assert!(error.is_invalid(), "{error}");
}

#[tokio::test]
async fn lost_right_to_client_info_leaves_no_lease() {
    let server = Server::on_port();
    server.run(&["ACL", "SETUSER", "job", "on", ">pw", "~*", "&*", "+@all"]);
    let url = server.url().replace("redis://", "redis://job:pw@");
    let client = redis_client(&url);
    let shared = multiplexed(&url).await;
    let client =
        Client::builder().store(StoreConfig::redis_connection(client, shared)).connect().await.unwrap();
    server.run(&["ACL", "SETUSER", "job", "-client|info"]);
    // The server runs the command behind the refused CLIENT INFO.
    for number in 0..5 {
        lock_is_visible_to_others(&client, &server, &format!("after {number}")).await;
    }
    server.run(&["ACL", "SETUSER", "job", "+client|info"]);
    until(async || {
        lock_is_visible_to_others(&client, &server, "again").await;
        is_used_by(&server, "job") > 1
    })
    .await;
    server.run(&["ACL", "SETUSER", "job", "-client|info"]);
    drop(client.mutex("tried").ttl(Duration::from_secs(600)).try_lock().await);
    let other = Client::connect(&server.url()).await.unwrap();
    let granted = other.mutex("tried").lock_timeout(Duration::from_secs(20)).await.unwrap();
    assert!(granted.is_some(), "the lease of the discarded answer was released");
}

#[tokio::test]
async fn documented_rights_suffice_for_a_shared_connection() {
    let document = include_str!("../guide/operations.md");
    let server = Server::on_port();
    for right in ["+evalsha", "+client|info"] {
        let rule = document
            .lines()
            .find(|line| line.starts_with("ACL SETUSER") && line.split(' ').any(|word| word == right))
            .unwrap_or_else(|| panic!("no rule has {right}"));
        server.run(&rule.split(' ').collect::<Vec<_>>());
    }
    let url = server.url().replace("redis://", "redis://locks:PASSWORD@");
    let store = StoreConfig::redis_connection(redis_client(&url), multiplexed(&url).await);
    let client = Client::builder().store(store).connect().await.unwrap();
    lock_is_visible_to_others(&client, &server, "a").await;
    assert_eq!(is_used_by(&server, "locks"), 1);
}

/// How many connections of this user sent a script last.
fn is_used_by(server: &Server, user: &str) -> usize {
    let list: String = server.query(&["CLIENT", "LIST"]).unwrap();
    let user = format!(" user={user} ");
    list.lines().filter(|line| line.contains(&user) && line.contains(" cmd=eval")).count()
}

#[tokio::test]
async fn closed_client_leaves_the_shared_connection_open() {
    let server = Server::on_port();
    let mut shared = manager(&server.url()).await;
    let client = connect(&server, &shared).await.unwrap();
    let before = commands(&server);
    server.run(&["CLIENT", "KILL", "TYPE", "normal"]);
    server.run(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    // The program is idle: leasehold finds that the connection is gone, and the manager makes another one.
    until(async || {
        commands(&server).iter().filter(|new| before.iter().all(|old| old.0 != new.0)).count() >= 4
    })
    .await;
    client.close().await.unwrap();
    let id = id_of(&mut shared).await;
    assert!(before.iter().all(|(old, _)| *old != id));
}

#[test]
fn connection_in_a_runtime_without_timers_is_refused() {
    let server = Server::on_port();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    runtime.block_on(async {
        let settings =
            redis::AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        let shared = redis_client(&server.url())
            .get_multiplexed_async_connection_with_config(&settings)
            .await
            .unwrap();
        let error = connect(&server, &shared).await.map(async |client| client.mutex("a").lock().await);
        let error = match error {
            Err(error) => error,
            Ok(lock) => panic!("{:?}", lock.await),
        };
        assert!(error.is_invalid(), "{error}");
    });
}

#[test]
fn connection_of_a_runtime_that_does_not_run_is_refused() {
    let server = Server::on_port();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let shared = runtime.block_on(multiplexed(&server.url()));
    let _entered = runtime.enter();
    let error = pollster::block_on(connect(&server, &shared)).unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("does not run"), "{error}");
}
