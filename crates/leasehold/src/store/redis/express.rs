//! The caller's own connection: made in its runtime, so that its commands go out, and its pushes come in, without a switch
//! of threads.
//!
//! It hears what is pushed to the client for as long as it is there. Before that, and after it, the home connection does:
//! when the caller's runtime ends, nothing is missed for longer than it takes to notice.

use std::convert::Infallible;
use std::sync::{Arc, Weak};

use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind};
use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::link::{Fate, Hear, Lanes, PAUSES, config, hear_push};
use super::trouble::explain;

/// What keeps it connected.
pub(super) struct Express {
    pub(super) client: redis::Client,
    pub(super) caller: Handle,
    pub(super) lanes: Weak<Lanes>,
    pub(super) fate: Arc<Fate>,
    pub(super) hear: Hear,
    /// What was told meanwhile was missed.
    pub(super) renewed: Arc<dyn Fn() + Send + Sync>,
    /// The client's inbox, where it has one for everything and pushes come with answers.
    pub(super) channel: Option<String>,
    pub(super) is_resp2: bool,
}

/// Tells when the connection's task ends, for whatever reason: also when its runtime does, without a word.
struct Ending(Arc<Notify>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

impl Express {
    pub(super) async fn keep(self) {
        loop {
            let lost = Arc::new(Notify::new());
            match self.caller.spawn(self.connect(lost.clone())).await {
                Ok(Ok(connection)) => {
                    self.put(connection).await;
                    lost.notified().await;
                    self.take().await;
                }
                Ok(Err(error)) => {
                    tracing::debug!(error = explain(&error), "no connection of the caller's own yet");
                }
                // The caller's runtime has ended.
                Err(_) => return,
            }
            tokio::time::sleep(*PAUSES.end()).await;
        }
    }

    fn connect(
        &self,
        lost: Arc<Notify>,
    ) -> impl Future<Output = redis::RedisResult<MultiplexedConnection>> + Send + 'static {
        let (client, channel, is_resp2) = (self.client.clone(), self.channel.clone(), self.is_resp2);
        let (hear, fate, ending) = (self.hear.clone(), self.fate.clone(), Ending(lost));
        let ear = move |info: PushInfo| {
            match info.kind {
                PushKind::Disconnection => ending.0.notify_one(),
                _ => hear_push(&info, &hear, &fate),
            }
            Ok::<(), Infallible>(())
        };
        async move {
            let config = if is_resp2 { config() } else { config().set_push_sender(ear) };
            let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
            if let Some(channel) = channel {
                connection.subscribe(channel).await?;
            }
            Ok(connection)
        }
    }

    /// Both hear for a moment, so that nothing is missed. What is told twice changes nothing.
    async fn put(&self, connection: MultiplexedConnection) {
        let Some(lanes) = self.lanes.upgrade() else { return };
        lanes.put_express(connection);
        if let Some(channel) = &self.channel {
            // If that fails, it is heard twice from now on.
            let _ = lanes.home().unsubscribe(channel).await;
        }
    }

    async fn take(&self) {
        let Some(lanes) = self.lanes.upgrade() else { return };
        lanes.drop_express();
        if let Some(channel) = &self.channel {
            if lanes.home().subscribe(channel).await.is_err() {
                // Nobody would hear anything: all of it is made anew.
                lanes.give_up();
            }
            (self.renewed)();
        }
    }
}
