//! One server endpoint, kept connected.
//!
//! The reconnector is a task on the client's own thread. It connects, publishes the connections, waits until they are lost,
//! and reconnects with backoff. Messages over a closed connection are dropped. Pushes over a new connection count only after
//! `on_reconnect` has run, because it may lead to another server with another clock.
//!
//! The *driver connection* belongs to the client's thread. The *caller connection* belongs to the runtime in which the client
//! was created, if any (`caller_conn`). It is optional, so that renewals do not depend on the caller's runtime. The *subscriber
//! connection* receives the pushes (`subscriber`). It is optional, too, since others may have the server close it.

mod config;
mod reconnector;

use std::sync::Arc;
use std::time::Duration;

use leasehold_store::tasks;
use leasehold_store::{StoreError, gate};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::connections::Connections;
use super::error::AddressState;
use super::limits::ANSWER_TIMEOUT;
use super::sentinel::Sentinels;
use config::not_sent;
pub(super) use config::{ClusterNode, EndpointConfig, Target};
pub(super) use reconnector::REDIRECTED;
use reconnector::{Reconnector, State};

pub(super) struct Endpoint {
    state: watch::Receiver<State>,
    health_check: Arc<Notify>,
    skip_backoff: Arc<Notify>,
    keeper: AbortHandle,
    /// Those that name the server.
    sentinels: Option<Sentinels>,
    /// Max time to connect for the first time.
    first_timeout: Duration,
}

impl Endpoint {
    /// Starts connecting. Must run on the client's own runtime.
    pub(super) fn new(target: Target, endpoint_config: EndpointConfig) -> Self {
        let (tell, state) = watch::channel(State::Connecting { is_first: true });
        let (health_check, skip_backoff) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let is_resp2 = endpoint_config.is_resp2;
        let sentinels = match &target {
            Target::Master(sentinels) => Some(sentinels.clone()),
            Target::Server(_) | Target::Node(_) => None,
        };
        let first_timeout = target.connect_timeout();
        let keeper = Reconnector {
            target,
            endpoint_config,
            is_resp2,
            is_redirected: Arc::default(),
            state: tell,
            health_check: health_check.clone(),
            skip_backoff: skip_backoff.clone(),
            last_connect: None,
        };
        let keeper = tasks::spawn(gate::throttled(keeper.keep_on()));
        Self { state, health_check, skip_backoff, keeper, sentinels, first_timeout }
    }

    /// The connections, if established.
    pub(super) fn current(&self) -> Option<Arc<Connections>> {
        match &*self.state.borrow() {
            State::Up(connections) => Some(connections.clone()),
            State::Connecting { .. } | State::Down(_) => None,
        }
    }

    /// Waits for the connections. An error means that nothing was sent.
    pub(super) async fn connections(&self) -> Result<Arc<Connections>, StoreError> {
        let (limit, address) = match &*self.state.borrow() {
            State::Up(connections) => return Ok(connections.clone()),
            State::Down(error) => return Err(error.clone()),
            // The first connect may take longer.
            State::Connecting { is_first: true } => (self.first_timeout, AddressState::Unproven),
            State::Connecting { is_first: false } => (ANSWER_TIMEOUT, AddressState::Proven),
        };
        let mut state = self.state.clone();
        let decided = state.wait_for(|state| !matches!(state, State::Connecting { .. }));
        match Box::pin(timeout(limit, decided)).await.map(|found| found.map(|state| state.clone())) {
            Ok(Ok(State::Up(connections))) => Ok(connections),
            Ok(Ok(State::Down(error))) => Err(error),
            _ => Err(not_sent(address.no_answer(limit))),
        }
    }

    /// After the loss of one of these connections: waits, for a bounded time, until the endpoint is known to be up or down.
    pub(super) async fn await_stable(&self, connections: &Arc<Connections>) {
        if !connections.is_closed() && connections.responds().await {
            return;
        }
        self.request_health_check();
        let mut state = self.state.clone();
        let is_settled = |state: &State| match state {
            State::Connecting { .. } => false,
            State::Down(_) => true,
            State::Up(now) => !Arc::ptr_eq(now, connections),
        };
        let _ = timeout(ANSWER_TIMEOUT, state.wait_for(is_settled)).await;
    }

    /// The server is no longer the master: reconnects to find the new one.
    pub(super) fn invalidate(&self, refusal: StoreError) {
        if let Some(sentinels) = &self.sentinels {
            sentinels.forget_master();
        }
        if let Some(connections) = self.current() {
            connections.close_refused(refusal);
        }
    }

    /// Asks a suspect connection whether it answers.
    pub(super) fn request_health_check(&self) {
        self.health_check.notify_one();
    }

    /// A renewal is due without a connection: skips the reconnect backoff.
    pub(super) fn skip_backoff(&self) {
        self.skip_backoff.notify_one();
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

#[cfg(test)]
mod tests;
