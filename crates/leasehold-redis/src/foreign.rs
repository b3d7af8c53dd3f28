//! The keys of other libraries' locks, for bridges: commands on them, and word of their changes.
//!
//! They have a connection of their own on the client's runtime. Where that reports no changes, those who wait for one poll.

mod connection;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use leasehold_core::Failure;
use leasehold_store::tasks::Tasks;
use leasehold_store::{
    BoxFuture, ForeignAnswer, ForeignAnswers, ForeignCall, ForeignError, ForeignKeys, ForeignOutcome,
    KeyWatch, MAX_DELAY, OpenError, StoreError, Watchers,
};
use redis::{Cmd, ConnectionAddr, RedisError, Value};
use tokio::time::{Instant, timeout_at};

use super::connect::Credentials;
use super::error::{CallError, store_error};
use super::nodes::Nodes;
use super::send::script::{Exchange, Request};
use super::wire::Wire;
use crate::url::{Place, RedisUrl};
pub(super) use connection::no_cluster;
use connection::{Shared, Source, too_slow};

/// The keys of one server.
#[derive(Clone)]
pub(super) struct ServerKeys {
    pub(super) shared: Arc<Shared>,
    tasks: Tasks,
}

impl ServerKeys {
    pub(super) fn new(nodes: Arc<Nodes>, tasks: Tasks) -> Self {
        Self::of(Source::Store(nodes), tasks, Arc::default())
    }

    /// The keys of another server. Those who wait for its changes are among these.
    pub(super) fn at(url: &RedisUrl, tasks: Tasks, watchers: Arc<Watchers>) -> Result<Self, OpenError> {
        let credentials = Credentials::of_servers(url)?;
        let dial = match &url.place {
            Place::Server(host) => credentials.at(host)?,
            Place::Socket(path) => credentials.at_addr(ConnectionAddr::Unix(path.clone()))?,
            Place::Sentinels { .. } | Place::Cluster(_) => {
                return Err(OpenError::invalid(format!("{url} is not the address of one server")));
            }
        };
        let source = Source::Other { dial: Box::new(dial), is_resp2: url.is_resp2 };
        Ok(Self::of(source, tasks, watchers))
    }

    fn of(source: Source, tasks: Tasks, watchers: Arc<Watchers>) -> Self {
        Self { shared: Arc::new(Shared::new(source, watchers)), tasks }
    }
}

impl ForeignKeys for ServerKeys {
    fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    fn run(&self, calls: Vec<ForeignCall>) -> BoxFuture<Result<ForeignOutcome, StoreError>> {
        let (shared, until) = (self.shared.clone(), Instant::now() + MAX_DELAY);
        let running = async move {
            let Sent { answers, .. } = shared.send(&calls, until).await?;
            Ok(ForeignOutcome { is_complete: answers.iter().all(Result::is_ok), answers })
        };
        self.tasks.run(running, || Err(StoreError::runtime_ended()))
    }

    fn is_tracking(&self) -> bool {
        self.shared.is_tracking.load(Ordering::SeqCst)
    }

    fn watch(&self, keys: &[String]) -> KeyWatch {
        KeyWatch::new(&self.shared.watchers, keys)
    }
}

/// What a server has answered.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) answers: ForeignAnswers,
    /// Of a server of several that vote.
    pub(super) run_id: Option<String>,
}

impl Shared {
    /// Runs commands in order, on the runtime of the client's thread. A pipeline in which the server did not know a script is sent again as a whole.
    /// Nothing is sent after `until`: the caller may have given up, and counts on what it has sent to have expired by a certain time.
    pub(super) async fn send(
        self: &Arc<Self>,
        calls: &[ForeignCall],
        until: Instant,
    ) -> Result<Sent, StoreError> {
        // A connection that takes longer is there for the commands after these.
        let shared = self.clone();
        let connecting = Tasks::current().start(async move { shared.connection(until).await });
        let connected = timeout_at(until, connecting).await.map_err(|_| too_slow())?;
        let (connection, status) = connected.unwrap_or_else(|_| Err(StoreError::runtime_ended()))?;
        if Instant::now() > until {
            return Err(too_slow());
        }
        let mut wire = Wire::Limited(connection);
        let mut exchange = Exchange::default();
        // A command that asks for a report of keys goes before the one that reads them.
        calls.iter().for_each(|call| exchange.push(0, request(call)));
        status.asked.note(calls);
        exchange.send(&mut wire, false).await;
        while exchange.is_pending() {
            if Instant::now() > until {
                return Err(StoreError::new(Failure::Unknown, "the server's answer took too long"));
            }
            status.asked.note(calls);
            exchange.send(&mut wire, false).await;
        }
        let mut answers: Vec<_> =
            exchange.into_replies().into_iter().map(|reply| reply.and_then(Value::extract_error)).collect();
        for (call, answer) in calls.iter().zip(&mut answers) {
            if matches!((call, &*answer), (ForeignCall::Track, Err(error)) if !error.is_unrecoverable_error())
            {
                *answer = Ok(Value::Nil);
            }
        }
        for error in answers.iter().filter_map(|answer| answer.as_ref().err()) {
            match CallError::from(error) {
                failed @ (CallError::ConnectionLost(_) | CallError::Timeout(_)) => {
                    self.drop_connection(&status);
                    return Err(failed.into());
                }
                CallError::ReadOnly(refusal) => {
                    if let Some(endpoint) = self.endpoint() {
                        endpoint.invalidate(refusal.clone());
                    }
                    return Err(CallError::ReadOnly(refusal).into());
                }
                failed @ (CallError::Moved(_) | CallError::Ask(_) | CallError::TryAgain(_)) => {
                    return Err(failed.into());
                }
                _ => {}
            }
        }
        let outcome =
            |answer: Result<Value, RedisError>| answer.map(answer_of).map_err(|error| error_of(&error));
        let (answers, run_id) = (answers.into_iter().map(outcome).collect(), status.run_id.get().cloned());
        Ok(Sent { answers, run_id })
    }
}

fn request(call: &ForeignCall) -> Request<'_> {
    match call {
        ForeignCall::Command(words) => {
            let mut command = Cmd::new();
            command.arg(words);
            Request::Command(command)
        }
        ForeignCall::Track => Request::Command(redis::cmd("CLIENT").arg("CACHING").arg("YES").to_owned()),
        ForeignCall::Script { script, keys, arguments } => Request::Foreign { script, keys, arguments },
    }
}

fn answer_of(value: Value) -> ForeignAnswer {
    match value {
        Value::Nil => ForeignAnswer::Nil,
        Value::Okay => ForeignAnswer::Okay,
        Value::SimpleString(status) if status == "OK" => ForeignAnswer::Okay,
        Value::Int(number) => ForeignAnswer::Int(number),
        Value::BulkString(bytes) => ForeignAnswer::Bytes(bytes),
        Value::Array(parts) => ForeignAnswer::List(parts.into_iter().map(answer_of).collect()),
        Value::Map(pairs) => {
            let parts = pairs.into_iter().flat_map(|(key, value)| [key, value]);
            ForeignAnswer::List(parts.map(answer_of).collect())
        }
        _ => ForeignAnswer::Other,
    }
}

fn error_of(error: &RedisError) -> ForeignError {
    let is_other_type = error.code() == Some("WRONGTYPE") || error.to_string().contains("WRONGTYPE");
    if is_other_type {
        ForeignError::OtherType(store_error(error))
    } else {
        ForeignError::Failed(store_error(error))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn call(words: &[&str]) -> ForeignCall {
        ForeignCall::Command(words.iter().map(|word| (*word).to_owned()).collect())
    }

    #[tokio::test]
    async fn command_is_not_sent_after_the_attempt_may_have_ended() {
        let server = leasehold_testkit::Server::on_socket();
        let url = RedisUrl::of_node(&server.url()).unwrap();
        let keys = ServerKeys::at(&url, Tasks::current(), Arc::default()).unwrap();
        let (now, take) = (Instant::now(), [call(&["SET", "jobs", "holder"])]);
        let late = keys.shared.send(&take, now - Duration::from_millis(1)).await.unwrap_err();
        assert_eq!(late.failure, Failure::NotSent);
        let count = async || {
            keys.shared.send(&[call(&["EXISTS", "jobs"])], now + MAX_DELAY).await.unwrap().answers.remove(0)
        };
        assert_eq!(count().await.unwrap(), ForeignAnswer::Int(0));
        keys.shared.send(&take, Instant::now() + MAX_DELAY).await.unwrap();
        assert_eq!(count().await.unwrap(), ForeignAnswer::Int(1));
    }
}
