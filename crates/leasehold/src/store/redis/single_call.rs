//! One command of a caller to one server, which is the usual case. It needs no list of commands or answers. Everything else is
//! sent as a batch (`dispatch.rs`): several commands, clusters, quorum nodes, replicas, look-ups, a command that
//! needs the client's record, and a server without a connection.

use std::slice;
use std::sync::Arc;

use leasehold_core::{Answer, Command, Resource};
use leasehold_redis_protocol::{ScriptVariant, VoteArgs};

use super::connections::Connections;
use super::dispatch::{is_refused_by_a_replica, settle};
use super::endpoint::Endpoint;
use super::error::CallError;
use super::exec::{self, CallOptions};
use super::nodes::Nodes;
use crate::store::{CallResult, StoreError, only};

type Call = (Arc<Resource>, Command);
type Answered = Result<Answer, CallError>;

impl Nodes {
    /// Runs one command.
    pub(super) async fn run_single(&self, call: &Call, replicas: u32) -> CallResult {
        let batch = slice::from_ref(call);
        // An answer to these needs the records of the clients in it.
        let is_lookup = matches!(call.1, Command::Inspect | Command::ForceRelease);
        if let (Self::Server { endpoint, voting: None, record }, 0, false) = (self, replicas, is_lookup)
            && record.covers(batch)
            && let Some(connections) = endpoint.current()
        {
            // Dropped before the rare path, so that it does not make this future larger.
            let answered = {
                let mut wire = connections.preferred_conn();
                exec::run_one(&mut wire, options_of(&connections), call).await
            };
            return match answered {
                Ok(answer) if !connections.is_closed() => Ok(answer),
                failed => Box::pin(settled(endpoint, &connections, call, failed)).await,
            };
        }
        only(Box::pin(self.run(batch, replicas, None)).await)
    }
}

fn options_of(connections: &Connections) -> CallOptions<'_> {
    let vote_args = VoteArgs { run_id: connections.run_id(), ..VoteArgs::default() };
    let deletes = connections.deletes();
    CallOptions { variant: ScriptVariant::Server, vote_args, is_asking: false, deletes, is_atomic: false }
}

/// What follows a failure, as for a batch.
async fn settled(
    endpoint: &Endpoint,
    connections: &Arc<Connections>,
    call: &Call,
    answered: Answered,
) -> CallResult {
    if matches!(answered, Err(CallError::ConnectionLost(_) | CallError::Timeout(_))) {
        connections.drop_preferred_conn();
    }
    let mut answers = [answered];
    settle(endpoint, connections, options_of(connections), 0, &[call], &mut answers).await;
    if answers.iter().any(is_refused_by_a_replica) {
        endpoint.invalidate();
    }
    let [answered] = answers;
    answered.map_err(StoreError::from)
}
