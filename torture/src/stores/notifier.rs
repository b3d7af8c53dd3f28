//! Another role of a PostgreSQL server, without a right to any table: it listens, notifies, and repeats what it has heard. PostgreSQL does
//! not list the channels of others, so it is told them.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold::tokio_postgres::{AsyncMessage, Client, Error, NoTls, connect};
use leasehold_testkit::Postgres;
use sha1_smol::Sha1;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{Instant, sleep};

use super::injection::{Done, Injection};
use crate::rng::Rng;

/// How long it listens before it notifies again.
const LISTENS: Duration = Duration::from_millis(2);

const ROLE: &str =
    "DO $$ BEGIN CREATE ROLE stranger LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$";

/// The clients that have something, by their ids, which no other role reads.
const CLIENTS: &str = "SELECT encode(client, 'hex') FROM leasehold.waiter UNION SELECT encode(client, 'hex') FROM leasehold.resource
    WHERE client IS NOT NULL";

/// Notifies for a while.
pub(super) fn notify(server: &Postgres, injection: &mut Injection<'_>) -> Done {
    let time = injection.duration(20, 150);
    server.try_run(ROLE)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let sent = runtime.block_on(stranger(server, time, injection.rng))?;
    if sent == 0 {
        return Err("there was no client".to_owned());
    }
    Ok(format!("{sent} messages in {} ms", time.as_millis()))
}

async fn stranger(server: &Postgres, time: Duration, rng: &mut Rng) -> Result<u64, String> {
    let url = server.url().replace("postgres@", "stranger@");
    let (role, mut notifications) = listen(&url).await.map_err(|error| error.to_string())?;
    let (mut channels, mut overheard, mut sent) = (BTreeSet::new(), Vec::<String>::new(), 0);
    let ends = Instant::now() + time;
    while Instant::now() < ends {
        for client in server.try_run(CLIENTS)?.lines() {
            let channel = channel_of(client);
            if channels.insert(channel.clone()) {
                let listened = role.batch_execute(&format!("LISTEN {channel}")).await;
                listened.map_err(|error| error.to_string())?;
            }
        }
        sleep(LISTENS).await;
        while let Ok(text) = notifications.try_recv() {
            overheard.push(text);
            if overheard.len() > 64 {
                overheard.remove(0);
            }
        }
        for channel in &channels {
            let text = forge(&overheard, rng);
            let sending = role.execute("SELECT pg_notify($1, $2)", &[channel, &text]).await;
            sending.map_err(|error| error.to_string())?;
            sent += 1;
        }
    }
    Ok(sent)
}

/// A session, and the texts that it hears.
async fn listen(url: &str) -> Result<(Client, UnboundedReceiver<String>), Error> {
    let (role, mut connection) = connect(url, NoTls).await?;
    let (forward, overheard) = unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
            if let AsyncMessage::Notification(notification) = message
                && forward.send(notification.payload().to_owned()).is_err()
            {
                return;
            }
        }
    });
    Ok((role, overheard))
}

/// The name of a client's channel.
fn channel_of(client: &str) -> String {
    let mut hash = Sha1::new();
    hash.update(b"channel");
    let bytes =
        (0..client.len() / 2).filter_map(|at| u8::from_str_radix(client.get(2 * at..2 * at + 2)?, 16).ok());
    hash.update(&bytes.collect::<Vec<_>>());
    format!("leasehold_{}", &hash.digest().to_string()[..32])
}

/// A message that was heard, as it was or for another attempt; or a new one.
fn forge(overheard: &[String], rng: &mut Rng) -> String {
    // Most of the attempts that were heard of.
    let known = overheard.get(rng.index(overheard.len())).and_then(|text| text.split_once(' '));
    if let (Some((_, rest)), 0) = (known, rng.index(2)) {
        return match rng.index(2) {
            0 => overheard[rng.index(overheard.len())].clone(),
            _ => format!("{} {rest}", rng.between(1, 100)),
        };
    }
    let sequence = known.map_or_else(|| rng.between(1, 100).to_string(), |(sequence, _)| sequence.to_owned());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_micros());
    let token = [now, 9_007_199_254_740_990][rng.index(2)];
    let time = [0, now, now + 3_600_000_000][rng.index(3)];
    match rng.index(4) {
        0 => format!("{sequence} {now} granted {token} {token} 600000000 {}", rng.bits()),
        1 => format!("{sequence} {now} next {time}"),
        2 => format!("{sequence} {now} revoked"),
        _ => format!("{sequence} {now} contended"),
    }
}
