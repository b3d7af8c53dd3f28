//! Users of Redis and Valkey without one right of the documented rule.

use std::sync::Arc;

use futures_util::future::join_all;
use leasehold::Client;
use leasehold_testkit::{Cluster, Flavor, Server, unless_paused, until};

use crate::commands::{Faults, PAUSE, Trial};
use crate::{page, try_all};

const DOCUMENT: &str = include_str!("../../guide/operations.md");

/// How many rights are tried at a time.
const AT_A_TIME: usize = 6;

/// The words of the document's line with this word, from the rights on.
fn rule(word: &str) -> Vec<&'static str> {
    let mut lines = DOCUMENT.lines().filter(|line| line.starts_with("ACL SETUSER locks "));
    let line = lines.find(|line| line.split(' ').any(|part| part == word));
    let words = line.unwrap_or_else(|| panic!("no line has {word}")).split(' ').skip(3);
    words.map(|word| if word == ">PASSWORD" { ">secret" } else { word }).collect()
}

/// The whole rule of a server.
fn rule_of(flavor: Flavor) -> Vec<&'static str> {
    let mut words = rule("+evalsha");
    match flavor {
        Flavor::Valkey9 => words.extend(rule("+delifeq")),
        Flavor::Redis86 => words.extend(rule("+delex")),
        _ => {}
    }
    words
}

/// A server, or the nodes of a cluster.
enum Servers {
    /// A master and its replica.
    One(Box<[Server; 2]>),
    Cluster(Cluster),
}

impl Servers {
    async fn with_replica(flavor: Flavor) -> Self {
        let server = Server::builder().flavor(flavor).setting("repl-diskless-sync-delay", "0").start();
        let master = format!("127.0.0.1 {}", server.port());
        let replica = Server::builder().flavor(flavor).setting("replicaof", &master).start();
        let client = Client::connect(&server.url()).await.unwrap();
        until(async || client.mutex("replicated").replicas(1).try_lock().await.is_ok()).await;
        Self::One(Box::new([server, replica]))
    }

    fn nodes(&self) -> &[Server] {
        match self {
            Self::One(servers) => &servers[..1],
            Self::Cluster(cluster) => &cluster.nodes,
        }
    }

    fn url(&self) -> String {
        match self {
            Self::One(servers) => servers[0].url(),
            Self::Cluster(cluster) => cluster.url(),
        }
    }

    fn run(&self, words: &[&str]) {
        self.nodes().iter().for_each(|node| drop(node.run(words)));
    }

    /// Asserts that every key has an expiry but the clocks, which are empty streams.
    fn check(&self) {
        for node in self.nodes() {
            let keys: Vec<String> = node.query(&["KEYS", "*"]).unwrap();
            for key in keys.iter().filter(|key| !key.starts_with("leasehold:4:clock")) {
                // Replicas of a cluster do not answer.
                let left = node.query::<i64>(&["PTTL", key]);
                assert_ne!(left, Ok(-1), "{key} has no expiry");
            }
        }
    }
}

/// A user of its own for each of these rights.
fn trials(servers: &Arc<Servers>, rule: &[&'static str], left_out: &[&'static str]) -> Vec<Trial> {
    let mut trials = Vec::new();
    for (number, right) in left_out.iter().copied().enumerate() {
        let name = format!("user-{number}");
        let set = {
            let (servers, name) = (Arc::clone(servers), name.clone());
            // A user that is set up anew keeps its connections.
            move |words: &[&str]| servers.run(&[&["ACL", "SETUSER", &name, "reset"][..], words].concat())
        };
        let without: Vec<_> = rule.iter().copied().filter(|word| *word != right).collect();
        let (all, checked) = (rule.to_vec(), Arc::clone(servers));
        set(&all);
        trials.push(Trial {
            right: right.to_owned(),
            url: servers.url().replacen("//", &format!("//{name}:secret@"), 1),
            name,
            remedy: right.to_owned(),
            take_away: Box::new({
                let set = set.clone();
                move || set(&without)
            }),
            give_back: Box::new(move || set(&all)),
            check: Box::new(move || checked.check()),
            has_replicas: matches!(**servers, Servers::One(_)),
            faults: Faults::default(),
        });
    }
    trials
}

fn is_right(word: &&str) -> bool {
    word.starts_with(['+', '~', '&'])
}

async fn rows_of(flavor: Flavor) -> Vec<crate::Row> {
    let servers = Arc::new(Servers::with_replica(flavor).await);
    let rule = rule_of(flavor);
    let rights: Vec<_> = rule.iter().copied().filter(is_right).collect();
    assert!(rights.len() > 26, "{rights:?}");
    let healthy = Client::connect(&servers.url()).await.unwrap();
    try_all(&healthy, trials(&servers, &rule, &rights), AT_A_TIME).await
}

/// Each right of the rule, on each server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn right_that_a_user_of_redis_lacks_is_named_and_lets_no_second_holder_in() {
    const SERVERS: [(&str, Flavor); 4] = [
        ("Redis 6.2", Flavor::Redis62),
        ("Redis 7", Flavor::Redis7),
        ("Redis 8.6", Flavor::Redis86),
        ("Valkey 9", Flavor::Valkey9),
    ];
    unless_paused(PAUSE, async || {
        let found = SERVERS.map(async |(server, flavor)| (server, rows_of(flavor).await));
        page::compare("redis", &join_all(found).await);
    })
    .await;
}

/// The rights that only a cluster needs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn right_that_a_user_of_a_cluster_lacks_is_named_and_lets_no_second_holder_in() {
    unless_paused(PAUSE, async || {
        let servers = Arc::new(Servers::Cluster(Cluster::start()));
        let own = [rule("+asking"), rule("+ssubscribe")].concat();
        let rule = [rule("+evalsha"), own.clone()].concat();
        let healthy = Client::connect(&servers.url()).await.unwrap();
        let rows = try_all(&healthy, trials(&servers, &rule, &own), AT_A_TIME).await;
        page::compare("cluster", &[("Redis 7", rows)]);
    })
    .await;
}
