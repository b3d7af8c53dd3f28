//! Sentinels: that they find a new master when asked, and when the old one dies.

use leasehold_testkit::{Flavor, Sentinels, Server};
use redis::Commands as _;

/// What a client would be told by the sentinels of an address.
fn master_by(sentinels: &Sentinels) -> u16 {
    let ports: Vec<u16> = sentinels
        .sentinels
        .iter()
        .map(|sentinel| {
            let (_, port): (String, u16) =
                sentinel.query(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", Sentinels::SERVICE]).unwrap();
            port
        })
        .collect();
    assert!(ports.iter().all(|port| *port == ports[0]), "{ports:?}");
    ports[0]
}

#[test]
fn a_planned_failover_promotes_a_replica_with_all_data() {
    let sentinels = Sentinels::start();
    let hosts: Vec<String> =
        sentinels.sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.port())).collect();
    assert_eq!(sentinels.url("locks"), format!("redis-sentinel://{}/locks", hosts.join(",")));
    let old = sentinels.master_number();
    let mut admin = sentinels.master().admin();
    let _: () = admin.set("a", 1).unwrap();
    assert_eq!(redis::cmd("WAIT").arg(2).arg(50_000).query::<i64>(&mut admin).unwrap(), 2);
    let new = sentinels.fail_over();
    assert_ne!(old, new);
    assert_eq!(master_by(&sentinels), sentinels.servers[new].port());
    assert_eq!(sentinels.master().admin().get::<_, Option<i64>>("a").unwrap(), Some(1));
    let _: () = sentinels.master().admin().set("b", 1).unwrap();
}

#[test]
fn a_killed_master_is_replaced_with_every_flavor() {
    for flavor in Flavor::ALL {
        let builder = Server::builder().flavor(flavor);
        let mut sentinels = Sentinels::of(&builder, &builder);
        let old = sentinels.master_number();
        let new = sentinels.kill_master();
        assert_ne!(old, new);
        assert_eq!(master_by(&sentinels), sentinels.servers[new].port());
    }
}

#[test]
fn a_frozen_master_is_replaced_and_resumes_as_a_master() {
    let sentinels = Sentinels::start();
    let old = sentinels.master_number();
    let new = sentinels.freeze_master();
    assert_ne!(old, new);
    assert_eq!(master_by(&sentinels), sentinels.servers[new].port());
    sentinels.servers[old].signal("CONT");
    let info: redis::InfoDict = sentinels.servers[old].query(&["INFO", "replication"]).unwrap();
    assert_eq!(info.get::<String>("role").unwrap(), "master");
}

#[test]
fn servers_and_sentinels_support_different_passwords() {
    let mut sentinels =
        Sentinels::of(&Server::builder().password("s3cret"), &Server::builder().password("watcher"));
    let url = sentinels.url("locks");
    assert!(url.starts_with("redis-sentinel://:s3cret@127.0.0.1:"), "{url}");
    assert!(url.ends_with("/locks?sentinel_password=watcher"), "{url}");
    for (server, password) in [(&sentinels.servers[0], "s3cret"), (&sentinels.sentinels[0], "watcher")] {
        let at = |login: &str| {
            let url = format!("redis://{login}127.0.0.1:{}", server.port());
            redis::Client::open(url)
                .unwrap()
                .get_connection()
                .and_then(|mut connection| redis::cmd("PING").query::<String>(&mut connection))
        };
        assert_eq!(at("").unwrap_err().code(), Some("NOAUTH"));
        assert_eq!(at(&format!(":{password}@")).unwrap(), "PONG");
    }
    sentinels.kill_master();
}
