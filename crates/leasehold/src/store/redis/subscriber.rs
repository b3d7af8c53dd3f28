//! The connection that pushes arrive over. Nothing else depends on it: whoever may publish can have the server close it, with messages
//! that exceed the output buffer of a subscriber. Commands and renewals go on meanwhile, and waiters ask.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::try_join;
use redis::RedisError;
use tokio::time::{Instant, sleep, timeout};

use super::connect::Dial;
use super::connections::{Connections, config};
use super::error::{AddressState, explain};
use super::limits::RECONNECT_BACKOFF;
use super::pushes::{
    ConnectionStatus, MessageHandler, ReconnectHandler, SubscriberStatus, Subscription, subscriber_handler,
};
use super::{CONNECT_TIMEOUT, handshake, rights};

/// A connection that lives for this long has not been closed for what a stranger sent: the backoff restarts.
const LASTING: Duration = Duration::from_secs(10);

/// Keeps the subscriber connection of an endpoint open.
pub(super) struct Subscriber {
    pub(super) dial: Dial,
    pub(super) is_resp2: bool,
    /// Subscribed to at once. None in a cluster, where each hash slot has a channel.
    pub(super) channel: Option<String>,
    pub(super) status: Arc<ConnectionStatus>,
    pub(super) on_message: MessageHandler,
    pub(super) on_reconnect: ReconnectHandler,
    pub(super) on_disconnect: Arc<dyn Fn() + Send + Sync>,
}

/// Why there is no subscription.
pub(super) enum OpenError {
    /// There may be one later. What happened.
    NotConnected(String),
    /// The server refuses it.
    Refused(RedisError),
}

impl Subscriber {
    pub(super) async fn open(&self, limit: Duration) -> Result<Subscription, OpenError> {
        let status = Arc::new(SubscriberStatus::new(self.status.clone()));
        let open = async {
            match (self.is_resp2, &self.channel) {
                (true, Some(channel)) => self.open_resp2(channel, status).await,
                _ => self.open_resp3(status).await,
            }
        };
        let no_answer = |_| Err(OpenError::NotConnected(AddressState::Proven.no_answer(limit)));
        timeout(limit, open).await.unwrap_or_else(no_answer)
    }

    async fn open_resp3(&self, status: Arc<SubscriberStatus>) -> Result<Subscription, OpenError> {
        let config = config().set_push_sender(subscriber_handler(self.on_message.clone(), status.clone()));
        let connection = self.dial.open(false, &config).await.map_err(|error| not_connected(&error))?;
        let (mut asking, mut subscribing) = (connection.clone(), connection.clone());
        let run_id = async { handshake::run_id(&mut asking).await.map_err(|error| not_connected(&error)) };
        let subscribe = async {
            match &self.channel {
                Some(channel) => {
                    subscribing.subscribe(channel).await.map_err(|error| self.not_subscribed(error))
                }
                None => Ok(()),
            }
        };
        let ((), run_id) = try_join(subscribe, run_id).await?;
        Ok(Subscription::resp3(connection, run_id, status))
    }

    async fn open_resp2(
        &self,
        channel: &str,
        status: Arc<SubscriberStatus>,
    ) -> Result<Subscription, OpenError> {
        let client = self.dial.client(true).await.map_err(|error| not_connected(&error))?;
        let mut inbox = client.get_async_pubsub().await.map_err(|error| not_connected(&error))?;
        inbox.subscribe(channel).await.map_err(|error| self.not_subscribed(error))?;
        Ok(Subscription::resp2(inbox, channel, self.on_message.clone(), status))
    }

    fn not_subscribed(&self, error: RedisError) -> OpenError {
        if error.code().is_none() {
            return not_connected(&error);
        }
        OpenError::Refused(rights::of_command(error, "+subscribe", self.dial.user()))
    }

    /// Opens the connection again when it is lost, until the connections of the endpoint are closed. Wakers and log subscribers are code
    /// of the program: if one panics, the connection is opened again.
    pub(super) async fn keep(self, connections: Weak<Connections>) {
        while AssertUnwindSafe(self.keep_open(&connections)).catch_unwind().await.is_err() {
            if let Some(connections) = connections.upgrade() {
                connections.set_subscription(None);
            }
        }
    }

    async fn keep_open(&self, connections: &Weak<Connections>) {
        let mut pause = *RECONNECT_BACKOFF.start();
        loop {
            let open = connections.upgrade().filter(|connections| !connections.is_closed());
            let Some(present) = open.map(|connections| connections.subscription()) else { return };
            if let Some(subscription) = present {
                let opened = Instant::now();
                subscription.lost().await;
                if opened.elapsed() >= LASTING {
                    pause = *RECONNECT_BACKOFF.start();
                }
                let Some(connections) = connections.upgrade() else { return };
                connections.set_subscription(None);
                tell(pause, "the connection for messages was lost: waiters ask until there is another one");
                (self.on_disconnect)();
            }
            sleep(pause).await;
            let opened = self.open(CONNECT_TIMEOUT).await;
            let Some(connections) = connections.upgrade() else { return };
            match opened {
                Ok(subscription) => self.use_from_now(&connections, subscription).await,
                // The next connection to the server says which right is missing.
                Err(OpenError::Refused(_)) => connections.close(),
                Err(OpenError::NotConnected(what)) => {
                    tell(
                        pause,
                        &format!("no connection for messages, waiters ask until there is one: {what}"),
                    );
                    // The server takes this client's waiters for absent.
                    (self.on_reconnect)(&|_| true);
                }
            }
            pause = (pause * 2).min(*RECONNECT_BACKOFF.end());
        }
    }

    /// Has the waiters ask before any push counts.
    async fn use_from_now(&self, connections: &Connections, subscription: Subscription) {
        let server = Some(&**connections.run_id()).filter(|run_id| !run_id.is_empty());
        if !subscription.is_at(&mut connections.driver_conn(), server).await {
            // The address leads to another server now.
            connections.close();
            return;
        }
        let subscription = Arc::new(subscription);
        connections.set_subscription(Some(subscription.clone()));
        (self.on_reconnect)(&|_| true);
        subscription.accept_pushes();
    }
}

fn not_connected(error: &RedisError) -> OpenError {
    OpenError::NotConnected(explain(error))
}

/// Logs what happened while the pause is short: a stranger who has the server close each connection does not fill the log.
fn tell(pause: Duration, message: &str) {
    if pause < *RECONNECT_BACKOFF.end() {
        tracing::warn!("{message}");
    } else {
        tracing::debug!("{message}");
    }
}
