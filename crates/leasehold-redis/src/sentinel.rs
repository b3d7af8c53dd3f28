//! Finds the master by Sentinel, and watches for failovers.

mod answers;

use std::sync::Arc;
use std::time::Duration;

use answers::{Known, disagreement, gather, majority, most_named, not_sent};
use futures_util::FutureExt as _;
use futures_util::future::select_ok;
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
    known: Arc<Known>,
}

impl Sentinels {
    pub(super) fn new(hosts: Vec<Dial>, service: String, credentials: Credentials) -> Self {
        Self { hosts, service, credentials, known: Arc::default() }
    }

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
        if named != *master {
            return Err(say("it was replaced while the connection was made"));
        }
        self.known.uses(master);
        Ok(())
    }

    /// The masters that the sentinels name.
    async fn named(&self, address: AddressState) -> Result<Vec<Host>, StoreError> {
        gather(self.hosts.iter().map(|sentinel| self.ask(sentinel, address)), &self.known).await
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
                // To stay costs nothing: a master that is down is noticed by its connection.
                if majority(&named, self.hosts.len()).is_some_and(|named| *named != master) {
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
