//! Sends commands to nodes, and follows cluster redirects.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join, join_all};
use leasehold_core::{Answer, ClientId, Command, Failure, Reply, Token};
use leasehold_redis_protocol::{ScriptVariant, VoteArgs, slot_of};
use leasehold_store::tasks::{Task, TaskEnded, Tasks};
use leasehold_store::{Call, CallResult, StoreError};
use tokio::time::{Instant, timeout};

use super::cluster::Cluster;
use super::connections::Connections;
use super::endpoint::Endpoint;
use super::error::{CallError, lost};
use super::exec::{self, CallOptions};
use super::subscriptions::{self, require_subscription, subscribe};
use super::{ANSWER_TIMEOUT, Nodes, replicas, slot_unassigned};
use crate::url::Host;

/// Redirects that are followed without a pause: to the new owner of the slot, and once more if that has just changed.
const MAX_IMMEDIATE_REDIRECTS: u32 = 2;

/// A renewal of a detached lease waits this fraction of its ttl for the record of the client that detached it.
const TTL_FRACTION: u32 = 20;

/// Pause before a command to a migrating slot is retried.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// How long the renewals in a batch wait for the records of other clients: only as long as their leases can bear.
fn record_limit(batch: &[Call]) -> Duration {
    let limit = |call: &Call| match &call.command {
        Command::Renew(renew) if !renew.only_asks() => Some(renew.ttl / TTL_FRACTION),
        _ => None,
    };
    batch.iter().filter_map(limit).fold(ANSWER_TIMEOUT, Duration::min)
}

impl Nodes {
    /// Runs commands in order. Returns one result per command, in the same order.
    pub(super) async fn run_batch(
        &self,
        batch: &[Call],
        replicas: u32,
        floor: Option<Token>,
    ) -> Vec<CallResult> {
        self.run_with_records(batch, replicas, floor, false).await
    }

    /// Runs attempts at resources of one hash slot as one atomic command.
    pub(super) async fn run_atomic(&self, batch: &[Call]) -> Vec<CallResult> {
        self.run_with_records(batch, 0, None, true).await
    }

    /// Also has the client's record written, if these commands are the first that need it. They do not wait for it, since it may be
    /// on a node that does not answer. The records of other clients whose leases they renew are kept at the same time.
    async fn run_with_records(
        &self,
        batch: &[Call],
        replicas: u32,
        floor: Option<Token>,
        is_atomic: bool,
    ) -> Vec<CallResult> {
        if self.record().must_cover(batch) {
            // By its keeper: this future may be dropped.
            self.record().request_write();
        }
        let others = self.record().take_others(batch);
        let answers = self.run_at_nodes(batch, replicas, floor, is_atomic);
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

    async fn run_at_nodes(
        &self,
        batch: &[Call],
        replicas: u32,
        floor: Option<Token>,
        is_atomic: bool,
    ) -> Vec<CallResult> {
        match self {
            Self::Server { endpoint, voting, .. } => {
                let calls: Vec<&Call> = batch.iter().collect();
                let variant = if voting.is_some() { ScriptVariant::Voter } else { ScriptVariant::Server };
                let abstains_for = voting.and_then(|voting| voting.abstains_for);
                let vote_args = VoteArgs { floor, abstains_for, run_id: "" };
                let options = CallOptions { vote_args, is_atomic, ..CallOptions::of(variant) };
                let answers = run_on_node(endpoint, options, replicas, &calls, None).await;
                // Reconnect: the sentinels, or the host name, may lead to the new master.
                if answers.iter().any(is_refused_by_a_replica) {
                    endpoint.invalidate();
                }
                answers.into_iter().map(|answer| answer.map_err(StoreError::from)).collect()
            }
            Self::Cluster { cluster, variant, client, tasks, .. } => {
                let (variant, client) = (*variant, *client);
                Box::pin(
                    ClusterBatch { cluster, variant, client, tasks, batch, replicas, is_atomic }
                        .follow_redirects(),
                )
                .await
            }
        }
    }
}

pub(super) fn is_refused_by_a_replica(answer: &Result<Answer, CallError>) -> bool {
    matches!(answer, Err(CallError::ReadOnly(_)))
}

/// Runs calls on one node, with the subscriptions that they need.
async fn run_on_node(
    endpoint: &Endpoint,
    options: CallOptions<'_>,
    replicas: u32,
    calls: &[&Call],
    inboxes: Option<(ClientId, &Tasks)>,
) -> Vec<Result<Answer, CallError>> {
    let connections = match endpoint.connections().await {
        Ok(connections) => connections,
        Err(error) => {
            if calls.iter().any(|Call { command, .. }| matches!(command, Command::Renew(_))) {
                endpoint.skip_backoff();
            }
            return calls.iter().map(|_| Err(CallError::NotConnected(error.clone()))).collect();
        }
    };
    let options = connections.options(options);
    let mut answers = match inboxes {
        None => run_on_connection(&connections, options, replicas, calls).await,
        Some(inboxes) => Box::pin(subscribe_and_run(&connections, options, replicas, calls, inboxes)).await,
    };
    if connections.is_closed() || answers.iter().any(Result::is_err) {
        Box::pin(settle(endpoint, &connections, options, replicas, calls, &mut answers)).await;
    }
    answers
}

/// Handles answers of closed connections and failed commands: repeats what was lost and may be repeated, and checks the connection.
pub(super) async fn settle(
    endpoint: &Endpoint,
    connections: &Arc<Connections>,
    options: CallOptions<'_>,
    replicas: u32,
    calls: &[&Call],
    answers: &mut [Result<Answer, CallError>],
) {
    if connections.is_closed() {
        // A reply may have been assigned to the wrong command.
        for answer in answers.iter_mut() {
            let cause = answer.as_ref().err().and_then(|error| StoreError::from(error.clone()).cause);
            *answer = Err(CallError::ConnectionLost(lost(cause)));
        }
    }
    if answers.iter().any(is_lost) {
        // So that an immediate retry does not use the lost connection.
        endpoint.await_stable(connections).await;
        // A server that votes is one of several, and its reply would come late.
        if !options.variant.is_voter() {
            repeat_lost(endpoint, options, replicas, calls, answers).await;
        }
    } else if answers.iter().any(|answer| matches!(answer, Err(CallError::Timeout(_)))) {
        endpoint.request_health_check();
    }
}

fn is_lost(answer: &Result<Answer, CallError>) -> bool {
    matches!(answer, Err(CallError::ConnectionLost(_)))
}

/// Sends lost commands once more, over the current connection. Otherwise every connection that was cut while idle would cause
/// an error.
///
/// An `Acquire` is not repeated here: its attempt must know that the lost command may arrive late. A `ForceRelease` is not
/// repeated either: its reply lists what it removed, and a second reply would not.
async fn repeat_lost(
    endpoint: &Endpoint,
    options: CallOptions<'_>,
    replicas: u32,
    calls: &[&Call],
    answers: &mut [Result<Answer, CallError>],
) {
    let Some(connections) = endpoint.current() else { return };
    let repeats =
        |command: &Command| matches!(command, Command::Renew(_) | Command::Release(_) | Command::Inspect);
    let lost: Vec<usize> =
        (0..calls.len()).filter(|at| is_lost(&answers[*at]) && repeats(&calls[*at].command)).collect();
    if lost.is_empty() {
        return;
    }
    let again: Vec<&Call> = lost.iter().map(|at| calls[*at]).collect();
    let options = connections.options(options);
    let repeated = run_on_connection(&connections, options, replicas, &again).await;
    if connections.is_closed() {
        return;
    }
    for ((at, Call { command, .. }), mut answer) in lost.into_iter().zip(again).zip(repeated) {
        if let (Command::Release(release), Ok(Answer { reply: reply @ Reply::NotHeld, .. })) =
            (command, &mut answer)
        {
            if !release.min_hold.is_zero() {
                // Its sender knows whether the lease may have expired instead.
                continue;
            }
            // The lost one may be why nothing is left to release.
            *reply = Reply::Released;
        }
        answers[at] = answer;
    }
}

/// Runs calls on the preferred connection. A lost caller connection is dropped.
async fn run_on_connection(
    connections: &Arc<Connections>,
    options: CallOptions<'_>,
    replicas: u32,
    calls: &[&Call],
) -> Vec<Result<Answer, CallError>> {
    if replicas > 0 {
        return Box::pin(replicas::run_replicated(connections, options, replicas, calls)).await;
    }
    let Some(caller_conn) = connections.caller_conn() else {
        return exec::run_in_pipeline(connections.driver_wire(), options, calls).await;
    };
    let answers = exec::run_in_pipeline(caller_conn, options, calls).await;
    if answers
        .iter()
        .any(|answer| matches!(answer, Err(CallError::ConnectionLost(_) | CallError::Timeout(_))))
    {
        connections.drop_caller_conn();
    }
    answers
}

/// Also subscribes to the inboxes of attempts and holders: a holder is notified that its lease was revoked. Only attempts that are queued
/// wait for that.
async fn subscribe_and_run(
    connections: &Arc<Connections>,
    options: CallOptions<'_>,
    replicas: u32,
    calls: &[&Call],
    inboxes: (ClientId, &Tasks),
) -> Vec<Result<Answer, CallError>> {
    let subscribing = subscribe_to(connections, options, calls, inboxes);
    let mut answers = run_on_connection(connections, options, replicas, calls).await;
    let mut asks_again = vec![false; calls.len()];
    for (slot, subscribed) in subscribing {
        let is_concerned = |at: &usize| {
            slot_of(&calls[*at].resource) == slot && waits(&calls[*at].command) && is_queued(&answers[*at])
        };
        let queued: Vec<usize> = (0..calls.len()).filter(is_concerned).collect();
        if queued.is_empty() {
            continue;
        }
        match subscribed.await {
            // It may have been queued before the client listened, and passed over.
            Ok(subscriptions::Outcome::New) => queued.into_iter().for_each(|at| asks_again[at] = true),
            Ok(subscriptions::Outcome::Failed(error)) => {
                queued.into_iter().for_each(|at| require_subscription(&mut answers[at], &error));
            }
            Ok(subscriptions::Outcome::Absent) | Err(TaskEnded) => {}
        }
    }
    if options.is_atomic && asks_again.contains(&true) {
        return run_on_connection(connections, options, replicas, calls).await;
    }
    let again: Vec<usize> = (0..calls.len()).filter(|at| asks_again[*at]).collect();
    if !again.is_empty() {
        let queued: Vec<&Call> = again.iter().map(|at| calls[*at]).collect();
        let later = run_on_connection(connections, options, replicas, &queued).await;
        again.into_iter().zip(later).for_each(|(at, answer)| answers[at] = answer);
    }
    answers
}

/// Begins to subscribe to the inboxes of these calls, by their slots. Each attempt does so by itself, even if another one is subscribing.
fn subscribe_to(
    connections: &Arc<Connections>,
    options: CallOptions<'_>,
    calls: &[&Call],
    (client, tasks): (ClientId, &Tasks),
) -> Vec<(u16, Task<subscriptions::Outcome>)> {
    let Some(subscription) = connections.subscription() else { return Vec::new() };
    let has_inbox = |command: &Command| matches!(command, Command::Acquire(_) | Command::Renew(_));
    let mut slots: Vec<u16> = calls
        .iter()
        .filter(|Call { command, .. }| has_inbox(command))
        .map(|call| slot_of(&call.resource))
        .collect();
    slots.sort_unstable();
    slots.dedup();
    slots.retain(|slot| !subscription.has_slot(*slot));
    let (channels, is_asking) = (options.variant.channels(), options.is_asking);
    let subscribe = |slot| {
        let subscription = subscription.clone();
        (slot, tasks.start(async move { subscribe(&subscription, channels, is_asking, client, slot).await }))
    };
    slots.into_iter().map(subscribe).collect()
}

fn waits(command: &Command) -> bool {
    matches!(command, Command::Acquire(acquire) if acquire.wait.is_some())
}

fn is_queued(answer: &Result<Answer, CallError>) -> bool {
    answer.as_ref().is_ok_and(|answer| matches!(answer.reply, Reply::Queued(_)))
}

// --- A cluster -----------------------------------------------------------------------------------

/// A batch that is sent to a cluster.
struct ClusterBatch<'a> {
    cluster: &'a Cluster,
    variant: ScriptVariant,
    client: ClientId,
    tasks: &'a Tasks,
    batch: &'a [Call],
    replicas: u32,
    is_atomic: bool,
}

/// A call without a final result.
struct PendingCall {
    index: usize,
    slot: u16,
    /// The importing node, after an ASK redirect.
    asked: Option<Host>,
    /// The last error.
    error: Option<StoreError>,
    /// Its answer, if it was queued without a subscription.
    queued: Option<Answer>,
}

/// What follows from the answer of a node.
enum Outcome {
    /// The final result.
    Done(CallResult),
    /// A redirect: the call goes to the other node at once.
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
            error: None,
            queued: None,
        };
        let mut rounds = 0;
        let mut pending_calls: Vec<PendingCall> = self.batch.iter().enumerate().map(pending).collect();
        loop {
            let groups = self.by_node(pending_calls).into_iter();
            let done = join_all(groups.map(|(to, calls)| self.run_group(to, calls))).await;
            pending_calls = Vec::new();
            let mut is_pausing = false;
            for (pending, answer) in done.into_iter().flatten() {
                let index = pending.index;
                match self.outcome(pending, answer) {
                    Outcome::Done(result) => answers[index] = Some(result),
                    Outcome::Redirected(pending) => pending_calls.push(pending),
                    Outcome::Postponed(pending) => {
                        self.cluster.request_refresh();
                        is_pausing = true;
                        pending_calls.push(pending);
                    }
                }
            }
            // A redirected call must not delay the other answers of the batch: its sender retries it.
            let is_held_back = !pending_calls.is_empty() && self.batch.len() > 1 && !self.is_atomic;
            if pending_calls.is_empty() || is_held_back || Instant::now() >= give_up {
                break;
            }
            rounds += 1;
            if is_pausing || rounds > MAX_IMMEDIATE_REDIRECTS {
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
        for PendingCall { index, queued, error, .. } in pending_calls {
            // Without a subscription the waiter re-checks at its poll interval, or when the slots have changed.
            answers[index] = Some(queued.ok_or_else(|| error.unwrap_or_else(redirect_loop)));
        }
        answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(redirect_loop()))).collect()
    }

    fn outcome(&self, pending: PendingCall, answer: Result<Answer, CallError>) -> Outcome {
        let pending = PendingCall { asked: None, ..pending };
        match answer {
            Ok(answer) => Outcome::Done(Ok(answer)),
            Err(CallError::Moved(to)) => {
                self.cluster.moved(pending.slot, to);
                Outcome::Redirected(pending)
            }
            Err(CallError::Ask(to)) => Outcome::Redirected(PendingCall { asked: Some(to), ..pending }),
            Err(CallError::NotSubscribed(queued)) => {
                Outcome::Postponed(PendingCall { queued: Some(*queued), ..pending })
            }
            Err(CallError::TryAgain(error) | CallError::NotConnected(error) | CallError::ReadOnly(error)) => {
                Outcome::Postponed(PendingCall { error: Some(error), ..pending })
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
    ) -> Vec<(PendingCall, Result<Answer, CallError>)> {
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
        let options = CallOptions { is_asking, is_atomic: self.is_atomic, ..CallOptions::of(self.variant) };
        let answers =
            run_on_node(&endpoint, options, self.replicas, &calls, Some((self.client, self.tasks))).await;
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
    use leasehold_core::{Acquire, Acquisition, Kind, Name, Renew, Resource};
    use leasehold_redis_protocol::Channels;
    use leasehold_testkit::{Proxy, Server, retry_if_paused};
    use redis::IntoConnectionInfo as _;

    use super::super::connect::Dial;
    use super::super::connections::config;
    use super::super::handshake::ServerFacts;
    use super::super::pushes::{ConnectionStatus, SubscriberStatus, Subscription};
    use super::*;

    /// Something in between lets the connection for messages hang.
    #[tokio::test]
    async fn command_that_waits_for_no_turn_waits_for_no_subscription() {
        let server = Server::on_port();
        retry_if_paused(Duration::from_millis(300), async || {
            let proxy = Proxy::before(&server);
            let dial = |url: String| Dial::from(url.into_connection_info().unwrap());
            let beside = dial(proxy.url()).open(false, &config()).await.unwrap();
            let driver_conn = dial(server.url()).open(false, &config()).await.unwrap();
            let status = Arc::new(ConnectionStatus::new(Arc::default(), Arc::default()));
            let subscription =
                Subscription::resp3(beside, None, Arc::new(SubscriberStatus::new(status.clone())));
            let facts = ServerFacts::default();
            let connections =
                Arc::new(Connections::new(driver_conn, status, None, (dial(server.url()), false), facts));
            connections.set_subscription(Some(Arc::new(subscription)));
            proxy.hold_replies(true);
            let variant = ScriptVariant::Cluster(Channels::Sharded);
            let options = CallOptions::of(variant);
            let (client, ttl) = (ClientId::new(2), Duration::from_secs(60));
            let acquisition = Acquisition { client, sequence: 1 };
            let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
            let acquire = Command::Acquire(Arc::new(Acquire::exclusive(acquisition, ttl)));
            let renew = Command::Renew(Renew { acquisition, ttl, reserve: 0 });
            for command in [acquire, renew] {
                let call = Call::new(resource.clone(), command);
                let inboxes = (client, &Tasks::current());
                let answers = subscribe_and_run(&connections, options, 0, &[&call], inboxes).await;
                // Without an answer within a second it would be given up.
                let is_open = connections.subscription().is_some_and(|subscription| !subscription.is_lost());
                let reply = answers[0].as_ref().map(|answer| &answer.reply).ok();
                let is_granted = matches!(reply, Some(Reply::Granted(_) | Reply::Renewed { .. }));
                if !is_granted || !is_open {
                    return Err(format!("{reply:?}, waited for the subscription: {}", !is_open));
                }
            }
            Ok(())
        })
        .await;
    }

    #[test]
    fn renewal_waits_for_the_record_a_twentieth_of_its_ttl() {
        let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
        let renew = |ttl_ms| {
            let acquisition = Acquisition { client: ClientId::new(2), sequence: 1 };
            let ttl = Duration::from_millis(ttl_ms);
            Call::new(resource.clone(), Command::Renew(Renew { acquisition, ttl, reserve: 0 }))
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
