//! Keeps a connection that the program shares usable for commands of its tasks.

use std::sync::{Arc, Weak};

use tokio::runtime::Handle;

use super::caller_conn::CallerRuntime;
use super::connections::Connections;
use super::error::explain;
use super::limits::RECONNECT_BACKOFF;
use super::wire::{SharedConnection, Wire, leads_elsewhere};

/// Task that offers a shared connection to the commands of the caller's runtime while it can be used.
pub(super) struct SharedKeeper {
    pub(super) connection: SharedConnection,
    pub(super) connections: Weak<Connections>,
    /// The runtime of the tasks that use the connection.
    pub(super) caller: Handle,
    pub(super) runtime: Arc<CallerRuntime>,
}

impl SharedKeeper {
    pub(super) async fn keep(self) {
        let mut has_warned = false;
        loop {
            let own = self.connections.upgrade().map(|connections| connections.driver_conn());
            let Some(mut own) = own else { return };
            match self.connection.verify(&mut own, &self.caller).await {
                Ok(wire) => {
                    let Some(connections) = self.connections.upgrade() else { return };
                    connections.set_caller_wire(Wire::Shared(wire));
                    self.runtime.set_usable();
                    has_warned = false;
                    drop(connections);
                    self.connection.until_changed().await;
                    let current = self.connections.upgrade().filter(|connections| !connections.is_closed());
                    let Some(connections) = current else {
                        // The notification was for the task of the connections that replaced these.
                        self.connection.notify_changed();
                        return;
                    };
                    connections.drop_caller_conn();
                    tracing::debug!("the shared connection was lost, or has reconnected");
                }
                Err(_) if self.runtime.has_ended() => return,
                Err(error) if leads_elsewhere(&error) && !has_warned => {
                    has_warned = true;
                    tracing::warn!("{}", explain(&error));
                }
                Err(error) => {
                    tracing::debug!(error = explain(&error), "the shared connection can't be used yet");
                }
            }
            tokio::time::sleep(*RECONNECT_BACKOFF.end()).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use leasehold_testkit::{Server, until};

    use super::super::connections::config;
    use super::super::handshake::ServerFacts;
    use super::super::pushes::ConnectionStatus;
    use super::*;

    #[tokio::test]
    async fn loss_is_noticed_for_the_present_connections_while_earlier_ones_are_in_use() {
        let server = Server::on_port();
        let client = redis::Client::open(server.url()).unwrap();
        let (caller, runtime) = (Handle::current(), Arc::<CallerRuntime>::default());
        let mut shared = client.get_multiplexed_async_connection().await.unwrap();
        let id: u64 = redis::cmd("CLIENT").arg("ID").query_async(&mut shared).await.unwrap();
        let connection = SharedConnection::new(shared);
        let connections = async || {
            let status = Arc::new(ConnectionStatus::new(Arc::default(), Arc::default()));
            let own = client.get_multiplexed_async_connection_with_config(&config()).await.unwrap();
            let dial = (client.get_connection_info().clone().into(), true);
            let connections =
                Connections::new(own.into(), status, Some(caller.id()), dial, ServerFacts::default());
            let connections = Arc::new(connections);
            let keeper = SharedKeeper {
                connection: connection.clone(),
                connections: Arc::downgrade(&connections),
                caller: caller.clone(),
                runtime: runtime.clone(),
            };
            tokio::spawn(keeper.keep());
            until(async || connections.caller_conn().is_some()).await;
            connections
        };
        let earlier = connections().await;
        let present = connections().await;
        earlier.close();
        server.run(&["CLIENT", "KILL", "ID", &id.to_string()]);
        let mut wire = present.caller_conn().unwrap();
        wire.send(&redis::cmd("PING")).await.unwrap_err();
        until(async || present.caller_conn().is_none()).await;
    }
}
