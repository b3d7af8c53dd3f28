//! Runs commands on one connection.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Answer, ClientId, Command, Failure, Reply, Resource};
use leasehold_redis_protocol::{
    Expectation, MAX_EACH, MAX_RENEWALS, RESOURCE_PATTERN, ScriptCall, ScriptVariant, VoteArgs,
    decode_answer, decode_renewals, inbox_of, may_share_a_call, resource_key, resource_of, slot_of,
};
use leasehold_store::{Call, StoreError};
use redis::{RedisError, Value};

use super::codec;
use super::contended::Contended;
use super::deletes::{Deletes, NO_DELETES};
use super::error::{CallError, store_error};
use super::rights;
use super::wire::Wire;

/// Fewer attempts or releases are sent one by one, which costs the server no more.
const MIN_EACH: usize = 4;

/// How commands are sent to a node.
#[derive(Clone, Copy)]
pub(super) struct CallOptions<'a> {
    pub(super) variant: ScriptVariant,
    pub(super) vote_args: VoteArgs<'a>,
    /// Send ASKING first: the node is importing the slot.
    pub(super) is_asking: bool,
    /// How the server releases a plain lease without a script.
    pub(super) deletes: &'a Deletes,
    /// The locks for which it seems that they are contended.
    pub(super) contended: Option<&'a Contended>,
    /// Send all attempts as one atomic command; their resources are in one hash slot.
    pub(super) is_atomic: bool,
}

impl<'a> CallOptions<'a> {
    /// For a server of which nothing more is known.
    pub(super) const fn of(variant: ScriptVariant) -> Self {
        let vote_args = VoteArgs { floor: None, abstains_for: None, run_id: "" };
        Self { variant, vote_args, is_asking: false, deletes: &NO_DELETES, contended: None, is_atomic: false }
    }

    pub(super) fn expects_contention(self, resource: &Resource) -> bool {
        self.contended.is_some_and(|contended| contended.expects(resource))
    }

    /// The call of a script for one command.
    pub(super) fn encode(self, resource: &Resource, command: &Command) -> ScriptCall {
        let expectation =
            if self.expects_contention(resource) { Expectation::Contended } else { Expectation::Uncontended };
        self.variant.encode(resource, command, self.vote_args, expectation)
    }

    /// The answer to a command, from which is learned whether the lock is contended.
    fn noted(self, call: &Call, answer: Result<Answer, CallError>) -> Result<Answer, CallError> {
        if let (Some(contended), Ok(answer)) = (self.contended, &answer) {
            contended.note(&call.resource, &call.command, answer);
        }
        answer
    }
}

/// Runs calls in one pipeline; renewals and releases that need a script of their own follow in a second one.
///
/// Futures of rare paths are boxed here, in `dispatch.rs` and in `endpoint.rs`, to keep every command's future small.
pub(super) async fn run_in_pipeline(
    mut connection: Wire,
    options: CallOptions<'_>,
    calls: &[&Call],
) -> Vec<Result<Answer, CallError>> {
    if let ([call], false, false) = (calls, options.is_asking, options.is_atomic) {
        return vec![run_one(&mut connection, options, call).await];
    }
    Box::pin(run_sorted(connection, options, calls)).await
}

async fn run_sorted(
    connection: Wire,
    options: CallOptions<'_>,
    calls: &[&Call],
) -> Vec<Result<Answer, CallError>> {
    let order = by_ttl(calls);
    let sorted: Vec<&Call> = order.iter().map(|at| calls[*at]).collect();
    in_call_order(order, send_in_order(connection, options, &sorted).await)
}

/// Undoes [`by_ttl`]: answers in the order of the calls.
fn in_call_order<T>(order: Vec<usize>, answers: Vec<T>) -> Vec<T> {
    let mut answers: Vec<_> = order.into_iter().zip(answers).collect();
    answers.sort_unstable_by_key(|(at, _)| *at);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// The order in which commands are sent: neighbouring renewals by their ttl, because a batch of renewals has one ttl.
fn by_ttl(calls: &[&Call]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..calls.len()).collect();
    let ttl = |at: &usize| shared_ttl(calls[*at]);
    for renewals in order.chunk_by_mut(|one, next| ttl(one).is_some() && ttl(next).is_some()) {
        renewals.sort_by_key(ttl);
    }
    order
}

/// The ttl of a renewal that may share a command with others of that ttl.
fn shared_ttl(call: &Call) -> Option<Duration> {
    match &call.command {
        Command::Renew(renew) if renew.reserve == 0 && !renew.only_asks() => Some(renew.ttl),
        _ => None,
    }
}

async fn send_in_order(
    mut connection: Wire,
    options: CallOptions<'_>,
    calls: &[&Call],
) -> Vec<Result<Answer, CallError>> {
    let sent = WireCommand::from_calls(options, calls);
    let values = send_scripts(&mut connection, options, &sent).await;
    let read = sent.iter().zip(values).flat_map(|(sent, value)| sent.read(value));
    let mut answers: Vec<Option<Result<Answer, CallError>>> = read.collect();
    let unread: Vec<usize> = (0..answers.len()).filter(|at| answers[*at].is_none()).collect();
    if !unread.is_empty() {
        let sent: Vec<_> = unread.iter().map(|at| WireCommand::One(calls[*at])).collect();
        let values = send_scripts(&mut connection, options, &sent).await;
        for ((at, sent), value) in unread.into_iter().zip(&sent).zip(values) {
            answers[at] = sent.read(value).pop().flatten();
        }
    }
    let missing = || Err(failed("the server sent fewer replies than commands"));
    let answers = answers.into_iter().map(|answer| answer.unwrap_or_else(missing));
    let answers = answers.zip(calls).map(|(answer, call)| options.noted(call, answer)).collect();
    with_reasons(answers, &mut connection, options, calls).await
}

/// Runs a single command.
pub(super) async fn run_one(
    connection: &mut Wire,
    options: CallOptions<'_>,
    call: &Call,
) -> Result<Answer, CallError> {
    let Call { resource, command } = call;
    if let Some(delete) = options.deletes.encode(resource, command)
        && let Some(value) = options.deletes.result(connection.send(&delete).await)
    {
        return read(command, value);
    }
    let sent = codec::command(&options.encode(resource, command), false);
    let value = connection.send(&sent).await.and_then(Value::extract_error);
    if is_noscript(&value) {
        let sent = codec::command(&options.encode(resource, command), true);
        let value = Box::pin(connection.send(&sent)).await;
        return with_reason(read(command, value), connection, options, resource).await;
    }
    with_reason(options.noted(call, read(command, value)), connection, options, resource).await
}

/// The answers of a batch; if some were refused, with the right that is missing. It is asked for once for all with the same error, because
/// the others have their answers after that only.
pub(super) async fn with_reasons(
    answers: Vec<Result<Answer, CallError>>,
    connection: &mut Wire,
    options: CallOptions<'_>,
    calls: &[&Call],
) -> Vec<Result<Answer, CallError>> {
    let mut known: Vec<(String, String)> = Vec::new();
    let mut explained = Vec::with_capacity(answers.len());
    for (answer, call) in answers.into_iter().zip(calls) {
        let Err(CallError::Denied(error)) = answer else {
            explained.push(answer);
            continue;
        };
        let reason = known.iter().find(|(message, _)| *message == error.message);
        if let Some((_, reason)) = reason {
            explained.push(Err(CallError::Denied(error.saying(reason))));
            continue;
        }
        let message = error.message.clone();
        let answer = with_reason(Err(CallError::Denied(error)), connection, options, &call.resource).await;
        if let Err(CallError::Denied(error)) = &answer {
            known.push((message, error.message.clone()));
        }
        explained.push(answer);
    }
    explained
}

/// The answer of a command; if it was refused, with the right that is missing for this resource.
async fn with_reason(
    answer: Result<Answer, CallError>,
    connection: &mut Wire,
    options: CallOptions<'_>,
    resource: &Resource,
) -> Result<Answer, CallError> {
    let Err(CallError::Denied(error)) = answer else { return answer };
    let is_cluster = options.variant.is_cluster();
    let place = if is_cluster { rights::Place::ClusterNode } else { rights::Place::Server };
    let channel = inbox_of(ClientId::new(0), is_cluster.then(|| slot_of(resource)));
    // A key in the slot of the lock that never exists, because the probes would change one that does.
    let key = resource_key(resource) + ":";
    // Its own future, because a refusal is rare.
    let reason =
        Box::pin(async move { rights::explain_refusal(connection, place, &key, &channel).await }).await;
    let message = reason.unwrap_or_else(|| error.message.clone());
    Err(CallError::Denied(error.saying(message)))
}

/// The kind of a batch: commands of the same kind can share a script call.
#[derive(PartialEq)]
enum BatchKind {
    /// Renewals by this ttl.
    Renewals(Duration),
    Attempts,
    Releases,
}

impl BatchKind {
    fn of(options: CallOptions<'_>, call: &Call) -> Option<Self> {
        if let Some(ttl) = shared_ttl(call) {
            return Some(Self::Renewals(ttl));
        }
        // Together the scripts look first for plain leases.
        let may_share = options.variant == ScriptVariant::Server
            && may_share_a_call(&call.command)
            && !options.expects_contention(&call.resource);
        match &call.command {
            Command::Acquire(_) if may_share => Some(Self::Attempts),
            // A conditional delete takes its place.
            Command::Release(release)
                if release.as_granted.is_some() && options.deletes.command().is_some() =>
            {
                None
            }
            Command::Release(_) if may_share => Some(Self::Releases),
            _ => None,
        }
    }
}

/// One command on the wire.
enum WireCommand<'a> {
    One(&'a Call),
    /// A release by a conditional delete.
    Delete(&'a Call, redis::Cmd, &'a Deletes),
    /// An atomic batch of attempts.
    Attempts(&'a [&'a Call]),
    /// A batch of independent renewals by one ttl.
    Renewals(&'a [&'a Call]),
    /// A batch of independent attempts, or of releases.
    Each(&'a [&'a Call]),
}

impl<'a> WireCommand<'a> {
    fn from_calls(options: CallOptions<'a>, calls: &'a [&'a Call]) -> Vec<Self> {
        if options.is_atomic {
            return vec![Self::Attempts(calls)];
        }
        let one = |call: &'a Call| match options.deletes.encode(&call.resource, &call.command) {
            Some(delete) => Self::Delete(call, delete, options.deletes),
            None => Self::One(call),
        };
        // In a cluster a command may only use one hash slot.
        if options.variant.is_cluster() {
            return calls.iter().map(|call| one(call)).collect();
        }
        let neighbours = calls.chunk_by(|one, next| {
            let kind = BatchKind::of(options, one);
            kind.is_some() && kind == BatchKind::of(options, next)
        });
        let groups = neighbours.flat_map(|calls| match BatchKind::of(options, calls[0]) {
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

    /// The command as it goes out.
    fn encode(&self, options: CallOptions<'_>, use_eval: bool) -> redis::Cmd {
        if let Self::Delete(_, delete, _) = self {
            return delete.clone();
        }
        codec::command(&self.script_call(options), use_eval)
    }

    fn script_call(&self, options: CallOptions<'_>) -> ScriptCall {
        let CallOptions { variant, vote_args, .. } = options;
        match self {
            Self::One(Call { resource, command }) | Self::Delete(Call { resource, command }, ..) => {
                options.encode(resource, command)
            }
            Self::Attempts(calls) => {
                let attempts = calls.iter().map(|Call { resource, command }| (&**resource, command));
                variant.encode_acquire_all(attempts)
            }
            Self::Renewals(calls) => {
                let renewals = calls.iter().filter_map(|Call { resource, command }| match command {
                    Command::Renew(renew) => Some((&**resource, renew)),
                    _ => None,
                });
                variant.encode_renewals(&renewals.collect::<Vec<_>>(), vote_args)
            }
            Self::Each(calls) => {
                variant.encode_each(calls.iter().map(|Call { resource, command }| (&**resource, command)))
            }
        }
    }

    /// Decodes one answer per call; `None` for a call that must be sent by itself.
    fn read(&self, value: Result<Value, RedisError>) -> Vec<Option<Result<Answer, CallError>>> {
        match self {
            Self::One(Call { command, .. }) => vec![Some(read(command, value))],
            Self::Delete(Call { command, .. }, _, deletes) => {
                vec![deletes.result(value).map(|value| read(command, value))]
            }
            Self::Attempts(calls) => match value {
                Ok(Value::Array(values)) if values.len() == calls.len() => {
                    let pairs = calls.iter().zip(values);
                    pairs.map(|(Call { command, .. }, value)| Some(read(command, Ok(value)))).collect()
                }
                // One reply for all: an error, or an unexpected reply.
                value => {
                    calls.iter().map(|Call { command, .. }| Some(read(command, value.clone()))).collect()
                }
            },
            Self::Renewals(calls) => {
                let value = value.and_then(Value::extract_error).map_err(|error| CallError::from(&error));
                let commands = calls.iter().map(|Call { command, .. }| command);
                match value.map(|value| decode_renewals(commands, &value)) {
                    Ok(Ok(answers)) => answers.into_iter().map(|answer| answer.map(Ok)).collect(),
                    // One failed renewal must not fail the others.
                    Ok(Err(_)) | Err(CallError::Failed(_) | CallError::Denied(_)) => {
                        calls.iter().map(|_| None).collect()
                    }
                    Err(error) => calls.iter().map(|_| Some(Err(error.clone()))).collect(),
                }
            }
            Self::Each(calls) => match value {
                Ok(Value::Array(values)) if values.len() == calls.len() => {
                    let pairs = calls.iter().zip(values);
                    pairs.map(|(Call { command, .. }, value)| Some(read(command, Ok(value)))).collect()
                }
                Ok(all @ Value::Int(_)) => {
                    calls.iter().map(|Call { command, .. }| Some(read(command, Ok(all.clone())))).collect()
                }
                value => {
                    match value.and_then(Value::extract_error).map_err(|error| CallError::from(&error)) {
                        Err(error @ (CallError::ConnectionLost(_) | CallError::Timeout(_))) => {
                            calls.iter().map(|_| Some(Err(error.clone()))).collect()
                        }
                        // One that is refused must not fail the others. Each can be repeated.
                        _ => calls.iter().map(|_| None).collect(),
                    }
                }
            },
        }
    }
}

/// Sends the scripts by their hashes, and again with the script text after NOSCRIPT.
async fn send_scripts(
    connection: &mut Wire,
    options: CallOptions<'_>,
    sent: &[WireCommand<'_>],
) -> Vec<Result<Value, RedisError>> {
    let commands = sent.iter().map(|sent| sent.encode(options, false));
    let mut values = connection.pipeline(commands.collect(), options.is_asking).await;
    let unknown: Vec<usize> = (0..values.len()).filter(|at| is_noscript(&values[*at])).collect();
    if !unknown.is_empty() {
        // Send each script text once; the server then knows it for the later commands.
        let mut with_text = Vec::new();
        let commands = unknown.iter().map(|at| {
            let call = sent[*at].script_call(options);
            let use_eval = !with_text.contains(&call.script());
            with_text.push(call.script());
            codec::command(&call, use_eval)
        });
        let again = connection.pipeline(commands.collect(), options.is_asking).await;
        for (at, value) in unknown.into_iter().zip(again) {
            values[at] = value;
        }
    }
    values
}

/// Whether the server does not know the script.
pub(super) fn is_noscript(value: &Result<Value, RedisError>) -> bool {
    value.as_ref().is_err_and(|error| error.code() == Some("NOSCRIPT"))
}

pub(super) fn read(command: &Command, value: Result<Value, RedisError>) -> Result<Answer, CallError> {
    let value = value.and_then(Value::extract_error).map_err(|error| CallError::from(&error))?;
    let answer = decode_answer(command, &value).map_err(failed)?;
    if let (Command::Release(_), Reply::Foreign { .. }) = (command, &answer.reply) {
        let what = "another program's value is in the lock's key, so the release must be repeated";
        return Err(CallError::Failed(StoreError::new(Failure::Busy, what)));
    }
    Ok(answer)
}

fn failed(cause: impl std::fmt::Display) -> CallError {
    CallError::Failed(StoreError::new(Failure::Unknown, cause.to_string()))
}

/// Every resource stored on this server, with the reply to its `Inspect`, in the order of the keys. A resource may appear twice.
///
/// Each round trip has the `Inspect`s of a page of keys, or of a part of it. The last one has the SCAN for the next page, too.
pub(super) async fn inspect_all(
    mut connection: Wire,
    options: CallOptions<'_>,
) -> Result<Vec<(Resource, Result<Answer, CallError>)>, StoreError> {
    let mut found = Vec::new();
    let first = connection.send(&scan(0)).await;
    let (mut cursor, mut page) = read_page(first)?;
    loop {
        let later = page.split_off(page.len().min(MAX_INSPECTS));
        let has_scan = later.is_empty() && cursor != 0;
        let calls: Vec<Call> =
            page.into_iter().map(|resource| Call::new(Arc::new(resource), Command::Inspect)).collect();
        let inspect =
            |Call { resource, command }: &Call| codec::command(&options.encode(resource, command), false);
        let mut commands: Vec<redis::Cmd> = calls.iter().map(inspect).collect();
        if has_scan {
            commands.push(scan(cursor));
        }
        let mut values = connection.pipeline(commands, false).await;
        let next = if has_scan { values.pop() } else { None };
        if values.iter().any(is_noscript) {
            // At most once: the server then knows the script.
            let answers = run_sorted(connection.clone(), options, &calls.iter().collect::<Vec<_>>()).await;
            found.extend(calls.into_iter().map(|Call { resource, .. }| (*resource).clone()).zip(answers));
        } else {
            let read =
                |(Call { resource, command }, value): (Call, _)| ((*resource).clone(), read(&command, value));
            found.extend(calls.into_iter().zip(values).map(read));
        }
        (cursor, page) = match next {
            Some(next) => read_page(next)?,
            None if later.is_empty() => return Ok(found),
            None => (cursor, later),
        };
    }
}

/// Every resource stored on this server. One may appear twice.
pub(super) async fn list(mut connection: Wire) -> Result<Vec<Resource>, StoreError> {
    let mut resources = Vec::new();
    let mut cursor = 0;
    loop {
        let (next, page) = read_page(connection.send(&scan(cursor)).await)?;
        resources.extend(page);
        if next == 0 {
            return Ok(resources);
        }
        cursor = next;
    }
}

/// Number of keys that one SCAN call visits.
const PAGE: usize = 1_000;

/// Max number of `Inspect`s in one pipeline. The server must answer them within the time limit of an answer, also when it gets little
/// CPU time.
pub(super) const MAX_INSPECTS: usize = 200;

fn scan(cursor: u64) -> redis::Cmd {
    let mut scan = redis::cmd("SCAN");
    scan.arg(cursor).arg("MATCH").arg(RESOURCE_PATTERN).arg("COUNT").arg(PAGE);
    scan
}

fn read_page(value: Result<Value, RedisError>) -> Result<(u64, Vec<Resource>), StoreError> {
    let read = |value| redis::from_redis_value::<(u64, Vec<Vec<u8>>)>(value).map_err(RedisError::from);
    let page = value.and_then(Value::extract_error).and_then(read);
    let (next, keys) = page.map_err(|error| store_error(&rights::of_command(error, "+scan", None)))?;
    Ok((next, keys.iter().filter_map(|key| resource_of(key)).collect()))
}

#[cfg(test)]
mod tests {
    use leasehold_core::{Acquire, Acquisition, ClientId, Kind, Name, Release, Renew, Token};
    use leasehold_redis_protocol::ConditionalDelete;

    use super::*;

    const OPTIONS: CallOptions<'static> = CallOptions::of(ScriptVariant::Server);

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
            to_resource(Command::Renew(Renew { acquisition: ACQUISITION, ttl, reserve }))
        };
        let commands = [(10, 0), (10, 0), (20, 0), (20, 0), (20, 1), (10, 0)].map(renew);
        let calls: Vec<&Call> = commands.iter().collect();
        let order = by_ttl(&[calls[2], calls[0], calls[3], calls[4], calls[3], calls[1]]);
        assert_eq!(order, [1, 0, 2, 3, 5, 4]);
        let sent = order.clone();
        assert_eq!(in_call_order(order, sent), [0, 1, 2, 3, 4, 5]);
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
            assert_eq!(sizes(CallOptions { variant, ..OPTIONS }, &commands), vec![-1; commands.len()]);
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
