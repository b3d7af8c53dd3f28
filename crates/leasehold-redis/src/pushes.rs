//! What arrives over connections unasked, and when it counts.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use leasehold_core::Resource;
use leasehold_store::BoxFuture;
use leasehold_store::tasks::TaskGroup;
use redis::aio::{PubSub, PubSubSink, PubSubStream};
use redis::{PushInfo, PushKind, RedisResult, Value};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::own_connection::OwnConnection;
use super::wire::Wire;

/// Called after a reconnect for the matching resources: pushes may have been missed.
pub(super) type ReconnectHandler = Arc<dyn Fn(&dyn Fn(&Resource) -> bool) + Send + Sync>;

/// Handles a published message: channel, payload.
pub(super) type MessageHandler = Arc<dyn Fn(&[u8], &[u8]) + Send + Sync>;

/// Status of the connections, shared with the push handlers.
pub(super) struct ConnectionStatus {
    /// `on_reconnect` has run, so pushes count.
    is_accepting: AtomicBool,
    is_closed: AtomicBool,
    /// Another user has the server send to these connections what they did not ask for. Of the endpoint, also for later connections.
    is_redirected: Arc<AtomicBool>,
    health_check: Arc<Notify>,
}

impl ConnectionStatus {
    pub(super) fn new(health_check: Arc<Notify>, is_redirected: Arc<AtomicBool>) -> Self {
        let (is_accepting, is_closed) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { is_accepting, is_closed, is_redirected, health_check }
    }

    /// Handles the data of an invalidation. Returns whether the server was flushed. These connections track no key: names of keys are
    /// what another client redirects to here, in any amount, so that answers may come too late.
    pub(super) fn invalidated(&self, data: &[Value]) -> bool {
        if data.first() == Some(&Value::Nil) {
            return self.accepts_pushes();
        }
        self.redirect();
        false
    }

    /// Closes the connections: those after them use RESP2, which another client can't redirect anything to.
    pub(super) fn redirect(&self) {
        self.is_redirected.store(true, Ordering::SeqCst);
        self.close();
    }

    /// Has the connection for commands asked whether it answers.
    pub(super) fn request_health_check(&self) {
        self.health_check.notify_one();
    }

    /// Whether the connections for commands use RESP2 from now on.
    pub(super) fn is_redirected(&self) -> bool {
        self.is_redirected.load(Ordering::SeqCst)
    }

    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.health_check.notify_one();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// Starts accepting pushes.
    pub(super) fn accept_pushes(&self) {
        self.is_accepting.store(true, Ordering::SeqCst);
    }

    /// Whether pushes count: only between publication and closing.
    fn accepts_pushes(&self) -> bool {
        self.is_accepting.load(Ordering::SeqCst) && !self.is_closed()
    }
}

/// Handles unsolicited messages over the driver connection.
pub(super) fn driver_handler(
    emptied: ReconnectHandler,
    status: Arc<ConnectionStatus>,
) -> impl Fn(PushInfo) -> Result<(), Infallible> + Send + Sync + 'static {
    move |info| {
        match info.kind {
            PushKind::Disconnection => status.close(),
            PushKind::Invalidate if status.invalidated(&info.data) => emptied(&|_| true),
            _ => {}
        }
        Ok(())
    }
}

/// Handles unsolicited messages over a further connection, which tracks no key.
pub(super) fn further_handler(
    status: Arc<ConnectionStatus>,
    lost: impl Fn() + Send + Sync + 'static,
) -> impl Fn(PushInfo) -> Result<(), Infallible> + Send + Sync + 'static {
    move |info| {
        match info.kind {
            PushKind::Disconnection => lost(),
            PushKind::Invalidate => drop(status.invalidated(&info.data)),
            _ => {}
        }
        Ok(())
    }
}

/// An open subscriber connection.
pub(super) struct Subscription {
    over: Over,
    status: Arc<SubscriberStatus>,
    /// Hash slots whose inbox subscription the server confirmed.
    slots: Mutex<HashSet<u16>>,
}

enum Over {
    Resp3 {
        connection: OwnConnection,
        run_id: Option<String>,
    },
    /// It serves no other command.
    Resp2 {
        channel: String,
        /// A channel with a random name, if the user may subscribe to it.
        private: Option<String>,
        sink: tokio::sync::Mutex<PubSubSink>,
        _forwarding: TaskGroup,
    },
}

/// Status of a subscriber connection, shared with its push handler.
pub(super) struct SubscriberStatus {
    /// Waiters know that pushes may have been missed, so new ones count.
    is_accepting: AtomicBool,
    is_lost: AtomicBool,
    lost: Notify,
    /// A message has arrived, whether it counts or not.
    received: Notify,
    /// Of the connections to the server.
    connections: Arc<ConnectionStatus>,
}

impl SubscriberStatus {
    pub(super) fn new(connections: Arc<ConnectionStatus>) -> Self {
        let (is_accepting, is_lost) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { is_accepting, is_lost, lost: Notify::new(), received: Notify::new(), connections }
    }

    fn lose(&self) {
        self.is_lost.store(true, Ordering::SeqCst);
        self.lost.notify_one();
    }

    /// Notes a message. Returns whether it counts.
    fn receive(&self) -> bool {
        self.received.notify_one();
        self.is_accepting.load(Ordering::SeqCst) && self.connections.accepts_pushes()
    }
}

impl Subscription {
    /// Over a connection with [`subscriber_handler`], to the server of this run id.
    pub(super) fn resp3(
        connection: OwnConnection,
        run_id: Option<String>,
        status: Arc<SubscriberStatus>,
    ) -> Self {
        Self { over: Over::Resp3 { connection, run_id }, status, slots: Mutex::default() }
    }

    /// Over a connection that has subscribed to this channel, and to a private one. It is given up when it is `outdated`.
    pub(super) fn resp2(
        inbox: PubSub,
        outdated: BoxFuture<()>,
        channel: &str,
        private: Option<String>,
        on_message: MessageHandler,
        status: Arc<SubscriberStatus>,
    ) -> Self {
        let (sink, messages) = inbox.split();
        let mut forwarding = TaskGroup::default();
        forwarding.spawn(forward_messages(messages, on_message, status.clone()));
        let until = status.clone();
        forwarding.spawn(async move {
            outdated.await;
            until.lose();
        });
        let (channel, sink) = (channel.to_owned(), tokio::sync::Mutex::new(sink));
        let over = Over::Resp2 { channel, private, sink, _forwarding: forwarding };
        Self { over, status, slots: Mutex::default() }
    }

    /// For further subscriptions. They count only if the connection is not lost after the answer: see [`Self::is_lost`].
    pub(super) fn connection(&self) -> Option<OwnConnection> {
        match &self.over {
            Over::Resp3 { connection, .. } => Some(connection.clone()),
            Over::Resp2 { .. } => None,
        }
    }

    /// Lost, or of no more use: a reply may have been assigned to the wrong command.
    pub(super) fn is_lost(&self) -> bool {
        self.status.is_lost.load(Ordering::SeqCst)
    }

    /// Waits until the connection is lost, or given up.
    pub(super) async fn lost(&self) {
        self.status.lost.notified().await;
    }

    /// Waits for a message, or for none if one has arrived.
    pub(super) async fn message_received(&self) {
        self.status.received.notified().await;
    }

    /// Gives the connection up.
    pub(super) fn lose(&self) {
        self.status.lose();
    }

    /// Pushes count from now on.
    pub(super) fn accept_pushes(&self) {
        self.status.is_accepting.store(true, Ordering::SeqCst);
    }

    fn slots(&self) -> MutexGuard<'_, HashSet<u16>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the server confirmed the subscription to this slot's inbox.
    pub(super) fn has_slot(&self, slot: u16) -> bool {
        !self.is_lost() && self.slots().contains(&slot)
    }

    pub(super) fn confirm_slot(&self, slot: u16) {
        self.slots().insert(slot);
    }

    /// Gives the connection up if it does not answer within this time. Returns whether it does.
    pub(super) async fn check(&self, limit: Duration) -> bool {
        let responds = self.responds(limit).await;
        if !responds {
            self.lose();
        }
        responds
    }

    pub(super) async fn responds(&self, limit: Duration) -> bool {
        match &self.over {
            Over::Resp3 { connection, .. } => {
                let mut connection = connection.clone();
                connection.set_response_timeout(limit);
                responds(&mut Wire::Limited(connection)).await
            }
            Over::Resp2 { channel, sink, .. } => {
                // No right is needed but the one that it has used.
                let again = async { sink.lock().await.subscribe(channel).await };
                timeout(limit, again).await.is_ok_and(|answer| is_answer(&answer))
            }
        }
    }

    /// The server's run id, if the user may ask for it over this connection.
    pub(super) fn run_id(&self) -> Option<&str> {
        match &self.over {
            Over::Resp3 { run_id, .. } => run_id.as_deref(),
            Over::Resp2 { .. } => None,
        }
    }

    /// A channel with a random name that it listens to, so that another connection can tell where it leads to.
    pub(super) fn private_channel(&self) -> Option<&str> {
        match &self.over {
            Over::Resp3 { .. } => None,
            Over::Resp2 { private, .. } => private.as_deref(),
        }
    }
}

/// Whether a connection answers. The command is one that scripts need, too, so that no refusal is logged.
pub(super) async fn responds(connection: &mut Wire) -> bool {
    is_answer(&connection.send(&redis::cmd("TIME")).await)
}

/// Whether the server has sent this: an error reply is an answer, too.
fn is_answer<T>(answer: &RedisResult<T>) -> bool {
    !answer.as_ref().is_err_and(|error| error.code().is_none())
}

/// Handles unsolicited messages over a RESP3 subscriber connection.
pub(super) fn subscriber_handler(
    on_message: MessageHandler,
    status: Arc<SubscriberStatus>,
) -> impl Fn(PushInfo) -> Result<(), Infallible> + Send + Sync + 'static {
    move |info| {
        match info.kind {
            // A server that loses a slot unsubscribes its channels. The redis crate takes this for a reply and then assigns
            // every later reply to the wrong command, so the connection must be given up.
            PushKind::SUnsubscribe | PushKind::Disconnection => status.lose(),
            PushKind::Message | PushKind::SMessage if status.receive() => {
                if let [Value::BulkString(channel), Value::BulkString(message)] = info.data.as_slice() {
                    on_message(channel, message);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Delivers published messages over a RESP2 subscriber connection.
async fn forward_messages(
    mut messages: PubSubStream,
    on_message: MessageHandler,
    status: Arc<SubscriberStatus>,
) {
    while let Some(message) = messages.next().await {
        if status.receive() {
            on_message(message.get_channel_name().as_bytes(), message.get_payload_bytes());
        }
    }
    status.lose();
}
