//! Finds the master by Sentinel, and watches for failovers.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_ok;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use leasehold_core::Failure;
use leasehold_store::StoreError;
use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, RedisError};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::connect::{self, Credentials, Dial};
use super::error::{AddressState, store_error};
use crate::url::Host;

/// Poll interval, besides the subscription.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Min time between two polls.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Pause before the next subscription attempt if no sentinel answers.
const NO_ANSWER_PAUSE: Duration = Duration::from_secs(2);

const SWITCHED: &str = "+switch-master";

/// The sentinels of one service.
#[derive(Clone)]
pub(super) struct Sentinels {
    pub(super) hosts: Vec<Dial>,
    pub(super) service: String,
    /// Credentials for the servers, not for the sentinels.
    pub(super) credentials: Credentials,
}

impl Sentinels {
    /// The master that most answering sentinels name. The master itself is not asked: see [`Sentinels::confirm`].
    pub(super) async fn find_master(&self, address: AddressState) -> Result<(Host, Dial), StoreError> {
        let named = self.named(address).await?;
        let master = most_named(&named).ok_or_else(|| not_sent(disagreement(&named)))?;
        let dial = self.credentials.at(master).map_err(|error| not_sent(format!("{error:#}")))?;
        Ok((master.clone(), dial))
    }

    /// Confirms a new connection to `master`. Connecting may have taken long, for example to a frozen server that was replaced
    /// meanwhile. The old master does not know that for some seconds, so the sentinels are asked again.
    pub(super) async fn confirm(
        &self,
        master: &Host,
        connection: &mut MultiplexedConnection,
    ) -> Result<(), StoreError> {
        let say = |what: &str| not_sent(format!("the master {}:{}: {what}", master.name, master.port));
        let role: Result<Vec<redis::Value>, _> = redis::cmd("ROLE").query_async(connection).await;
        match role {
            Ok(role) if matches!(&role[..], [redis::Value::BulkString(word), ..] if word != b"master") => {
                return Err(say("it reports that it is not a master (any more)"));
            }
            // Without the right to ROLE, a replica is noticed by the first write.
            Ok(_) => {}
            Err(error) if error.code() == Some("NOPERM") => {}
            Err(error) => {
                let failed = store_error(&error);
                let failure = failed.failure.before_sending();
                return Err(say(&failed.message).known_as(failure).caused_by(error));
            }
        }
        let (named, _) = self.find_master(AddressState::Proven).await?;
        if named == *master { Ok(()) } else { Err(say("it was replaced while the connection was made")) }
    }

    /// The masters that the sentinels name.
    async fn named(&self, address: AddressState) -> Result<Vec<Host>, StoreError> {
        gather(self.hosts.iter().map(|sentinel| self.ask(sentinel, address)).collect()).await
    }

    async fn ask(&self, sentinel: &Dial, address: AddressState) -> Result<Host, StoreError> {
        let say = |error: StoreError| error.of(format_args!("the sentinel {}", sentinel.addr()));
        let connection = sentinel.open(false, &connect::config()).await;
        let mut connection = connection.map_err(|error| say(address.store_error(&error)))?;
        self.master_by(&mut connection).await.map_err(say)
    }

    async fn master_by(&self, sentinel: &mut MultiplexedConnection) -> Result<Host, StoreError> {
        let mut ask = redis::cmd("SENTINEL");
        ask.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.service);
        let answer = ask.query_async(sentinel).await;
        let answer: Option<(String, u16)> = answer.map_err(|error: RedisError| {
            let refused = AddressState::Proven.store_error(&error);
            if error.to_string().to_lowercase().contains("unknown command") {
                return refused.saying("it is no sentinel: their port is 26379, unless set otherwise");
            }
            refused
        })?;
        let (name, port) =
            answer.ok_or_else(|| not_sent(format!("it knows no service {:?}", self.service)))?;
        Ok(Host { name, port })
    }

    /// Returns when most sentinels name another master, possibly before that server knows it.
    pub(super) async fn until_switched(self, master: Host) {
        loop {
            let received = Arc::new(Notify::new());
            let listening = select_ok(
                self.hosts.iter().map(|sentinel| self.forward_messages(sentinel, received.clone()).boxed()),
            );
            // Keeps the subscription alive.
            let listening = listening.await;
            let mut pause = MIN_POLL_INTERVAL;
            loop {
                let Ok(named) = self.named(AddressState::Proven).await else { break };
                if most_named(&named).is_some_and(|named| *named != master) {
                    return;
                }
                if named.iter().all(|named| *named == master) {
                    break;
                }
                // The other sentinels are about to agree.
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(POLL_INTERVAL);
            }
            if listening.is_ok() {
                // Also notified when the connection is lost.
                let _ = timeout(POLL_INTERVAL, received.notified()).await;
                tokio::time::sleep(MIN_POLL_INTERVAL).await;
            } else {
                tokio::time::sleep(NO_ANSWER_PAUSE).await;
            }
        }
    }

    /// Subscribes to failover messages.
    async fn forward_messages(
        &self,
        sentinel: &Dial,
        received: Arc<Notify>,
    ) -> Result<MultiplexedConnection, RedisError> {
        let push_handler = move |info: PushInfo| {
            if matches!(info.kind, PushKind::Message | PushKind::Disconnection) {
                received.notify_one();
            }
            Ok::<(), std::convert::Infallible>(())
        };
        let config = connect::config().set_push_sender(push_handler);
        let mut connection = sentinel.open(false, &config).await?;
        connection.subscribe(SWITCHED).await?;
        Ok(connection)
    }
}

/// The answers of all sentinels, or fewer once most of those that were asked name one host. A few that are near may be cut off from the
/// others, and name the master of before: the others are slow then, and are waited for until they have answered or failed.
async fn gather(
    mut asked: FuturesUnordered<impl Future<Output = Result<Host, StoreError>>>,
) -> Result<Vec<Host>, StoreError> {
    let majority = asked.len() / 2 + 1;
    let (mut named, mut last_error) = (Vec::new(), not_sent("no sentinel has answered".to_owned()));
    while let Some(answer) = asked.next().await {
        match answer {
            Ok(host) => {
                named.push(host.clone());
                if named.iter().filter(|other| **other == host).count() >= majority {
                    break;
                }
            }
            Err(error) => last_error = error,
        }
    }
    if named.is_empty() { Err(last_error) } else { Ok(named) }
}

/// The host that is named more often than any other.
fn most_named(named: &[Host]) -> Option<&Host> {
    let votes = |host: &Host| named.iter().filter(|other| *other == host).count();
    let first = named.iter().max_by_key(|host| votes(host))?;
    let is_alone = named.iter().all(|host| host == first || votes(host) < votes(first));
    is_alone.then_some(first)
}

fn disagreement(named: &[Host]) -> String {
    let mut named: Vec<String> = named.iter().map(|host| format!("{}:{}", host.name, host.port)).collect();
    named.sort();
    named.dedup();
    format!("the sentinels do not agree which server is the master: they name {}", named.join(" and "))
}

fn not_sent(message: String) -> StoreError {
    StoreError::new(Failure::NotSent, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each sentinel answers after so many milliseconds, with the port of a master, or fails.
    async fn gathered(answers: &[(u64, Option<u16>)]) -> (u64, Vec<u16>) {
        let began = tokio::time::Instant::now();
        let ask = |&(after, port): &(u64, Option<u16>)| async move {
            tokio::time::sleep(Duration::from_millis(after)).await;
            let port = port.ok_or_else(|| not_sent("it fails".to_owned()))?;
            Ok(Host { name: "h".to_owned(), port })
        };
        let named = gather(answers.iter().map(ask).collect()).await.unwrap_or_default();
        let after = u64::try_from(began.elapsed().as_millis()).unwrap();
        (after, named.iter().map(|host| host.port).collect())
    }

    #[tokio::test(start_paused = true)]
    async fn slow_majority_counts_more_than_a_near_sentinel() {
        for (answers, expected) in [
            (&[(1, Some(1)), (900, Some(2)), (950, Some(2))][..], (950, vec![1, 2, 2])),
            // Half of them is not enough.
            (&[(1, Some(1)), (2, Some(2)), (3, Some(2)), (9_000, None)][..], (9_000, vec![1, 2, 2])),
            (&[(1, Some(2)), (2, Some(2)), (9_000, None)][..], (2, vec![2, 2])),
            // The others are gone.
            (&[(1, Some(1)), (900, None), (950, None)][..], (950, vec![1])),
            (&[(1, None)][..], (1, vec![])),
            (&[(1, Some(3))][..], (1, vec![3])),
        ] {
            assert_eq!(gathered(answers).await, expected, "{answers:?}");
        }
    }

    #[test]
    fn master_is_the_host_that_most_sentinels_name() {
        let hosts = |ports: &[u16]| -> Vec<Host> {
            ports.iter().map(|port| Host { name: "h".to_owned(), port: *port }).collect()
        };
        let found = |ports: &[u16]| most_named(&hosts(ports)).map(|host| host.port);
        assert_eq!(found(&[1]), Some(1));
        assert_eq!(found(&[1, 2, 2]), Some(2));
        assert_eq!(found(&[2, 1, 2, 1, 1]), Some(1));
        assert_eq!(found(&[1, 2]), None, "a tie names no master");
        assert_eq!(found(&[1, 1, 2, 2, 3]), None);
        assert_eq!(found(&[]), None);
        assert_eq!(
            disagreement(&hosts(&[2, 1, 2])),
            "the sentinels do not agree which server is the master: they name h:1 and h:2"
        );
    }
}
