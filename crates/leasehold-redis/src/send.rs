//! How calls reach the server: the layers from the store down to a connection.
//!
//! [`Nodes::call`] sends a single call, which [`coalesce`] may group with those of other tasks; [`Nodes::send`] sends a batch, by hash slots
//! in a cluster, and follows redirects there. Both call a [`node`], which chooses the connection and repeats what was lost. With it
//! [`pipeline`] turns calls into commands and replies into answers, [`replicas`] does so where replicas must acknowledge, and [`script`]
//! sends them by the hashes of their scripts.

mod coalesce;
mod node;
pub(super) mod pipeline;
mod replicas;
pub(super) mod script;

use std::collections::BTreeMap;
use std::slice;
use std::time::Duration;

use futures_util::future::{join, join_all};
use leasehold_core::{ClientId, Command, Failure};
use leasehold_redis_protocol::{ScriptVariant, slot_of};
use leasehold_store::tasks::Tasks;
use leasehold_store::{Call, CallResult, StoreError, only};
use tokio::time::{Instant, timeout};

use super::cluster::Cluster;
use super::error::{Answered, CallError, slot_unassigned};
use super::limits::ANSWER_TIMEOUT;
use super::nodes::Nodes;
use crate::url::Host;
pub(super) use coalesce::{Coalescer, ReplicaQueue};
use node::Node;
use pipeline::{Mode, Role};

/// Redirects that are followed without a pause: to the new owner of the slot, and once more if that has just changed.
const MAX_IMMEDIATE_REDIRECTS: u32 = 2;

/// A renewal of a detached lease waits this fraction of its ttl for the record of the client that detached it.
const TTL_FRACTION: u32 = 20;

/// Pause before a command to a migrating slot is retried.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

impl Nodes {
    /// Sends one call: together with others, unless it needs more than one connection to one server.
    pub(super) async fn call(&self, call: &Call, replicas: u32) -> CallResult {
        let batch = slice::from_ref(call);
        if let (Self::Server { endpoint, voting: None, record, .. }, 0) = (self, replicas)
            && record.covers(batch)
            && let Some(connections) = endpoint.current()
        {
            let node = Node { endpoint, role: Role::of(ScriptVariant::Server), inboxes: None };
            return node.send_with_others(&connections, call).await.map_err(StoreError::from);
        }
        only(Box::pin(self.send(batch, Mode::of_replicas(replicas))).await)
    }

    /// Sends calls in order. Returns one result per call, in the same order.
    ///
    /// Also has the client's record written, if these calls are the first that need it. They do not wait for it, since it may be
    /// on a node that does not answer. The records of other clients whose leases they renew are kept at the same time.
    pub(super) async fn send(&self, batch: &[Call], mode: Mode) -> Vec<CallResult> {
        if self.record().must_cover(batch) {
            // By its keeper: this future may be dropped.
            self.record().request_write();
        }
        let others = self.record().take_others(batch);
        let answers = self.send_to_nodes(batch, mode);
        if others.is_empty() {
            return answers.await;
        }
        let limit = record_limit(batch);
        let keep = async {
            if timeout(limit, self.keep_others(&others, limit)).await != Ok(true) {
                others.iter().for_each(|(client, _)| self.record().retry_other(*client));
            }
        };
        Box::pin(join(keep, answers)).await.1
    }

    async fn send_to_nodes(&self, batch: &[Call], mode: Mode) -> Vec<CallResult> {
        match self {
            Self::Server { endpoint, .. } => {
                let calls: Vec<&Call> = batch.iter().collect();
                let node = Node { endpoint, role: self.role(), inboxes: None };
                let answers = node.send(&calls, mode).await;
                answers.into_iter().map(|answer| answer.map_err(StoreError::from)).collect()
            }
            Self::Cluster { cluster, client, tasks, .. } => {
                let batch = ClusterBatch { cluster, role: self.role(), client: *client, tasks, batch, mode };
                Box::pin(batch.follow_redirects()).await
            }
        }
    }
}

/// How long the renewals in a batch wait for the records of other clients: only as long as their leases can bear.
fn record_limit(batch: &[Call]) -> Duration {
    let limit = |call: &Call| match &call.command {
        Command::Renew(renew) if !renew.only_asks() => Some(renew.ttl / TTL_FRACTION),
        _ => None,
    };
    batch.iter().filter_map(limit).fold(ANSWER_TIMEOUT, Duration::min)
}

/// A batch that is sent to a cluster.
struct ClusterBatch<'a> {
    cluster: &'a Cluster,
    role: Role,
    client: ClientId,
    tasks: &'a Tasks,
    batch: &'a [Call],
    mode: Mode,
}

/// A call without a final result.
struct PendingCall {
    index: usize,
    slot: u16,
    /// The importing node, after an ASK redirect.
    asked: Option<Host>,
    /// Its result if it stays without a better one: that it was queued without a subscription, or else the last error.
    fallback: Option<CallResult>,
}

/// What follows from the answer of a node.
enum Outcome {
    /// The final result.
    Done(CallResult),
    /// The slot has this master now. The call goes there at once.
    Moved(PendingCall, Host),
    /// A redirect of this call only: it goes to the other node at once.
    Redirected(PendingCall),
    /// The call had no effect. It is repeated after a pause, with the new slot map.
    Postponed(PendingCall),
}

impl ClusterBatch<'_> {
    async fn follow_redirects(&self) -> Vec<CallResult> {
        let give_up = Instant::now() + ANSWER_TIMEOUT;
        let mut answers: Vec<Option<CallResult>> = self.batch.iter().map(|_| None).collect();
        let pending = |(index, Call { resource, .. }): (usize, &Call)| PendingCall {
            index,
            slot: slot_of(resource),
            asked: None,
            fallback: None,
        };
        let mut rounds = 0;
        let mut pending_calls: Vec<PendingCall> = self.batch.iter().enumerate().map(pending).collect();
        loop {
            let groups = self.by_node(pending_calls).into_iter();
            let done = join_all(groups.map(|(to, calls)| self.run_group(to, calls))).await;
            pending_calls = Vec::new();
            let (mut is_pausing, mut moved) = (false, Vec::new());
            for (pending, answer) in done.into_iter().flatten() {
                let index = pending.index;
                match self.outcome(pending, answer) {
                    Outcome::Done(result) => answers[index] = Some(result),
                    Outcome::Moved(pending, to) => {
                        moved.push((pending.slot, to));
                        pending_calls.push(pending);
                    }
                    Outcome::Redirected(pending) => pending_calls.push(pending),
                    Outcome::Postponed(pending) => {
                        self.cluster.request_refresh();
                        is_pausing = true;
                        pending_calls.push(pending);
                    }
                }
            }
            if !moved.is_empty() {
                self.cluster.moved(moved);
            }
            // A redirected call must not delay the other answers of the batch: its sender retries it.
            let is_held_back = !pending_calls.is_empty() && self.batch.len() > 1 && self.mode != Mode::Atomic;
            if pending_calls.is_empty() || is_held_back || Instant::now() >= give_up {
                break;
            }
            rounds += 1;
            if is_pausing || rounds > MAX_IMMEDIATE_REDIRECTS {
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
        for PendingCall { index, fallback, .. } in pending_calls {
            // Without a subscription the waiter re-checks at its poll interval, or when the slots have changed.
            answers[index] = fallback;
        }
        answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(redirect_loop()))).collect()
    }

    fn outcome(&self, pending: PendingCall, answer: Answered) -> Outcome {
        let pending = PendingCall { asked: None, ..pending };
        match answer {
            Ok(answer) => Outcome::Done(Ok(answer)),
            Err(CallError::Moved(to)) => Outcome::Moved(pending, to),
            Err(CallError::Ask(to)) => Outcome::Redirected(PendingCall { asked: Some(to), ..pending }),
            Err(CallError::NotSubscribed(queued)) => {
                Outcome::Postponed(PendingCall { fallback: Some(Ok(*queued)), ..pending })
            }
            Err(CallError::TryAgain(error) | CallError::NotConnected(error) | CallError::ReadOnly(error)) => {
                let fallback = pending.fallback.filter(Result::is_ok).or(Some(Err(error)));
                Outcome::Postponed(PendingCall { fallback, ..pending })
            }
            Err(
                CallError::ConnectionLost(error)
                | CallError::Timeout(error)
                | CallError::Denied(error)
                | CallError::Failed(error),
            ) => {
                self.cluster.request_refresh();
                Outcome::Done(Err(error))
            }
        }
    }

    fn by_node(&self, pending_calls: Vec<PendingCall>) -> BTreeMap<(Option<Host>, bool), Vec<PendingCall>> {
        let mut groups = BTreeMap::<_, Vec<PendingCall>>::new();
        for pending in pending_calls {
            let is_asking = pending.asked.is_some();
            let to = pending.asked.clone().or_else(|| self.cluster.master_of(pending.slot));
            groups.entry((to, is_asking)).or_default().push(pending);
        }
        groups
    }

    async fn run_group(
        &self,
        (to, is_asking): (Option<Host>, bool),
        pending_calls: Vec<PendingCall>,
    ) -> Vec<(PendingCall, Answered)> {
        let endpoint = match &to {
            None => Err(slot_unassigned()),
            Some(host) => self.cluster.endpoint(host, self.tasks),
        };
        let endpoint = match endpoint {
            Ok(endpoint) => endpoint,
            Err(error) => {
                return pending_calls
                    .into_iter()
                    .map(|pending| (pending, Err(CallError::TryAgain(error.clone()))))
                    .collect();
            }
        };
        let calls: Vec<&Call> = pending_calls.iter().map(|pending| &self.batch[pending.index]).collect();
        let role = Role { is_asking, ..self.role };
        let node = Node { endpoint: &endpoint, role, inboxes: Some((self.client, self.tasks)) };
        let answers = node.send(&calls, self.mode).await;
        // It may be cut off from the other nodes, and not know that it was replaced.
        let is_unsure = |answer| {
            matches!(
                answer,
                &Err(CallError::TryAgain(_) | CallError::Timeout(_) | CallError::NotConnected(_))
            )
        };
        if let Some(host) = to.filter(|_| answers.iter().any(is_unsure)) {
            self.cluster.doubt(host);
        }
        pending_calls.into_iter().zip(answers).collect()
    }
}

fn redirect_loop() -> StoreError {
    StoreError::new(Failure::Busy, "the cluster's nodes redirect in a loop: try again soon")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use leasehold_core::{Acquisition, Kind, Name, Renew, Resource};

    use super::*;

    #[test]
    fn renewal_waits_for_the_record_a_twentieth_of_its_ttl() {
        let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
        let renew = |ttl_ms| {
            let acquisition = Acquisition { client: ClientId::new(2), sequence: 1 };
            let ttl = Duration::from_millis(ttl_ms);
            Call::new(resource.clone(), Command::Renew(Renew::to(acquisition, ttl)))
        };
        let limit_ms = |batch: &[_]| record_limit(batch).as_millis();
        assert_eq!(limit_ms(&[renew(100)]), 5);
        assert_eq!(limit_ms(&[renew(10_000)]), 500, "two round trips of a slow link");
        assert_eq!(limit_ms(&[renew(3_600_000)]), 1_000, "no longer than an answer takes");
        assert_eq!(
            limit_ms(&[renew(10_000), renew(1_000), Call::new(resource.clone(), Command::Inspect)]),
            50
        );
    }
}
