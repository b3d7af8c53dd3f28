//! Finds the master by Sentinel, and watches for failovers.

mod answers;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use answers::{Awaited, Known, disagreement, gather, majority, most_named, not_sent};
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use leasehold_store::StoreError;
use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, RedisError};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::connect::{self, Credentials, Dial};
use super::error::{AddressState, store_error};
use super::limits::CONNECT_TIMEOUT;
use super::limits::SENTINEL_POLL_INTERVAL;
use super::own_connection::OwnConnection;
use crate::url::Host;

/// Min time between two polls.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Max time between two polls while the sentinels name different masters.
const MAX_DISAGREEMENT_PAUSE: Duration = Duration::from_secs(1);

/// Pause before a sentinel is subscribed to again, and before the next poll if none answers.
const NO_ANSWER_PAUSE: Duration = Duration::from_secs(2);

const SWITCHED: &str = "+switch-master";

/// The sentinels of one service.
#[derive(Clone)]
pub(super) struct Sentinels {
    pub(super) hosts: Vec<Dial>,
    pub(super) service: String,
    /// Credentials for the servers, not for the sentinels.
    pub(super) credentials: Credentials,
    known: Arc<Known>,
}

impl Sentinels {
    pub(super) fn new(hosts: Vec<Dial>, service: String, credentials: Credentials) -> Self {
        Self { hosts, service, credentials, known: Arc::default() }
    }

    pub(super) fn has_provider(&self) -> bool {
        self.credentials.has_provider() || self.hosts.iter().any(Dial::has_provider)
    }

    /// Has the credentials for the sentinels at hand. One for which there are none does not answer.
    pub(super) async fn prepare(&self) {
        join_all(self.hosts.iter().map(Dial::prepare)).await;
    }

    /// The master that most answering sentinels name. The first answer is waited for until `limit`, and the others by the rules of
    /// [`gather`]. The master itself is not asked: see [`Sentinels::confirm`].
    pub(super) async fn find_master(
        &self,
        address: AddressState,
        limit: Duration,
    ) -> Result<(Host, Dial), StoreError> {
        let named = self.named(address, Awaited::Enough, limit).await?;
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
        let (named, _) = self.find_master(AddressState::Proven, CONNECT_TIMEOUT).await?;
        if named != *master {
            return Err(say("it was replaced while the connection was made"));
        }
        self.known.uses(master);
        Ok(())
    }

    /// The master in use may have been replaced: the next question waits for a majority.
    pub(super) fn forget_master(&self) {
        self.known.forget_master();
    }

    /// The masters that the sentinels name.
    async fn named(
        &self,
        address: AddressState,
        awaited: Awaited,
        limit: Duration,
    ) -> Result<Vec<Host>, StoreError> {
        let answers = self.hosts.iter().map(|sentinel| self.ask(sentinel, address));
        gather(answers, &self.known, awaited, limit).await
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

    /// Returns when most of all sentinels name another master, possibly before that server knows it.
    pub(super) async fn until_switched(self, master: Host) {
        let received = Arc::new(Notify::new());
        let ask =
            || self.named(AddressState::Proven, Awaited::All, CONNECT_TIMEOUT).map(Result::unwrap_or_default);
        // All of them: one that is cut off from the others does not hear of a failover.
        let listening = self.hosts.iter().map(|sentinel| self.listen(sentinel, &received).boxed());
        let listening = join_all(listening);
        tokio::select! {
            () = until_other_is_named(&master, self.hosts.len(), ask, &received) => {}
            _ = listening => unreachable!("it listens again and again"),
        }
        self.forget_master();
    }

    /// Stays subscribed to a sentinel's failover messages, and signals each of them. A new subscription, too: something may have been
    /// missed before it.
    async fn listen(&self, sentinel: &Dial, received: &Arc<Notify>) {
        loop {
            let lost = Arc::new(Notify::new());
            let subscription = self.subscribe(sentinel, received.clone(), lost.clone()).await;
            if subscription.is_ok() {
                received.notify_one();
                lost.notified().await;
            }
            sleep(NO_ANSWER_PAUSE).await;
        }
    }

    async fn subscribe(
        &self,
        sentinel: &Dial,
        received: Arc<Notify>,
        lost: Arc<Notify>,
    ) -> Result<OwnConnection, RedisError> {
        let push_handler = move |info: PushInfo| {
            match info.kind {
                PushKind::Message => received.notify_one(),
                PushKind::Disconnection => lost.notify_one(),
                _ => {}
            }
            Ok::<(), Infallible>(())
        };
        let config = connect::config().set_push_sender(push_handler);
        let mut connection = sentinel.open(false, &config).await?;
        connection.subscribe(SWITCHED).await?;
        Ok(connection)
    }
}

/// Returns when most of all sentinels name another host than `master`: to stay costs nothing, since a master that is down is noticed by
/// its connection. Asks again after a failover message is `received`, and from time to time.
async fn until_other_is_named<A>(master: &Host, sentinels: usize, ask: impl Fn() -> A, received: &Notify)
where
    A: Future<Output = Vec<Host>>,
{
    let mut disagreement_pause = MIN_POLL_INTERVAL;
    loop {
        let named = ask().await;
        if majority(&named, sentinels).is_some_and(|named| named != master) {
            return;
        }
        let pause = if named.is_empty() {
            NO_ANSWER_PAUSE
        } else if named.iter().all(|named| named == master) {
            disagreement_pause = MIN_POLL_INTERVAL;
            SENTINEL_POLL_INTERVAL
        } else {
            // The others are about to agree, or one of them is behind for longer.
            disagreement_pause = (disagreement_pause * 2).min(MAX_DISAGREEMENT_PAUSE);
            disagreement_pause
        };
        if timeout(pause, received.notified()).await.is_ok() {
            sleep(MIN_POLL_INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use tokio::time::{Instant, sleep_until};

    use super::*;

    /// A sentinel that is cut off from the others names a host of before for as long as that lasts.
    #[tokio::test(start_paused = true)]
    async fn failover_is_noticed_within_a_second_although_a_sentinel_is_behind() {
        let host = |port| Host { name: "h".to_owned(), port };
        for (is_notified, limit_ms) in [(true, 100), (false, 1_000)] {
            let received = Notify::new();
            let switch = Instant::now() + Duration::from_millis(123_456);
            let ask = || {
                let master = host(if Instant::now() < switch { 1 } else { 2 });
                ready(vec![host(9), master.clone(), master])
            };
            let tell = async {
                sleep_until(switch).await;
                if is_notified {
                    received.notify_one();
                }
            };
            let master = host(1);
            tokio::join!(until_other_is_named(&master, 3, ask, &received), tell);
            let late = switch.elapsed();
            assert!(late <= Duration::from_millis(limit_ms), "{late:?}, told: {is_notified}");
        }
    }
}
