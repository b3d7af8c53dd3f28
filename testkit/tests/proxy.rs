//! The proxy: it delays each direction by the given time, and drops only the given bytes.

use std::thread;
use std::time::{Duration, Instant};

use leasehold_testkit::{Proxy, Server, wait_until};
use redis::{Commands as _, Connection, RedisResult};

const TIMEOUT: Duration = Duration::from_secs(10);

fn try_connect(proxy: &Proxy) -> RedisResult<Connection> {
    let connection = redis::Client::open(proxy.url())?.get_connection_with_timeout(TIMEOUT)?;
    connection.set_read_timeout(Some(TIMEOUT))?;
    Ok(connection)
}

fn ping(connection: &mut Connection) -> RedisResult<String> {
    redis::cmd("PING").query(connection)
}

/// The shortest of many round trips, which excludes the delays of a busy machine.
fn round_trip(connection: &mut Connection) -> Duration {
    let trip = |_| {
        let began = Instant::now();
        ping(connection).unwrap();
        began.elapsed()
    };
    (0..60).map(trip).min().unwrap()
}

#[test]
fn by_default_everything_passes_in_both_directions() {
    let server = Server::builder().password("s3cret").start();
    let proxy = Proxy::before(&server);
    let mut connection = try_connect(&proxy).unwrap();
    let value = vec![b'x'; 3_000_000];
    let _: () = connection.set("a", &value).unwrap();
    let found: Vec<u8> = connection.get("a").unwrap();
    assert!(found == value && proxy.dropped() == 0);
    drop(connection);
    wait_until("the connection is over", || proxy.connections() == 0);
}

#[test]
fn each_direction_is_delayed_by_the_given_time_and_little_more() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let mut connection = try_connect(&proxy).unwrap();
    let bare = round_trip(&mut connection);
    let (there, back) = (Duration::from_millis(3), Duration::from_millis(5));
    let mut is_delayed_by = |delay: Duration| {
        // Other work on the machine may begin after the first measurement, and last for some time.
        wait_until("a round trip takes little more than its delay", || {
            let trip = round_trip(&mut connection);
            assert!(trip >= delay, "{trip:?} is less than {delay:?}");
            trip < bare + delay + Duration::from_millis(1)
        });
    };
    proxy.delay_requests(there);
    is_delayed_by(there);
    proxy.delay_replies(back);
    is_delayed_by(there + back);
}

#[test]
fn delays_of_several_pieces_run_in_parallel() {
    const COUNT: i64 = 1_000;
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let mut connection = try_connect(&proxy).unwrap();
    proxy.delay_requests(Duration::from_millis(20));
    let began = Instant::now();
    for _ in 0..COUNT {
        connection.send_packed_command(&redis::cmd("INCR").arg("a").get_packed_command()).unwrap();
        // So that each is a piece of its own.
        thread::yield_now();
    }
    for expected in 1..=COUNT {
        assert_eq!(connection.recv_response().unwrap(), redis::Value::Int(expected));
    }
    // One after the other they would take twenty seconds.
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

#[test]
fn held_reply_waits_for_its_release_and_is_overtaken_by_other_connections() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let mut held = try_connect(&proxy).unwrap();
    let mut other = try_connect(&proxy).unwrap();
    proxy.hold_replies(true);
    held.send_packed_command(&redis::cmd("INCR").arg("a").get_packed_command()).unwrap();
    wait_until("the reply is held", || proxy.held() == 1);
    proxy.hold_replies(false);
    assert_eq!(other.get::<_, i64>("a").unwrap(), 1);
    assert_eq!(proxy.held(), 1, "the other connection's reply has overtaken it");
    proxy.release_held();
    assert_eq!(held.recv_response().unwrap(), redis::Value::Int(1));
    assert_eq!(proxy.held(), 0);
}

#[test]
fn held_request_is_executed_after_its_release() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let mut connection = try_connect(&proxy).unwrap();
    proxy.hold_requests(true);
    connection.send_packed_command(&redis::cmd("INCR").arg("a").get_packed_command()).unwrap();
    wait_until("the request is held", || proxy.held() == 1);
    assert_eq!(server.admin().get::<_, Option<i64>>("a").unwrap(), None);
    proxy.release_held();
    assert_eq!(connection.recv_response().unwrap(), redis::Value::Int(1));
}

#[test]
fn dropped_replies_are_lost_although_their_commands_are_executed() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let mut connection = try_connect(&proxy).unwrap();
    proxy.drop_replies(true);
    connection.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(connection.set::<_, _, ()>("a", 1).unwrap_err().is_timeout());
    wait_until("the reply is lost", || proxy.dropped() == 1);
    assert_eq!(server.admin().get::<_, i64>("a").unwrap(), 1);
    proxy.cut();
    proxy.drop_replies(false);
    assert_eq!(ping(&mut try_connect(&proxy).unwrap()).unwrap(), "PONG");
}

#[test]
fn dropped_requests_are_never_executed() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let mut connection = try_connect(&proxy).unwrap();
    proxy.drop_requests(true);
    connection.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(connection.set::<_, _, ()>("a", 1).unwrap_err().is_timeout());
    wait_until("the request is lost", || proxy.dropped() == 1);
    assert_eq!(server.admin().get::<_, Option<i64>>("a").unwrap(), None);
}

#[test]
fn cut_closes_connections_at_once_even_with_bytes_in_flight_and_new_ones_work() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let mut connections: Vec<Connection> = (0..5).map(|_| try_connect(&proxy).unwrap()).collect();
    assert_eq!(proxy.connections(), 5);
    proxy.delay_requests(Duration::from_secs(3600));
    connections[0].send_packed_command(&redis::cmd("PING").get_packed_command()).unwrap();
    let began = Instant::now();
    proxy.cut();
    for connection in &mut connections {
        assert!(ping(connection).is_err());
    }
    assert!(began.elapsed() < Duration::from_secs(5) && proxy.connections() == 0);
    proxy.delay_requests(Duration::ZERO);
    assert_eq!(ping(&mut try_connect(&proxy).unwrap()).unwrap(), "PONG");
}

#[test]
fn refuse_rejects_new_connections_and_keeps_open_ones() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    let mut connection = try_connect(&proxy).unwrap();
    for _ in 0..3 {
        proxy.refuse(true);
        let Err(error) = try_connect(&proxy) else { panic!("it was let in") };
        assert!(error.is_connection_refusal(), "{error}");
        assert_eq!(ping(&mut connection).unwrap(), "PONG");
        proxy.refuse(false);
        assert_eq!(ping(&mut try_connect(&proxy).unwrap()).unwrap(), "PONG");
    }
    let url = proxy.url();
    drop(proxy);
    assert!(ping(&mut connection).is_err());
    assert!(redis::Client::open(url).unwrap().get_connection().is_err());
}

#[test]
fn drop_messages_drops_matching_messages_only() {
    let server = Server::on_port();
    let proxy = Proxy::before(&server);
    for protocol in ["", "?protocol=resp3"] {
        let dropped = proxy.dropped();
        let client = redis::Client::open(format!("{}{protocol}", proxy.url())).unwrap();
        let mut connection = client.get_connection_with_timeout(TIMEOUT).unwrap();
        let mut inbox = connection.as_pubsub();
        inbox.set_read_timeout(Some(TIMEOUT)).unwrap();
        inbox.subscribe("letters").unwrap();
        proxy.drop_messages(Some(b"grant"));
        for message in ["one", "a grant", "two", "granted", "three"] {
            let receivers: i64 = server.admin().publish("letters", message).unwrap();
            assert_eq!(receivers, 1);
        }
        for expected in ["one", "two", "three"] {
            assert_eq!(inbox.get_message().unwrap().get_payload::<String>().unwrap(), expected);
        }
        assert_eq!(proxy.dropped() - dropped, 2);
        proxy.drop_messages(None);
        let _: i64 = server.admin().publish("letters", "granted").unwrap();
        assert_eq!(inbox.get_message().unwrap().get_payload::<String>().unwrap(), "granted");
    }
}

#[test]
fn a_restarted_server_is_reachable_through_the_proxy() {
    let mut server = Server::on_port();
    let proxy = Proxy::before(&server);
    let mut connection = try_connect(&proxy).unwrap();
    server.stop();
    assert!(ping(&mut connection).is_err());
    assert!(try_connect(&proxy).and_then(|mut connection| ping(&mut connection)).is_err());
    server.start();
    assert_eq!(ping(&mut try_connect(&proxy).unwrap()).unwrap(), "PONG");
}
