//! Keeps a connection that the program shares usable for commands of its tasks.

use std::sync::{Arc, Weak};

use super::caller_conn::CallerRuntime;
use super::connections::Connections;
use super::error::explain;
use super::limits::RECONNECT_BACKOFF;
use super::wire::{SharedConnection, Wire, leads_elsewhere};

/// Task that offers a shared connection to the commands of the caller's runtime while it can be used.
pub(super) struct SharedKeeper {
    pub(super) connection: SharedConnection,
    pub(super) connections: Weak<Connections>,
    pub(super) runtime: Arc<CallerRuntime>,
}

impl SharedKeeper {
    pub(super) async fn keep(self) {
        loop {
            let Some(connections) = self.connections.upgrade() else { return };
            let verified = self.connection.verify(&mut connections.driver_conn()).await;
            match verified {
                Ok(wire) => {
                    connections.set_caller_conn(Wire::Shared(wire));
                    self.runtime.set_usable();
                    drop(connections);
                    self.connection.until_changed().await;
                    let Some(connections) = self.connections.upgrade() else { return };
                    connections.drop_caller_conn();
                    tracing::debug!("the shared connection was lost, or is another one now");
                }
                Err(error) if leads_elsewhere(&error) => tracing::warn!("{}", explain(&error)),
                Err(error) => {
                    tracing::debug!(error = explain(&error), "the shared connection can't be used yet");
                }
            }
            tokio::time::sleep(*RECONNECT_BACKOFF.end()).await;
        }
    }
}
