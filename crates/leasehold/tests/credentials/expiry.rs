//! Credentials that expire, at servers that end the connections which still use them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use leasehold::bridge::Foreign;
use leasehold::{Client, Credentials};
use leasehold_testkit::{Server, until, until_some};

use super::{Place, RIGHTS, SOON};

/// How long credentials last, as their provider says.
const LIFETIME: Duration = Duration::from_secs(2);

/// How long the server accepts them after that. A busy machine must not make a connection log in too late.
const GRACE: Duration = Duration::from_secs(4);

/// Each credentials are of another user. The server deletes a user that has expired, and ends its connections.
struct Tokens {
    place: Place,
    count: AtomicUsize,
    /// By user.
    expires: Mutex<BTreeMap<String, Instant>>,
}

impl Tokens {
    fn give(&self, port: Option<u16>) -> Credentials {
        let user = format!("user-{}", self.count.fetch_add(1, Ordering::SeqCst));
        let servers = self.place.servers();
        let server = servers.iter().find(|server| Some(server.port()) == port).expect("a known server");
        server.run(&[&["ACL", "SETUSER", &user, ">password"][..], &RIGHTS].concat());
        self.expires.lock().unwrap().insert(user.clone(), Instant::now() + LIFETIME + GRACE);
        Credentials::new("password").user(user).valid_for(LIFETIME)
    }

    fn users(&self) -> BTreeSet<String> {
        self.expires.lock().unwrap().keys().cloned().collect()
    }

    fn delete_expired(&self) {
        let mut expires = self.expires.lock().unwrap();
        let due: Vec<String> =
            expires.iter().filter(|(_, at)| **at <= Instant::now()).map(|(user, _)| user.clone()).collect();
        for user in due {
            self.place.servers().iter().for_each(|server| drop(server.run(&["ACL", "DELUSER", &user])));
            expires.remove(&user);
        }
    }

    /// The connections that log in with these credentials: server, number at the server.
    fn connections(&self) -> BTreeSet<(u16, String)> {
        let of = |server: &&Server| {
            let list: String = server.query(&["CLIENT", "LIST"]).unwrap();
            let own = list.lines().filter(|line| line.contains(" user=user-"));
            let id = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
            own.map(|line| (server.port(), id(line))).collect::<Vec<_>>()
        };
        self.place.servers().iter().flat_map(of).collect()
    }
}

async fn connections_log_in_before_their_credentials_expire(place: Place, parameter: &str) {
    let name = format!("{}{parameter}", place.name());
    let url = place.url().replace("locks@", "").replace("sentinel_user=locks", "");
    let tokens = Arc::new(Tokens { place, count: AtomicUsize::new(0), expires: Mutex::default() });
    let giving = tokens.clone();
    let client = Client::builder().store(format!("{url}{parameter}")).credentials(move |request| {
        let given = giving.give(request.port);
        async move { Ok::<_, std::io::Error>(given) }
    });
    // Where there are replicas, a connection waits for them.
    let replicas = u32::from(!matches!(&tokens.place, Place::Redis(_)));
    let client = client.replicas(replicas).connect().await.unwrap();
    let mut guards = Vec::new();
    for number in 0..8 {
        let mutex = client.mutex(format!("lock {number}"));
        // A replica may still be behind.
        guards.push(until_some(async || mutex.lock().await.ok()).await);
    }
    if let Place::Redis(_) = &tokens.place {
        let foreign = Foreign::redisson_lock("foreign");
        guards.push(client.mutex("bridged").bridge(foreign).lock().await.unwrap());
    }
    // With RESP2 the connection for messages can't log in: it is opened anew.
    let replaced = usize::from(parameter.contains("protocol=2"));
    // The second round has the connections that are opened after the first command, too.
    for _ in 0..2 {
        let (before, users) = (tokens.connections(), tokens.users());
        until(async || {
            tokens.delete_expired();
            tokens.users().is_disjoint(&users)
        })
        .await;
        let after = tokens.connections();
        let lost: Vec<_> = before.difference(&after).collect();
        assert!(lost.len() <= replaced, "{name}: {lost:?} of {before:?}, now {after:?}");
        assert!(!after.is_empty(), "{name}");
    }
    assert!(tokens.count.load(Ordering::SeqCst) >= 6, "{name}");
    for guard in guards {
        assert!(guard.is_held(), "{name}");
        guard.release_timeout(SOON).await.unwrap();
    }
    until(async || client.list().await.is_ok_and(|locks| locks.is_empty())).await;
}

#[tokio::test]
async fn connections_to_a_server_log_in_again_before_their_credentials_expire() {
    connections_log_in_before_their_credentials_expire(Place::Redis(Server::on_port()), "").await;
}

#[tokio::test]
async fn connections_with_resp2_log_in_again_or_are_replaced() {
    connections_log_in_before_their_credentials_expire(Place::Redis(Server::on_port()), "?protocol=2").await;
}

#[tokio::test]
async fn connections_to_sentinels_and_nodes_log_in_again_before_their_credentials_expire() {
    let [_, sentinels, cluster, _] = Place::all();
    let sentinels = connections_log_in_before_their_credentials_expire(sentinels, "");
    let cluster = connections_log_in_before_their_credentials_expire(cluster, "");
    futures_util::future::join(sentinels, cluster).await;
}
