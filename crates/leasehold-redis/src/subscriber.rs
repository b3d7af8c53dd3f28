//! The connection that pushes arrive over. Nothing else depends on it: whoever may publish can have the server close it, with messages
//! that exceed the output buffer of a subscriber. Commands and renewals go on meanwhile, and waiters ask.

use std::ops::RangeInclusive;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::try_join;
use leasehold_redis_protocol::private_channel_of;
use leasehold_store::BoxFuture;
use redis::{RedisError, RedisResult};
use tokio::time::{Instant, sleep, timeout};

use super::connect::Dial;
use super::connections::{Connections, config};
use super::error::{AddressState, explain};
use super::limits::RECONNECT_BACKOFF;
use super::limits::{ANSWER_TIMEOUT, CONNECT_TIMEOUT, PUSH_TRIAL};
use super::place::Place;
use super::pushes::{
    ConnectionStatus, MessageHandler, ReconnectHandler, SubscriberStatus, Subscription, subscriber_handler,
};
use super::wire::random;
use super::{handshake, rights};

/// A connection that lives for this long has not been closed for what a stranger sent: the backoff restarts.
const LASTING: Duration = Duration::from_secs(10);

/// How often the connection is asked whether it still answers. Nothing else would tell that something in between has forgotten it, and
/// the server would send every grant there. A new one is asked sooner: what it replaces may have hung, too.
const HEARTBEATS: RangeInclusive<Duration> = Duration::from_millis(1_500)..=Duration::from_secs(10);

/// How often waiters ask while there is no connection: while a grant that was sent to it can still be claimed.
const ASK_INTERVAL: Duration = Duration::from_millis(1_500);

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
    pub(super) is_idle: Arc<dyn Fn() -> bool + Send + Sync>,
    pub(super) warn: Arc<dyn Fn(String) + Send + Sync>,
}

/// A connection that is being opened.
pub(super) type Opening = BoxFuture<Result<Subscription, SubscriberError>>;

/// Why there is no subscription.
pub(super) enum SubscriberError {
    /// There may be one later. What happened.
    NotConnected(String),
    /// The user may not subscribe.
    Refused(RedisError),
}

impl Subscriber {
    /// Opens the connection. Nothing waits for it but what needs it.
    pub(super) fn open(self: &Arc<Self>) -> Opening {
        let this = self.clone();
        Box::pin(async move {
            let status = Arc::new(SubscriberStatus::new(this.status.clone()));
            let open = async {
                match (this.is_resp2, &this.channel) {
                    (true, Some(channel)) => this.open_resp2(channel, status).await,
                    _ => this.open_resp3(status).await,
                }
            };
            let no_answer =
                |_| Err(SubscriberError::NotConnected(AddressState::Proven.no_answer(CONNECT_TIMEOUT)));
            timeout(CONNECT_TIMEOUT, open).await.unwrap_or_else(no_answer)
        })
    }

    async fn open_resp3(&self, status: Arc<SubscriberStatus>) -> Result<Subscription, SubscriberError> {
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
    ) -> Result<Subscription, SubscriberError> {
        let (mut inbox, outdated) = self.dial.open_pubsub().await.map_err(|error| not_connected(&error))?;
        inbox.subscribe(channel).await.map_err(|error| self.not_subscribed(error))?;
        let private = private_channel()?;
        let private = known(inbox.subscribe(&private).await, private)?;
        Ok(Subscription::resp2(inbox, outdated, channel, private, self.on_message.clone(), status))
    }

    fn not_subscribed(&self, error: RedisError) -> SubscriberError {
        if error.code() != Some("NOPERM") {
            return not_connected(&error);
        }
        SubscriberError::Refused(rights::of_command(error, "+subscribe", self.dial.user().as_deref()))
    }

    /// Opens the connection again when it is lost, until the connections of the endpoint are closed. Wakers and log subscribers are code
    /// of the program: if one panics, the connection is opened again. `opening` is the first connection, if it is not open yet.
    pub(super) async fn keep(self: Arc<Self>, connections: Weak<Connections>, mut opening: Option<Opening>) {
        while AssertUnwindSafe(self.keep_open(&connections, &mut opening)).catch_unwind().await.is_err() {
            if let Some(connections) = connections.upgrade() {
                connections.set_subscription(None);
            }
        }
    }

    async fn keep_open(self: &Arc<Self>, connections: &Weak<Connections>, opening: &mut Option<Opening>) {
        let mut pause = *RECONNECT_BACKOFF.start();
        loop {
            let open = connections.upgrade().filter(|connections| !connections.is_closed());
            let Some(present) = open.map(|connections| connections.subscription()) else { return };
            if let Some(subscription) = present {
                let opened = Instant::now();
                let is_hanging = self.until_lost(&subscription, connections).await;
                if !is_hanging && opened.elapsed() >= LASTING {
                    pause = *RECONNECT_BACKOFF.start();
                }
                let Some(connections) = connections.upgrade() else { return };
                connections.set_subscription(None);
                tell(pause, "the connection for messages was lost: waiters ask until there is another one");
                (self.on_disconnect)();
                // A grant may have been sent to it.
                (self.on_reconnect)(&|_| true);
            }
            let opened = match opening.take() {
                Some(opening) => self.asking(opening).await,
                None => {
                    sleep(pause).await;
                    self.asking(self.open()).await
                }
            };
            let Some(connections) = connections.upgrade() else { return };
            match opened {
                Ok(subscription) => self.use_from_now(&connections, subscription).await,
                Err(SubscriberError::Refused(error)) => {
                    let what = explain(&error);
                    (self.warn)(format!("the server refuses messages, so waiters ask instead: {what}"));
                    (self.on_reconnect)(&|_| true);
                }
                Err(SubscriberError::NotConnected(what)) => {
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

    /// Returns whether it was given up because it does not answer. A client without attempts and leases does not ask.
    async fn until_lost(&self, subscription: &Subscription, connections: &Weak<Connections>) -> bool {
        let mut pause = *HEARTBEATS.start();
        loop {
            if timeout(pause, subscription.lost()).await.is_ok() {
                return false;
            }
            let limit =
                connections.upgrade().map_or(ANSWER_TIMEOUT, |connections| connections.answer_limit());
            if !(self.is_idle)() && !subscription.check(limit).await {
                return true;
            }
            if let Some(connections) =
                connections.upgrade().filter(|connections| connections.are_pushes_lost())
            {
                self.try_pushes(&connections, subscription).await;
            }
            pause = (pause * 2).min(*HEARTBEATS.end());
        }
    }

    /// Does this while the waiters ask: the server takes them for absent, or sends grants where nothing arrives.
    async fn asking<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            match timeout(ASK_INTERVAL, &mut work).await {
                Ok(done) => return done,
                Err(_) => (self.on_reconnect)(&|_| true),
            }
        }
    }

    /// Finds out whether what is published arrives, where a proxy is in between.
    pub(super) async fn try_pushes(&self, connections: &Connections, subscription: &Subscription) {
        let Some(channel) = self.channel.as_ref().filter(|_| connections.is_restricted()) else { return };
        let mut publish = redis::cmd("PUBLISH");
        publish.arg(channel).arg("");
        let sent = publish.query_async::<redis::Value>(&mut connections.driver_conn()).await;
        let arrives = sent.is_ok() && timeout(PUSH_TRIAL, subscription.message_received()).await.is_ok();
        let were_lost = connections.set_pushes_lost(!arrives);
        if !arrives && !were_lost {
            (self.warn)(
                "messages do not arrive through the proxy, so waiters ask: a hand-over takes up to 300 ms"
                    .to_owned(),
            );
        }
    }

    /// Has the waiters ask before any push counts.
    async fn use_from_now(&self, connections: &Connections, subscription: Subscription) {
        match connections.place_of_subscriber(&subscription).await {
            Ok(Place::Here | Place::Unknown) => {}
            // The address leads to another server now.
            Ok(Place::Elsewhere) => return connections.close(),
            Err(error) => {
                tracing::debug!("a connection for messages is not used: {}", explain(&error));
                // The other one may be the lost one: with RESP2 it does not tell.
                connections.status().request_health_check();
                return (self.on_reconnect)(&|_| true);
            }
        }
        self.try_pushes(connections, &subscription).await;
        let subscription = Arc::new(subscription);
        connections.set_subscription(Some(subscription.clone()));
        (self.on_reconnect)(&|_| true);
        subscription.accept_pushes();
    }
}

/// A channel with a random name, which shows whether a connection leads to the server that knows its listener.
fn private_channel() -> Result<String, SubscriberError> {
    Ok(private_channel_of(random().map_err(|error| not_connected(&error))?))
}

/// The private channel, unless the user may not subscribe to it.
fn known(subscribed: RedisResult<()>, private: String) -> Result<Option<String>, SubscriberError> {
    match subscribed {
        Ok(()) => Ok(Some(private)),
        Err(error) if error.code() == Some("NOPERM") => Ok(None),
        Err(error) => Err(not_connected(&error)),
    }
}

fn not_connected(error: &RedisError) -> SubscriberError {
    SubscriberError::NotConnected(explain(error))
}

/// Logs what happened while the pause is short: a stranger who has the server close each connection does not fill the log.
fn tell(pause: Duration, message: &str) {
    if pause < *RECONNECT_BACKOFF.end() {
        tracing::warn!("{message}");
    } else {
        tracing::debug!("{message}");
    }
}
