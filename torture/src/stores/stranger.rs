//! Another user of a Redis server, or of the masters of a cluster, without a right to any key: it lists the channels, listens, publishes what
//! it likes, and repeats what it has heard.

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use leasehold_testkit::Server;
use redis::{Client, RedisResult, Value};

use super::injection::{Done, Injection};
use crate::rng::Rng;

/// How long it listens before it publishes again.
const LISTENS: Duration = Duration::from_millis(2);

/// Its user.
const NAME: &str = "stranger";

/// The commands for a kind of channels.
pub(super) struct Channels {
    list: &'static str,
    subscribe: &'static str,
    publish: &'static str,
}

pub(super) const PLAIN: Channels = Channels { list: "CHANNELS", subscribe: "SUBSCRIBE", publish: "PUBLISH" };

/// Of a cluster.
pub(super) const SHARDED: Channels =
    Channels { list: "SHARDCHANNELS", subscribe: "SSUBSCRIBE", publish: "SPUBLISH" };

/// Publishes for a while on each of these servers.
pub(super) fn publish<'s>(
    servers: impl IntoIterator<Item = &'s Server>,
    channels: &Channels,
    injection: &mut Injection<'_>,
) -> Done {
    let time = injection.duration(20, 150);
    let mut sent = 0;
    for server in servers {
        sent += stranger(server, channels, time, injection.rng).map_err(|error| error.to_string())?;
    }
    if sent == 0 {
        return Err("it has found no channel".to_owned());
    }
    Ok(format!("{sent} messages in {} ms", time.as_millis()))
}

fn stranger(server: &Server, names: &Channels, time: Duration, rng: &mut Rng) -> RedisResult<u64> {
    let rights = ["reset", "on", "nopass", "~other:*", "&*", "+@all", "-@dangerous"];
    server.query::<Value>(&[&["ACL", "SETUSER", NAME][..], &rights].concat())?;
    let address = server.url();
    let client = Client::open(address.replace("redis://", &format!("redis://{NAME}:any@")))?;
    let (mut commands, mut listening) = (client.get_connection()?, client.get_connection()?);
    listening.set_read_timeout(Some(LISTENS))?;
    let (mut subscribed, mut overheard, mut sent) = (BTreeSet::new(), Vec::<Vec<u8>>::new(), 0);
    let ends = Instant::now() + time;
    while Instant::now() < ends {
        let channels: Vec<String> =
            redis::cmd("PUBSUB").arg(names.list).arg("leasehold:*").query(&mut commands)?;
        for channel in &channels {
            if subscribed.insert(channel.clone()) {
                listening
                    .send_packed_command(&redis::cmd(names.subscribe).arg(channel).get_packed_command())?;
            }
        }
        while let Ok(reply) = listening.recv_response() {
            overheard.extend(message_of(reply));
            if overheard.len() > 64 {
                overheard.remove(0);
            }
            if Instant::now() >= ends {
                break;
            }
        }
        for channel in &channels {
            let message = forge(&overheard, rng);
            redis::cmd(names.publish).arg(channel).arg(message).exec(&mut commands)?;
            sent += 1;
        }
    }
    server.query::<Value>(&["ACL", "DELUSER", NAME])?;
    Ok(sent)
}

/// What was published; nothing of a confirmation.
fn message_of(reply: Value) -> Option<Vec<u8>> {
    let (Value::Array(mut parts) | Value::Push { data: mut parts, .. }) = reply else { return None };
    match parts.pop() {
        Some(Value::BulkString(message)) if parts.len() == 2 => Some(message),
        _ => None,
    }
}

/// A message that was heard, as it was or with another kind or number; or a new one.
fn forge(overheard: &[Vec<u8>], rng: &mut Rng) -> Vec<u8> {
    if !overheard.is_empty() && rng.index(2) == 0 {
        let mut message = overheard[rng.index(overheard.len())].clone();
        if rng.index(2) == 0 && !message.is_empty() {
            let at = rng.index(message.len());
            message[at] = message[at].wrapping_add(1);
        }
        return message;
    }
    let micros = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_micros());
    #[allow(clippy::cast_precision_loss, reason = "times are below 2^53")]
    let now = micros as f64;
    let token = [now / 1e3 * 2_048.0, 9_007_199_254_740_990.0][rng.index(2)].floor();
    let kind = u8::try_from(rng.between(1, 4)).unwrap_or(1);
    // Most of the attempts that were heard of.
    let sequence =
        match overheard.get(rng.index(overheard.len().max(1))).and_then(|message| message.get(1..9)) {
            Some(sequence) => sequence.to_vec(),
            None => rng.between(1, 100).to_be_bytes().to_vec(),
        };
    let numbers: Vec<u8> = match kind {
        1 => [now, token, token, 6e8],
        _ => [now, [0.0, now, now + 3.6e9][rng.index(3)], 0.0, 0.0],
    }
    .into_iter()
    .flat_map(f64::to_be_bytes)
    .collect();
    // Of a digest the first 16 digits are the proof.
    let proof = format!("{:016x}{:024x}", rng.bits(), 0);
    let proof = if kind == 1 { proof.as_bytes() } else { &[] };
    [&[kind][..], &sequence, &numbers, proof].concat()
}
