//! The caller connection: opened in the caller's runtime, so that commands need no thread switch. Pushes come over the driver
//! connection, because the caller's runtime may be idle or may have ended.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind};
use tokio::runtime::{Handle, Id};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::connections::{Connections, config};
use super::error::explain;
use super::handshake;
use super::limits::RECONNECT_BACKOFF;

/// Task that keeps the caller connection open.
pub(super) struct CallerConnection {
    pub(super) client: redis::Client,
    pub(super) caller: Handle,
    pub(super) connections: Weak<Connections>,
    /// Run id of the driver connection's server, if known.
    pub(super) server: Option<String>,
    pub(super) runtime: Arc<CallerRuntime>,
}

/// The runtime in which the client was created.
#[derive(Clone)]
pub(super) struct Caller {
    pub(super) id: Id,
    pub(super) runtime: Arc<CallerRuntime>,
}

impl Caller {
    /// Whether this runs in a task of that runtime, which may send commands.
    pub(super) fn is_here(&self) -> bool {
        let here = Handle::try_current().ok().map(|handle| handle.id());
        here == Some(self.id) && self.runtime.is_usable()
    }
}

/// Whether tasks of the caller's runtime may send commands.
#[derive(Default)]
pub(super) struct CallerRuntime {
    /// A connection was opened there, so its sockets and timers work.
    has_connected: AtomicBool,
    has_ended: AtomicBool,
}

impl CallerRuntime {
    pub(super) fn is_usable(&self) -> bool {
        self.has_connected.load(Ordering::SeqCst) && !self.has_ended()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }

    pub(super) fn set_usable(&self) {
        self.has_connected.store(true, Ordering::SeqCst);
    }

    /// Detects the runtime's shutdown by a task that it drops.
    pub(super) fn watch(self: &Arc<Self>, caller: &Handle) -> AbortHandle {
        let end = End(self.clone());
        let watch = async move {
            let _end = end;
            std::future::pending::<()>().await;
        };
        caller.spawn(watch).abort_handle()
    }
}

struct End(Arc<CallerRuntime>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.has_ended.store(true, Ordering::SeqCst);
    }
}

/// Notifies when the connection's task ends, including by a runtime shutdown.
struct Ending(Arc<Notify>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

impl CallerConnection {
    pub(super) async fn keep(self) {
        loop {
            let lost = Arc::new(Notify::new());
            match self.caller.spawn(self.connect(lost.clone())).await {
                Ok(Ok((connection, server))) => {
                    let Some(connections) = self.connections.upgrade() else { return };
                    if server != self.server {
                        // The address leads to another server now.
                        connections.close();
                        return;
                    }
                    connections.set_caller_conn(connection.into());
                    drop(connections);
                    self.runtime.set_usable();
                    lost.notified().await;
                    let Some(connections) = self.connections.upgrade() else { return };
                    connections.drop_caller_conn();
                }
                Ok(Err(error)) => {
                    tracing::debug!(error = explain(&error), "no connection of the caller's own yet");
                }
                // The caller's runtime has ended, or lacks sockets or timers.
                Err(_) => return,
            }
            tokio::time::sleep(*RECONNECT_BACKOFF.end()).await;
        }
    }

    fn connect(
        &self,
        lost: Arc<Notify>,
    ) -> impl Future<Output = redis::RedisResult<(MultiplexedConnection, Option<String>)>> + Send + 'static
    {
        let client = self.client.clone();
        let ending = Ending(lost);
        let push_handler = move |info: PushInfo| {
            if info.kind == PushKind::Disconnection {
                ending.0.notify_one();
            }
            Ok::<(), Infallible>(())
        };
        async move {
            let config = config().set_push_sender(push_handler);
            let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
            let server = handshake::run_id(&mut connection).await?;
            Ok((connection, server))
        }
    }
}
