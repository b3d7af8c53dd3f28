//! Pushes as the text of notifications.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold_core::{
    Acquisition, ClientId, Grant, GrantProof, HeadHint, Push, PushKind, StoreTime, Token, TokenRange,
};
use leasehold_store::digest::channel_name;
use tokio::sync::mpsc::{Receiver, Sender, channel as channel_of};
use tokio::time::{Instant, sleep_until};
use tokio_postgres::AsyncMessage;

use super::conn::MessageHandler;
use super::params::micros;

/// The channel of a client. Other roles see its name, and not the client's id.
pub(super) fn channel(client: ClientId) -> String {
    format!("leasehold_{}", channel_name(client))
}

/// `SEQUENCE AT KIND …`, with times in microseconds.
pub(super) fn encode(push: &Push) -> String {
    let (sequence, at) = (push.acquisition.sequence, push.at.as_micros());
    match push.kind {
        PushKind::Granted(Grant { tokens, valid_for, .. }, proof) => {
            let TokenRange { first, last } = tokens;
            let proof = u64::from_be_bytes(proof.bytes());
            format!("{sequence} {at} granted {first} {last} {} {proof}", micros(valid_for))
        }
        PushKind::Next(HeadHint { repoll_at }) => format!("{sequence} {at} next {}", repoll_at.as_micros()),
        PushKind::Revoked => format!("{sequence} {at} revoked"),
        PushKind::Contended => format!("{sequence} {at} contended"),
    }
}

/// More pushes than this are not kept: whoever may notify could send them without end.
const MAX_QUEUE: usize = 1_024;

/// Each time that some were dropped, everything asks the store: not more often than this.
const DROPPED_INTERVAL: Duration = Duration::from_secs(1);

/// Takes what arrives over a connection that listens, and keeps the pushes in it, of bounded number.
pub(super) fn queue(client: ClientId) -> (MessageHandler, PushQueue) {
    let (kept, pushes) = kept_pushes(client);
    let on_message = move |message| {
        if let AsyncMessage::Notification(notification) = message {
            kept.add(notification.payload());
        }
    };
    (Arc::new(on_message), pushes)
}

fn kept_pushes(client: ClientId) -> (KeptPushes, PushQueue) {
    let (queue, pushes) = channel_of(MAX_QUEUE);
    let were_dropped = Arc::new(AtomicBool::new(false));
    let kept =
        KeptPushes { client, queue, were_dropped: were_dropped.clone(), has_warned: AtomicBool::new(false) };
    (kept, PushQueue { pushes, were_dropped, reported_at: Instant::now() })
}

struct KeptPushes {
    client: ClientId,
    queue: Sender<Push>,
    were_dropped: Arc<AtomicBool>,
    has_warned: AtomicBool,
}

impl KeptPushes {
    fn add(&self, text: &str) {
        match decode(text, self.client) {
            Some(push) => {
                // Full, or nobody listens any more.
                if self.queue.try_send(push).is_err() {
                    self.were_dropped.store(true, Ordering::SeqCst);
                }
            }
            // They do not fill the log.
            None if self.has_warned.swap(true, Ordering::Relaxed) => {
                tracing::debug!("an unknown notification arrived");
            }
            None => tracing::warn!("an unknown notification arrived: another role may have sent it"),
        }
    }
}

/// The pushes over a connection that listens.
pub(super) struct PushQueue {
    pushes: Receiver<Push>,
    were_dropped: Arc<AtomicBool>,
    /// When that was returned last.
    reported_at: Instant,
}

/// What arrived.
pub(super) enum Arrival {
    Push(Push),
    /// Pushes were dropped since the last one.
    Dropped,
}

impl PushQueue {
    /// None once the connection was closed. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<Arrival> {
        if self.were_dropped.load(Ordering::SeqCst) {
            tokio::select! {
                biased;
                () = sleep_until(self.reported_at + DROPPED_INTERVAL) => {
                    self.reported_at = Instant::now();
                    self.were_dropped.store(false, Ordering::SeqCst);
                    return Some(Arrival::Dropped);
                }
                push = self.pushes.recv() => return push.map(Arrival::Push),
            }
        }
        self.pushes.recv().await.map(Arrival::Push)
    }
}

/// A token that is further from the store's time than this is not believed before the store confirms it.
const FARTHEST_TOKEN: Duration = Duration::from_secs(24 * 3600);

fn is_far(token: Token, at: StoreTime) -> bool {
    let time = StoreTime::from_micros(token.get());
    time.since(at).max(at.since(time)) >= FARTHEST_TOKEN
}

/// The push to this client, which stands for the client of the attempt's id. `None` for a text that no store sends. Any role may have sent it. The proof of a grant whose token is a day or more from the
/// store's time is left out: the client then asks the store.
pub(super) fn decode(text: &str, client: ClientId) -> Option<Push> {
    let mut words = text.split(' ');
    let sequence = words.next()?.parse().ok()?;
    let at = StoreTime::from_micros(words.next()?.parse().ok()?);
    let kind = words.next()?;
    let mut number = || words.next()?.parse::<u64>().ok();
    let kind = match kind {
        "granted" => {
            let tokens = TokenRange { first: Token::new(number()?)?, last: Token::new(number()?)? };
            let valid_for = Duration::from_micros(number()?);
            let proof = GrantProof::new(number()?.to_be_bytes());
            let is_far = [tokens.first, tokens.last].into_iter().any(|token| is_far(token, at));
            let proof = if is_far { GrantProof::NONE } else { proof };
            PushKind::Granted(Grant { tokens, valid_for, is_plain: false }, proof)
        }
        "next" => PushKind::Next(HeadHint { repoll_at: StoreTime::from_micros(number()?) }),
        "revoked" => PushKind::Revoked,
        "contended" => PushKind::Contended,
        _ => return None,
    };
    let acquisition = Acquisition { client, sequence };
    words.next().is_none().then_some(Push { inbox: client, acquisition, at, kind })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Anyone who knows the channel may send them.
    #[tokio::test]
    async fn flood_of_notifications_is_kept_in_bounded_number_and_has_the_client_ask_once() {
        let (kept, mut queue) = kept_pushes(ClientId::new(7));
        for sequence in 0..10 * MAX_QUEUE {
            kept.add(&format!("{sequence} 1 revoked"));
            kept.add("nonsense");
        }
        let began = Instant::now();
        let (mut pushes, mut asked) = (0, 0);
        while began.elapsed() < 2 * DROPPED_INTERVAL {
            match tokio::time::timeout(DROPPED_INTERVAL / 2, queue.next()).await {
                Ok(Some(Arrival::Push(_))) => pushes += 1,
                Ok(Some(Arrival::Dropped)) => asked += 1,
                Ok(None) => panic!("it is open"),
                Err(_) => {}
            }
        }
        assert_eq!((pushes, asked), (MAX_QUEUE, 1));
        drop(kept);
        assert!(queue.next().await.is_none());
    }

    #[test]
    fn push_is_decoded_as_it_was_encoded() {
        let client = ClientId::new(7);
        let token = |number| Token::new(number).unwrap();
        for kind in [
            PushKind::Granted(
                Grant {
                    tokens: TokenRange { first: token(5), last: token(9) },
                    valid_for: Duration::from_secs(3),
                    is_plain: false,
                },
                GrantProof::new([255; 8]),
            ),
            PushKind::Next(HeadHint { repoll_at: StoreTime::from_micros(12) }),
            PushKind::Revoked,
            PushKind::Contended,
        ] {
            let acquisition = Acquisition { client, sequence: 3 };
            let push = Push { inbox: client, acquisition, at: StoreTime::from_micros(11), kind };
            assert_eq!(decode(&encode(&push), client), Some(push));
        }
        for text in ["", "1", "1 2", "1 2 other", "1 2 granted 0 1 1", "a 2 revoked"] {
            assert_eq!(decode(text, client), None, "{text}");
        }
    }
}
