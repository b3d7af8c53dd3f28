//! The caller's own connection: made in its runtime, so that its commands go out, and its pushes come in, without a switch
//! of threads.
//!
//! The home connection hears the same pushes, since the caller's runtime may be doing nothing, or may have ended. What is
//! told twice changes nothing.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind};
use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::greeting;
use super::link::{Fate, Hear, Lanes, PAUSES, config, hear_push};
use super::trouble::explain;

/// What keeps it connected.
pub(super) struct Express {
    pub(super) client: redis::Client,
    pub(super) caller: Handle,
    pub(super) lanes: Weak<Lanes>,
    pub(super) fate: Arc<Fate>,
    pub(super) hear: Hear,
    /// The client's inbox, where it has one for everything.
    pub(super) channel: Option<String>,
    /// The run id of the server that the home connection leads to, where it is known.
    pub(super) server: Option<String>,
    /// A connection has been made there, so sockets and timers work.
    pub(super) usable: Arc<AtomicBool>,
}

/// Tells when the connection's task ends, for whatever reason: also when its runtime does, without a word.
struct Ending {
    lost: Arc<Notify>,
    usable: Arc<AtomicBool>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.usable.store(false, Ordering::SeqCst);
        self.lost.notify_one();
    }
}

impl Express {
    pub(super) async fn keep(self) {
        loop {
            let lost = Arc::new(Notify::new());
            match self.caller.spawn(self.connect(lost.clone())).await {
                Ok(Ok((connection, server))) => {
                    let Some(lanes) = self.lanes.upgrade() else { return };
                    if server != self.server {
                        // What one address leads to has changed in between.
                        lanes.give_up();
                        return;
                    }
                    lanes.put_express(connection);
                    drop(lanes);
                    self.usable.store(true, Ordering::SeqCst);
                    lost.notified().await;
                    let Some(lanes) = self.lanes.upgrade() else { return };
                    lanes.drop_express();
                }
                Ok(Err(error)) => {
                    tracing::debug!(error = explain(&error), "no connection of the caller's own yet");
                }
                // The caller's runtime has ended, or has no sockets or timers.
                Err(_) => return,
            }
            tokio::time::sleep(*PAUSES.end()).await;
        }
    }

    fn connect(
        &self,
        lost: Arc<Notify>,
    ) -> impl Future<Output = redis::RedisResult<(MultiplexedConnection, Option<String>)>> + Send + 'static
    {
        let (client, channel) = (self.client.clone(), self.channel.clone());
        let (hear, fate) = (self.hear.clone(), self.fate.clone());
        let ending = Ending { lost, usable: self.usable.clone() };
        let ear = move |info: PushInfo| {
            match info.kind {
                PushKind::Disconnection => ending.lost.notify_one(),
                _ => hear_push(&info, &hear, &fate),
            }
            Ok::<(), Infallible>(())
        };
        async move {
            let config = config().set_push_sender(ear);
            let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
            if let Some(channel) = channel {
                connection.subscribe(channel).await?;
            }
            let server = greeting::run_id(&mut connection).await?;
            Ok((connection, server))
        }
    }
}
