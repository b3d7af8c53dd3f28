//! Runs calls on one connection: decides which of them share a command, and reads the replies.

use std::time::Duration;

use leasehold_core::{ClientId, Command, Failure, Resource, Token};
use leasehold_redis_protocol::{
    BatchKind, Expectation, MAX_EACH, MAX_RENEWALS, ScriptCall, ScriptVariant, VoteArgs, decode_answer,
    decode_renewals, inbox_of, resource_key, slot_of,
};
use leasehold_store::{Call, StoreError};
use redis::{Cmd, Value};

use super::script::{self, Exchange, Reply, Request};
use crate::contended::Contended;
use crate::deletes::{Deletes, NO_DELETES};
use crate::error::{Answered, CallError};
use crate::rights;
use crate::wire::Wire;

/// Fewer attempts or releases are sent one by one, which costs the server no more.
const MIN_EACH: usize = 4;

/// What a server is for a call.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Role {
    pub(crate) variant: ScriptVariant,
    /// How long a quorum node abstains after it may have lost leases.
    pub(crate) abstains_for: Option<Duration>,
    /// The node is importing the slot: ASKING goes first.
    pub(crate) is_asking: bool,
}

impl Role {
    pub(crate) const fn of(variant: ScriptVariant) -> Self {
        Self { variant, abstains_for: None, is_asking: false }
    }
}

/// How calls are sent, and when their answers count.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Mode {
    /// Each for itself.
    Each,
    /// Attempts at locks of one hash slot: all are granted, or none is.
    Atomic,
    /// Each for itself, at a quorum node that gives no lower token.
    AtLeast(Token),
    /// Each for itself. What a failover could undo counts once so many replicas have acknowledged it.
    Replicated(u32),
}

impl Mode {
    /// Where so many replicas must acknowledge a call.
    pub(crate) const fn of_replicas(replicas: u32) -> Self {
        if replicas == 0 { Self::Each } else { Self::Replicated(replicas) }
    }
}

/// How calls are encoded for a server.
#[derive(Clone, Copy)]
pub(crate) struct CallOptions<'a> {
    pub(crate) role: Role,
    pub(crate) mode: Mode,
    pub(crate) run_id: &'a str,
    /// How the server releases a plain lease without a script.
    pub(crate) deletes: &'a Deletes,
    /// The locks for which it seems that they are contended.
    pub(crate) contended: Option<&'a Contended>,
}

impl<'a> CallOptions<'a> {
    /// For a server of which nothing more is known.
    pub(crate) const fn of(role: Role, mode: Mode) -> Self {
        Self { role, mode, run_id: "", deletes: &NO_DELETES, contended: None }
    }

    fn expects_contention(self, resource: &Resource) -> bool {
        self.contended.is_some_and(|contended| contended.expects(resource))
    }

    /// Of which kind the call is, if this server takes several of that kind at once.
    fn batch_kind(self, call: &Call) -> Option<BatchKind> {
        let kind = BatchKind::of(&call.command)?;
        let is_together = match (kind, &call.command) {
            // In a cluster a command may only use one hash slot.
            (BatchKind::Renewals(_), _) => !self.role.variant.is_cluster(),
            // A conditional delete takes its place.
            (_, Command::Release(release))
                if release.as_granted.is_some() && self.deletes.command().is_some() =>
            {
                false
            }
            // Together the scripts look first for plain leases.
            _ => self.role.variant == ScriptVariant::Server && !self.expects_contention(&call.resource),
        };
        is_together.then_some(kind)
    }

    fn vote_args(self) -> VoteArgs<'a> {
        let floor = if let Mode::AtLeast(token) = self.mode { Some(token) } else { None };
        VoteArgs { floor, abstains_for: self.role.abstains_for, run_id: self.run_id }
    }

    /// The call of a script for one command.
    pub(crate) fn encode(self, resource: &Resource, command: &Command) -> ScriptCall {
        let expectation =
            if self.expects_contention(resource) { Expectation::Contended } else { Expectation::Uncontended };
        self.role.variant.encode(resource, command, self.vote_args(), expectation)
    }

    /// The answer to a command, from which is learned whether the lock is contended.
    fn noted(self, call: &Call, answer: Answered) -> Answered {
        if let (Some(contended), Ok(answer)) = (self.contended, &answer) {
            contended.note(&call.resource, &call.command, answer);
        }
        answer
    }
}

/// Runs a single call.
pub(super) async fn run_one(connection: &mut Wire, options: CallOptions<'_>, call: &Call) -> Answered {
    let Call { resource, command } = call;
    if let Some(delete) = options.deletes.encode(resource, command)
        && let Some(value) = options.deletes.result(connection.send(&delete).await)
    {
        return read(command, value);
    }
    let value = script::run_one(connection, || options.encode(resource, command)).await;
    let answer = options.noted(call, read(command, value));
    with_reason(answer, &mut Vec::new(), connection, options, resource).await
}

/// Runs calls in one pipeline; renewals and releases that need a script of their own follow in a second one.
///
/// Futures of rare paths are boxed here and in `node.rs`, to keep every command's future small.
pub(crate) async fn run(mut connection: Wire, options: CallOptions<'_>, calls: &[&Call]) -> Vec<Answered> {
    if let ([call], false, false) = (calls, options.role.is_asking, options.mode == Mode::Atomic) {
        return vec![run_one(&mut connection, options, call).await];
    }
    Box::pin(run_several(connection, options, calls)).await
}

async fn run_several(mut connection: Wire, options: CallOptions<'_>, calls: &[&Call]) -> Vec<Answered> {
    let mut order = by_ttl(calls);
    let sorted: Vec<&Call> = order.iter().map(|at| calls[*at]).collect();
    let mut answers: Vec<Option<Answered>> = calls.iter().map(|_| None).collect();
    let commands = WireCommand::from_calls(options, &sorted);
    let found = exchange(&mut connection, options, &commands).await;
    order.iter().zip(found).for_each(|(at, answer)| answers[*at] = answer);
    order.retain(|at| answers[*at].is_none());
    if !order.is_empty() {
        let commands: Vec<_> = order.iter().map(|at| WireCommand::One(calls[*at])).collect();
        let found = exchange(&mut connection, options, &commands).await;
        order.iter().zip(found).for_each(|(at, answer)| answers[*at] = answer);
    }
    let missing = || Err(failed("the server sent fewer replies than commands"));
    let answers = answers.into_iter().map(|answer| answer.unwrap_or_else(missing));
    let answers = answers.zip(calls).map(|(answer, call)| options.noted(call, answer)).collect();
    with_reasons(answers, &mut connection, options, calls).await
}

/// The order in which calls are sent: neighbouring renewals by their ttl, because a batch of renewals has one ttl.
fn by_ttl(calls: &[&Call]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..calls.len()).collect();
    let ttl = |at: &usize| match BatchKind::of(&calls[*at].command) {
        Some(BatchKind::Renewals(ttl)) => Some(ttl),
        _ => None,
    };
    for renewals in order.chunk_by_mut(|one, next| ttl(one).is_some() && ttl(next).is_some()) {
        renewals.sort_by_key(ttl);
    }
    order
}

/// Runs commands. Returns an answer for each call; `None` for one that must be sent by itself.
async fn exchange(
    connection: &mut Wire,
    options: CallOptions<'_>,
    commands: &[WireCommand<'_>],
) -> Vec<Option<Answered>> {
    let exchange = Exchange::of(commands.iter().map(|command| command.request(options)));
    let replies = exchange.run(connection, options.role.is_asking).await;
    commands.iter().zip(replies).flat_map(|(command, reply)| command.read(reply)).collect()
}

/// The answers of a batch; if some were refused, with the right that is missing. It is asked for once for all with the same error, because
/// the others have their answers after that only.
pub(super) async fn with_reasons(
    answers: Vec<Answered>,
    connection: &mut Wire,
    options: CallOptions<'_>,
    calls: &[&Call],
) -> Vec<Answered> {
    let (mut known, mut explained) = (Vec::new(), Vec::with_capacity(answers.len()));
    for (answer, call) in answers.into_iter().zip(calls) {
        explained.push(with_reason(answer, &mut known, connection, options, &call.resource).await);
    }
    explained
}

/// The answer of a command; if it was refused, with the right that is missing for this resource. `known` has errors and their reasons.
async fn with_reason(
    answer: Answered,
    known: &mut Vec<(String, String)>,
    connection: &mut Wire,
    options: CallOptions<'_>,
    resource: &Resource,
) -> Answered {
    let Err(CallError::Denied(error)) = answer else { return answer };
    if let Some((_, reason)) = known.iter().find(|(message, _)| *message == error.message) {
        return Err(CallError::Denied(error.saying(reason)));
    }
    let (place, slot) = match options.role.variant {
        ScriptVariant::Server | ScriptVariant::Voter => (rights::Place::Server, None),
        ScriptVariant::Cluster(_) => (rights::Place::ClusterNode, Some(slot_of(resource))),
        ScriptVariant::Restricted => (rights::Place::Restricted, None),
    };
    let channel = inbox_of(ClientId::new(0), slot);
    // A key in the slot of the lock that never exists, because the probes would change one that does.
    let key = resource_key(resource) + ":";
    // Its own future, because a refusal is rare.
    let reason =
        Box::pin(async move { rights::explain_refusal(connection, place, &key, &channel).await }).await;
    let reason = reason.unwrap_or_else(|| error.message.clone());
    known.push((error.message.clone(), reason.clone()));
    Err(CallError::Denied(error.saying(reason)))
}

/// One command on the wire.
enum WireCommand<'a> {
    One(&'a Call),
    /// A release by a conditional delete.
    Delete(&'a Call, Cmd, &'a Deletes),
    /// An atomic batch of attempts.
    Attempts(&'a [&'a Call]),
    /// A batch of independent renewals by one ttl.
    Renewals(&'a [&'a Call]),
    /// A batch of independent attempts, or of releases.
    Each(&'a [&'a Call]),
}

impl<'a> WireCommand<'a> {
    fn from_calls(options: CallOptions<'a>, calls: &'a [&'a Call]) -> Vec<Self> {
        if options.mode == Mode::Atomic {
            return vec![Self::Attempts(calls)];
        }
        let one = |call: &'a Call| match options.deletes.encode(&call.resource, &call.command) {
            Some(delete) => Self::Delete(call, delete, options.deletes),
            None => Self::One(call),
        };
        let neighbours = calls.chunk_by(|one, next| {
            let kind = options.batch_kind(one);
            kind.is_some() && kind == options.batch_kind(next)
        });
        let groups = neighbours.flat_map(|calls| match options.batch_kind(calls[0]) {
            Some(BatchKind::Renewals(_)) => calls.chunks(MAX_RENEWALS),
            Some(_) if calls.len() >= MIN_EACH => calls.chunks(MAX_EACH),
            _ => calls.chunks(1),
        });
        let some = |calls: &'a [&'a Call]| match (calls, &calls[0].command) {
            ([call], _) => one(call),
            (calls, Command::Renew(_)) => Self::Renewals(calls),
            (calls, _) => Self::Each(calls),
        };
        groups.map(some).collect()
    }

    /// The request as it goes out.
    fn request(&self, options: CallOptions<'_>) -> Request<'static> {
        let variant = options.role.variant;
        Request::Script(match self {
            Self::Delete(_, delete, _) => return Request::Command(delete.clone()),
            Self::One(Call { resource, command }) => options.encode(resource, command),
            Self::Attempts(calls) => {
                let attempts = calls.iter().map(|Call { resource, command }| (&**resource, command));
                variant.encode_acquire_all(attempts)
            }
            Self::Renewals(calls) => {
                let renewals = calls.iter().filter_map(|Call { resource, command }| match command {
                    Command::Renew(renew) => Some((&**resource, renew)),
                    _ => None,
                });
                variant.encode_renewals(&renewals.collect::<Vec<_>>(), options.vote_args())
            }
            Self::Each(calls) => {
                variant.encode_each(calls.iter().map(|Call { resource, command }| (&**resource, command)))
            }
        })
    }

    /// Decodes one answer per call; `None` for a call that must be sent by itself.
    fn read(&self, reply: Reply) -> Vec<Option<Answered>> {
        let calls = match self {
            Self::One(call) => return vec![Some(read(&call.command, reply))],
            Self::Delete(call, _, deletes) => {
                return vec![deletes.result(reply).map(|reply| read(&call.command, reply))];
            }
            Self::Attempts(calls) | Self::Renewals(calls) | Self::Each(calls) => calls,
        };
        let commands = calls.iter().map(|call| &call.command);
        match (self, reply) {
            (Self::Attempts(_) | Self::Each(_), Ok(Value::Array(replies)))
                if replies.len() == calls.len() =>
            {
                commands.zip(replies).map(|(command, reply)| Some(read(command, Ok(reply)))).collect()
            }
            // One reply for all.
            (Self::Attempts(_), reply) | (Self::Each(_), reply @ Ok(Value::Int(_))) => {
                commands.map(|command| Some(read(command, reply.clone()))).collect()
            }
            (_, reply) => match reply.and_then(Value::extract_error).map_err(|error| CallError::from(&error))
            {
                Ok(value)
                    if let Self::Renewals(_) = self
                        && let Ok(answers) = decode_renewals(commands, &value) =>
                {
                    answers.into_iter().map(|answer| answer.map(Ok)).collect()
                }
                // One that is refused must not fail the others. Each can be repeated.
                Ok(_) | Err(CallError::Failed(_) | CallError::Denied(_)) => vec![None; calls.len()],
                Err(error) => vec![Some(Err(error)); calls.len()],
            },
        }
    }
}

/// The answer to a command.
pub(crate) fn read(command: &Command, reply: Reply) -> Answered {
    let value = reply.and_then(Value::extract_error).map_err(|error| CallError::from(&error))?;
    let answer = decode_answer(command, &value).map_err(failed)?;
    if let (Command::Release(_), leasehold_core::Reply::Foreign { .. }) = (command, &answer.reply) {
        let what = "another program's value is in the lock's key, so the release must be repeated";
        return Err(CallError::Failed(StoreError::new(Failure::Busy, what)));
    }
    Ok(answer)
}

fn failed(cause: impl std::fmt::Display) -> CallError {
    CallError::Failed(StoreError::new(Failure::Unknown, cause.to_string()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use leasehold_core::{Acquire, Acquisition, Kind, Name, Release, Renew, Reply};
    use leasehold_redis_protocol::ConditionalDelete;
    use redis::RedisError;

    use super::*;

    const OPTIONS: CallOptions<'static> = CallOptions::of(Role::of(ScriptVariant::Server), Mode::Each);

    const ACQUISITION: Acquisition = Acquisition { client: ClientId::new(1), sequence: 1 };

    fn to_resource(command: Command) -> Call {
        Call::new(Arc::new(Resource { kind: Kind::Mutex, name: Name::new("a").unwrap() }), command)
    }

    /// The number of commands in each call. A negative number is that of a call for one command only.
    fn sizes(options: CallOptions<'_>, commands: &[Call]) -> Vec<i32> {
        let calls: Vec<&Call> = commands.iter().collect();
        let size = |sent: &WireCommand<'_>| match sent {
            WireCommand::Renewals(calls) | WireCommand::Each(calls) => i32::try_from(calls.len()).unwrap(),
            _ => -1,
        };
        WireCommand::from_calls(options, &calls).iter().map(size).collect()
    }

    #[test]
    fn renewals_share_a_batch_with_neighbours_of_their_ttl() {
        let renew = |(seconds, reserve)| {
            let ttl = Duration::from_secs(seconds);
            to_resource(Command::Renew(Renew { reserve, ..Renew::to(ACQUISITION, ttl) }))
        };
        let commands = [(10, 0), (10, 0), (20, 0), (20, 0), (20, 1), (10, 0)].map(renew);
        let calls: Vec<&Call> = commands.iter().collect();
        let order = by_ttl(&[calls[2], calls[0], calls[3], calls[4], calls[3], calls[1]]);
        assert_eq!(order, [1, 0, 2, 3, 5, 4]);
        assert_eq!(sizes(OPTIONS, &commands), [2, 2, -1, -1]);
    }

    #[test]
    fn neighbours_of_one_kind_share_a_call_where_that_is_possible() {
        let attempt = || Acquire::exclusive(ACQUISITION, Duration::from_secs(10));
        let release = || Command::Release(Release::now(ACQUISITION));
        let (reserving, waiting) =
            (Acquire { reserve: 1, ..attempt() }, Acquire { capacity: 2, ..attempt() });
        let late = Release { tombstone: Duration::from_secs(1), ..Release::now(ACQUISITION) };
        let held = Release { min_hold: Duration::from_secs(1), ..Release::now(ACQUISITION) };
        let attempts = [attempt(), attempt(), waiting, attempt(), reserving, attempt(), attempt(), attempt()];
        let commands: Vec<_> = attempts
            .map(Command::from)
            .into_iter()
            .chain(std::iter::repeat_with(release).take(4 + MAX_EACH))
            .chain([late, held].map(Command::Release))
            .chain(std::iter::repeat_with(release).take(3))
            .map(to_resource)
            .collect();
        let most = i32::try_from(MAX_EACH).unwrap();
        assert_eq!(sizes(OPTIONS, &commands), [&[4, -1, -1, -1, -1, most, 4][..], &[-1; 5]].concat());
        for variant in ScriptVariant::ALL.into_iter().filter(|variant| *variant != ScriptVariant::Server) {
            assert_eq!(
                sizes(CallOptions { role: Role::of(variant), ..OPTIONS }, &commands),
                vec![-1; commands.len()]
            );
        }
    }

    /// A conditional delete of its own, where the client knows the value.
    #[test]
    fn releases_without_a_script_share_none() {
        let deletes = Deletes::new(Some(ConditionalDelete::DelIfEq));
        let options = CallOptions { deletes: &deletes, ..OPTIONS };
        let acquire = Arc::new(Acquire::exclusive(ACQUISITION, Duration::from_secs(10)));
        let as_granted = Some((acquire, Token::new(1).unwrap()));
        let known = || {
            to_resource(Command::Release(Release {
                as_granted: as_granted.clone(),
                ..Release::now(ACQUISITION)
            }))
        };
        let unknown = || to_resource(Command::Release(Release::now(ACQUISITION)));
        let commands = [[(); 5].map(|()| known()), [(); 5].map(|()| unknown())].concat();
        assert_eq!(sizes(options, &commands), [-1, -1, -1, -1, -1, 5]);
        assert_eq!(sizes(OPTIONS, &commands), [10]);
    }

    /// An error that concerns no command in particular, such as that of a key that the user may not use.
    #[test]
    fn call_that_the_server_refuses_is_repeated_by_each_command() {
        let release = || to_resource(Command::Release(Release::now(ACQUISITION)));
        let commands = [(); 4].map(|()| release());
        let calls: Vec<&Call> = commands.iter().collect();
        let sent = WireCommand::Each(&calls);
        let read = |line: &str| sent.read(redis::parse_redis_value(format!("{line}\r\n").as_bytes()));
        for line in ["-NOPERM No permissions to access a key", "-ERR any", "*1\r\n:1", "$-1"] {
            assert!(read(line).iter().all(Option::is_none), "{line}");
        }
        assert!(read(":1").iter().all(|answer| matches!(answer, Some(Ok(_)))));
        let lost = || RedisError::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe));
        assert!(
            sent.read(Err(lost())).iter().all(|one| matches!(one, Some(Err(CallError::ConnectionLost(_)))))
        );
        let late = || RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut));
        assert!(sent.read(Err(late())).iter().all(|one| matches!(one, Some(Err(CallError::Timeout(_))))));
        let list = read("*4\r\n:1\r\n-WRONGTYPE other\r\n*2\r\n:5\r\n:8\r\n:7");
        let list: Vec<_> =
            list.into_iter().map(|answer| answer.unwrap().map(|answer| answer.reply)).collect();
        assert!(matches!(
            &list[..],
            [Ok(Reply::Released), Err(CallError::Failed(_)), Ok(Reply::NotHeld), Ok(Reply::Released)]
        ));
    }
}
