//! Calls to one server. [`Node::send`] is the only way by which script calls of locks reach it.

use std::sync::Arc;

use leasehold_core::{Answer, ClientId, Command, Reply};
use leasehold_redis_protocol::{ScriptVariant, slot_of};
use leasehold_store::tasks::{Task, TaskEnded, Tasks};
use leasehold_store::{Call, StoreError};

use super::coalesce::Transport;
use super::pipeline::{self, CallOptions, Mode, Role};
use super::replicas;
use crate::connections::Connections;
use crate::endpoint::Endpoint;
use crate::error::{Answered, CallError, lost};
use crate::subscriptions::{self, require_subscription, subscribe};

/// One server, and what it is for the calls.
#[derive(Clone, Copy)]
pub(super) struct Node<'a> {
    pub(super) endpoint: &'a Endpoint,
    pub(super) role: Role,
    /// In a cluster the client has an inbox for each hash slot, to which it subscribes in one of these tasks.
    pub(super) inboxes: Option<(ClientId, &'a Tasks)>,
}

impl Node<'_> {
    /// Runs calls in order, with the subscriptions that they need. Returns one answer per call.
    pub(super) async fn send(self, calls: &[&Call], mode: Mode) -> Vec<Answered> {
        let connections = match self.endpoint.connections().await {
            Ok(connections) => connections,
            Err(error) => {
                if calls.iter().any(|Call { command, .. }| matches!(command, Command::Renew(_))) {
                    self.endpoint.skip_backoff();
                }
                return calls.iter().map(|_| Err(CallError::NotConnected(error.clone()))).collect();
            }
        };
        let options = connections.options(self.role, mode);
        let mut answers = match self.inboxes {
            None => send_over(&connections, options, calls).await,
            Some(inboxes) => Box::pin(subscribe_and_send(&connections, options, calls, inboxes)).await,
        };
        if connections.is_closed() || answers.iter().any(Result::is_err) {
            Box::pin(self.settle(&connections, mode, calls, &mut answers)).await;
        }
        answers.iter_mut().for_each(|answer| bound_wait(&connections, answer));
        answers
    }

    /// Runs a call over these connections, together with calls that other tasks send at the same time.
    pub(super) async fn send_with_others(self, connections: &Arc<Connections>, call: &Call) -> Answered {
        let answered = connections.coalescer().run(connections, call).await;
        let mut answers = [answered];
        if answers[0].is_err() || connections.is_closed() {
            Box::pin(self.settle(connections, Mode::Each, &[call], &mut answers)).await;
        }
        bound_wait(connections, &mut answers[0]);
        let [answered] = answers;
        answered
    }

    /// Handles answers of closed connections and failed commands: repeats what was lost and may be repeated, and checks the connection.
    async fn settle(
        self,
        connections: &Arc<Connections>,
        mode: Mode,
        calls: &[&Call],
        answers: &mut [Answered],
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
            self.endpoint.await_stable(connections).await;
            // A server that votes is one of several, and its reply would come late.
            if !self.role.variant.is_voter() {
                self.repeat_lost(mode, calls, answers).await;
            }
        } else if answers.iter().any(|answer| matches!(answer, Err(CallError::Timeout(_)))) {
            self.endpoint.request_health_check();
        }
        let refused_by_a_replica = answers.iter().find_map(|answer| match answer {
            Err(CallError::ReadOnly(error)) => Some(error),
            _ => None,
        });
        if let Some(refusal) = refused_by_a_replica.filter(|_| !self.role.variant.is_cluster()) {
            // Reconnect: the sentinels, or the host name, may lead to the new master.
            self.endpoint.invalidate(refusal.clone());
        }
    }

    /// Sends lost commands once more, over the current connection. Otherwise every connection that was cut while idle would cause
    /// an error.
    ///
    /// An `Acquire` is not repeated here: its attempt must know that the lost command may arrive late. A `ForceRelease` is not
    /// repeated either: its reply lists what it removed, and a second reply would not.
    async fn repeat_lost(self, mode: Mode, calls: &[&Call], answers: &mut [Answered]) {
        let Some(connections) = self.endpoint.current() else { return };
        let repeats =
            |command: &Command| matches!(command, Command::Renew(_) | Command::Release(_) | Command::Inspect);
        let lost: Vec<usize> =
            (0..calls.len()).filter(|at| is_lost(&answers[*at]) && repeats(&calls[*at].command)).collect();
        if lost.is_empty() {
            return;
        }
        let again: Vec<&Call> = lost.iter().map(|at| calls[*at]).collect();
        let repeated = send_over(&connections, connections.options(self.role, mode), &again).await;
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
}

/// Has a waiter look again soon where a push may be lost.
fn bound_wait(connections: &Connections, answer: &mut Answered) {
    if let Ok(Answer { at, reply: Reply::Queued(queued) }) = answer
        && let Some([head, other]) = connections.longest_waits()
    {
        let latest = *at + if queued.is_head { head } else { other };
        queued.repoll_at = queued.repoll_at.min(latest);
    }
}

fn is_lost(answer: &Answered) -> bool {
    matches!(answer, Err(CallError::ConnectionLost(_)))
}

impl Transport for Connections {
    async fn run_one(&self, call: &Call) -> Answered {
        let answer = pipeline::run_one(&mut self.preferred_conn(), usual_options(self), call).await;
        self.drop_if_suspect(std::slice::from_ref(&answer));
        answer
    }

    async fn run_several(&self, calls: &[&Call]) -> Vec<Answered> {
        send_pipeline(self, usual_options(self), calls).await
    }
}

/// The options of calls that are sent together with others.
fn usual_options(connections: &Connections) -> CallOptions<'_> {
    connections.options(Role::of(ScriptVariant::Server), Mode::Each)
}

/// Runs calls on the connection that is for them.
async fn send_over(
    connections: &Arc<Connections>,
    options: CallOptions<'_>,
    calls: &[&Call],
) -> Vec<Answered> {
    match options.mode {
        Mode::Replicated(replicas) => Box::pin(replicas::run(connections, options, replicas, calls)).await,
        Mode::Each | Mode::Atomic | Mode::AtLeast(_) => send_pipeline(connections, options, calls).await,
    }
}

/// Runs calls on the preferred connection. A lost caller connection is dropped.
async fn send_pipeline(
    connections: &Connections,
    options: CallOptions<'_>,
    calls: &[&Call],
) -> Vec<Answered> {
    let answers = pipeline::run(connections.preferred_conn(), options, calls).await;
    connections.drop_if_suspect(&answers);
    answers
}

/// Also subscribes to the inboxes of attempts and holders: a holder is notified that its lease was revoked. Only attempts that are queued
/// wait for that.
async fn subscribe_and_send(
    connections: &Arc<Connections>,
    options: CallOptions<'_>,
    calls: &[&Call],
    inboxes: (ClientId, &Tasks),
) -> Vec<Answered> {
    let subscribing = subscribe_to(connections, options, calls, inboxes);
    let mut answers = send_over(connections, options, calls).await;
    let mut again = Vec::new();
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
            Ok(subscriptions::Outcome::New) => again.extend(queued),
            Ok(subscriptions::Outcome::Failed(error)) => {
                queued.into_iter().for_each(|at| require_subscription(&mut answers[at], &error));
            }
            Ok(subscriptions::Outcome::Absent) | Err(TaskEnded) => {}
        }
    }
    if options.mode == Mode::Atomic && !again.is_empty() {
        return send_over(connections, options, calls).await;
    }
    if !again.is_empty() {
        again.sort_unstable();
        let queued: Vec<&Call> = again.iter().map(|at| calls[*at]).collect();
        let later = send_over(connections, options, &queued).await;
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
    let (channels, is_asking) = (options.role.variant.channels(), options.role.is_asking);
    let subscribe = |slot| {
        let subscription = subscription.clone();
        (slot, tasks.start(async move { subscribe(&subscription, channels, is_asking, client, slot).await }))
    };
    slots.into_iter().map(subscribe).collect()
}

fn waits(command: &Command) -> bool {
    matches!(command, Command::Acquire(acquire) if acquire.wait.is_some())
}

fn is_queued(answer: &Answered) -> bool {
    answer.as_ref().is_ok_and(|answer| matches!(answer.reply, Reply::Queued(_)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold_core::{Acquire, Acquisition, Kind, Name, Renew, Resource};
    use leasehold_redis_protocol::Channels;
    use leasehold_testkit::{Proxy, Server, retry_if_paused};
    use redis::IntoConnectionInfo as _;

    use super::*;
    use crate::connect::Dial;
    use crate::connections::config;
    use crate::handshake::ServerFacts;
    use crate::pushes::{ConnectionStatus, SubscriberStatus, Subscription};

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
            let options = CallOptions::of(Role::of(variant), Mode::Each);
            let (client, ttl) = (ClientId::new(2), Duration::from_secs(60));
            let acquisition = Acquisition { client, sequence: 1 };
            let resource = Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() });
            let acquire = Command::Acquire(Arc::new(Acquire::exclusive(acquisition, ttl)));
            let renew = Command::Renew(Renew::to(acquisition, ttl));
            for command in [acquire, renew] {
                let call = Call::new(resource.clone(), command);
                let inboxes = (client, &Tasks::current());
                let answers = subscribe_and_send(&connections, options, &[&call], inboxes).await;
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
}
