//! A role without any right to leasehold's tables: it reads what others run, and the server's log, listens, and notifies.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use leasehold::tokio_postgres::{AsyncMessage, Client as Database, NoTls, connect};
use leasehold::{Client, Guard, Mutex};
use leasehold_testkit::{Postgres, unless_paused};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{LONG, client_of, until_waiting};

/// A role that may connect, and read the statistics of other sessions.
struct Stranger {
    commands: Database,
    /// What it has overheard.
    received: UnboundedReceiver<String>,
    /// The channels on which it listens.
    channels: BTreeSet<String>,
}

impl Stranger {
    async fn connect(server: &Postgres) -> Self {
        server.run("CREATE ROLE stranger LOGIN IN ROLE pg_read_all_stats");
        let url = server.url().replace("postgres@", "stranger@");
        let (commands, mut connection) = connect(&url, NoTls).await.unwrap();
        let (forward, received) = unbounded_channel();
        tokio::spawn(async move {
            while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
                if let AsyncMessage::Notification(notification) = message
                    && forward.send(notification.payload().to_owned()).is_err()
                {
                    return;
                }
            }
        });
        Self { commands, received, channels: BTreeSet::new() }
    }

    /// Finds the channels that others name in their statements, and in the server's log, and listens to them.
    async fn spy(&mut self, log: &str) {
        let found =
            "SELECT DISTINCT (regexp_matches(query, 'leasehold_[0-9a-f]{32}', 'g'))[1] FROM pg_stat_activity";
        let rows = self.commands.query(found, &[]).await.unwrap();
        let seen = rows.iter().map(|row| row.get::<_, String>(0));
        let logged = log.match_indices("leasehold_").filter_map(|(at, prefix)| {
            let name = log.get(at..at + prefix.len() + 32)?;
            name[prefix.len()..].bytes().all(|byte| byte.is_ascii_hexdigit()).then(|| name.to_owned())
        });
        self.channels = seen.chain(logged).collect();
        for channel in &self.channels {
            self.commands.batch_execute(&format!("LISTEN {channel}")).await.unwrap();
        }
    }

    /// Sends each text to each channel.
    async fn send(&self, texts: &[String]) {
        for channel in &self.channels {
            for text in texts {
                self.commands.execute("SELECT pg_notify($1, $2)", &[channel, text]).await.unwrap();
            }
        }
    }
}

/// Forged messages of every kind to the first attempts of a client.
fn forged() -> Vec<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
    let (highest, far) = (9_007_199_254_740_990_u64, now + 3_600_000_000);
    let to = |sequence: u32| {
        [
            format!("{sequence} {now} granted {highest} {highest} 600000000 1"),
            format!("{sequence} {now} granted {now} {now} 3000000 {}", u64::MAX),
            format!("{sequence} {now} granted {now} {now} 600000000"),
            format!("{sequence} {now} next {now}"),
            format!("{sequence} {now} next {far}"),
            format!("{sequence} {far} next {far}"),
            format!("{sequence} {now} revoked"),
            format!("{sequence} {now} contended"),
        ]
    };
    let junk = ["", "anything", "1", "1 2 granted 0 1 1", "\u{202e} -1 revoked"].map(str::to_owned);
    (1..=6).flat_map(to).chain(junk).collect()
}

fn waiting(mutex: Mutex) -> JoinHandle<Guard> {
    tokio::spawn(async move { mutex.lock_timeout(LONG).await.unwrap().expect("it is free soon") })
}

fn mutex(client: &Client) -> Mutex {
    client.mutex("a").ttl(Duration::from_secs(60))
}

/// Otherwise a connection that is slow or hangs would be kept for as long as it is sent something.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listener_asks_its_server_also_while_a_stranger_notifies() {
    let server = Postgres::builder().setting("log_statement=all").start();
    let _client = client_of(&server).await;
    let mut stranger = Stranger::connect(&server).await;
    stranger.spy(&server.log()).await;
    assert_eq!(stranger.channels.len(), 1);
    let began = Instant::now();
    while !server.log().contains("pg_listening_channels") {
        assert!(began.elapsed() < Duration::from_secs(40), "it was never asked");
        stranger.send(&["900001 1 revoked".to_owned()]).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stranger_who_notifies_grants_nothing_ends_nothing_and_delays_nothing() {
    unless_paused(Duration::from_secs(1), async || {
        // Someone may have shown it the server's log.
        let server = Postgres::builder().setting("log_statement=all").start();
        let (holder, waiter) = (client_of(&server).await, client_of(&server).await);
        let guard = mutex(&holder).lock().await.unwrap();
        let waits = waiting(mutex(&waiter));
        until_waiting(&holder, 1).await;
        let mut stranger = Stranger::connect(&server).await;
        stranger.spy(&server.log()).await;
        assert_eq!(stranger.channels.len(), 2, "{:?}", stranger.channels);
        assert!(stranger.commands.execute("SELECT * FROM leasehold.resource", &[]).await.is_err());
        for _ in 0..5 {
            stranger.send(&forged()).await;
        }
        assert!(!waits.is_finished() && guard.is_held());
        let view = holder.mutex("a").inspect().await.unwrap();
        assert_eq!((view.holders.len(), view.waiters.len()), (1, 1));

        // It hears a genuine grant, which counts once.
        let own: BTreeSet<String> = forged().into_iter().collect();
        let first = guard.token();
        guard.release().await.unwrap();
        let second = timeout(LONG, waits).await.unwrap().unwrap();
        assert!(second.token() > first);
        let is_genuine = |text: &String| {
            let numbers: Vec<&str> = text.split(' ').collect();
            numbers.len() == 7 && numbers[3] == second.token().to_string() && !own.contains(text)
        };
        let received = loop {
            let text = timeout(LONG, stranger.received.recv()).await.unwrap().unwrap();
            if is_genuine(&text) {
                break text;
            }
        };
        second.release().await.unwrap();
        let guard = mutex(&holder).lock().await.unwrap();
        let waits = waiting(mutex(&waiter));
        until_waiting(&holder, 1).await;
        let (_, rest) = received.split_once(' ').unwrap();
        let replays: Vec<String> = (1..=12).map(|sequence| format!("{sequence} {rest}")).collect();
        stranger.send(&replays).await;
        stranger.send(&forged()).await;
        // The server answers after it has passed the notifications on.
        assert!(mutex(&waiter).inspect().await.unwrap().waiters.len() == 1);
        assert!(!waits.is_finished() && guard.is_held());
        guard.renew().await.unwrap();
        guard.release().await.unwrap();
        timeout(LONG, waits).await.unwrap().unwrap().release().await.unwrap();

        // No push announces the end of this lease, and forged hints say that it comes much later.
        holder.mutex("a").ttl(Duration::from_secs(3)).lock().await.unwrap().detach().await.unwrap();
        let began = Instant::now();
        let waits = waiting(mutex(&waiter));
        until_waiting(&holder, 1).await;
        stranger.send(&forged()).await;
        timeout(LONG, waits).await.unwrap().unwrap().release().await.unwrap();
        assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    })
    .await;
}
