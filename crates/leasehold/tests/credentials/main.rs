//! Credentials that a program provides, and that change while clients hold and wait for locks.

mod expiry;
mod provider;
mod rotation;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::{Client, ClientBuilder, CredentialRequest, Credentials, ServerRole};
use leasehold_testkit::{Cluster, Postgres, Sentinels, Server};

/// What may take as long as a busy machine needs.
const SOON: Duration = Duration::from_secs(60);

/// A place of locks that wants a login from everyone.
enum Place {
    Redis(Server),
    Sentinels(Sentinels),
    Cluster(Cluster),
    Postgres(Postgres),
}

/// What a user of these tests may do.
const RIGHTS: [&str; 4] = ["on", "allkeys", "allchannels", "+@all"];

impl Place {
    const EACH: [fn() -> Self; 4] = [
        || Self::Redis(Server::on_port()),
        || Self::Sentinels(Sentinels::start()),
        || Self::Cluster(Cluster::start()),
        || Self::Postgres(Postgres::builder().password("first").start()),
    ];

    fn all() -> [Self; 4] {
        Self::EACH.map(|start| start())
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Redis(_) => "redis",
            Self::Sentinels(_) => "sentinels",
            Self::Cluster(_) => "cluster",
            Self::Postgres(_) => "postgres",
        }
    }

    /// All of its Redis servers and sentinels.
    fn servers(&self) -> Vec<&Server> {
        match self {
            Self::Redis(server) => vec![server],
            Self::Sentinels(sentinels) => sentinels.servers.iter().chain(&sentinels.sentinels).collect(),
            Self::Cluster(cluster) => cluster.nodes.iter().collect(),
            Self::Postgres(_) => Vec::new(),
        }
    }

    /// Its address with the user `locks` and without a password.
    fn url(&self) -> String {
        match self {
            Self::Redis(server) => format!("redis://locks@127.0.0.1:{}", server.port()),
            Self::Sentinels(sentinels) => {
                let url = sentinels.url(Sentinels::SERVICE).replace("//", "//locks@");
                format!("{url}?sentinel_user=locks")
            }
            Self::Cluster(cluster) => cluster.url().replace("//", "//locks@"),
            Self::Postgres(server) => server.url().replace(":first@", "@"),
        }
    }

    /// The clients that are connected to receive messages, by what names them on a server.
    fn subscribers(&self) -> BTreeSet<String> {
        if let Self::Postgres(server) = self {
            let locks =
                server.run("SELECT classid, objid FROM pg_locks WHERE locktype = 'advisory' AND granted");
            return locks.lines().map(ToOwned::to_owned).collect();
        }
        let inboxes = |server: &Server| {
            ["CHANNELS", "SHARDCHANNELS"].map(|which| {
                server.query::<Vec<String>>(&["PUBSUB", which, "leasehold:*:inbox:*"]).unwrap_or_default()
            })
        };
        let inboxes = self.servers().into_iter().flat_map(inboxes).flatten();
        inboxes.filter_map(|inbox| inbox.rsplit(':').next().map(ToOwned::to_owned)).collect()
    }

    /// Makes this the only password of the user everywhere, and then closes all of its connections.
    fn rotate(&self, password: &str) {
        let set = format!(">{password}");
        for server in self.servers() {
            let words = [&["ACL", "SETUSER", "locks", "resetpass", &set][..], &RIGHTS].concat();
            server.run(&words);
        }
        for server in self.servers() {
            server.run(&["CLIENT", "KILL", "USER", "locks"]);
        }
        if let Self::Postgres(server) = self {
            server.run(&format!("ALTER ROLE postgres PASSWORD '{password}'"));
            server.run(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid()",
            );
        }
    }
}

/// Gives the password of the moment to all, and counts how often it was asked, by the role of the server.
#[derive(Clone, Default)]
struct Vault(Arc<VaultState>);

#[derive(Default)]
struct VaultState {
    password: Mutex<String>,
    calls: AtomicUsize,
    asked: Mutex<BTreeMap<&'static str, usize>>,
}

impl Vault {
    fn set(&self, password: &str) {
        password.clone_into(&mut self.0.password.lock().unwrap());
    }

    fn calls(&self) -> usize {
        self.0.calls.load(Ordering::SeqCst)
    }

    fn asked_for(&self, role: ServerRole) -> usize {
        self.0.asked.lock().unwrap().get(role.as_str()).copied().unwrap_or(0)
    }

    fn give(&self, request: &CredentialRequest) -> Credentials {
        self.0.calls.fetch_add(1, Ordering::SeqCst);
        *self.0.asked.lock().unwrap().entry(request.role.as_str()).or_default() += 1;
        Credentials::new(self.0.password.lock().unwrap().clone())
    }

    fn client(&self, place: &Place) -> ClientBuilder {
        let vault = self.clone();
        Client::builder().store(place.url()).credentials(move |request| {
            let given = vault.give(&request);
            async move { Ok::<_, std::io::Error>(given) }
        })
    }
}
