//! Commands as script calls.

use std::time::Duration;

use leasehold_core::{Acquire, Acquisition, Command, Owner, Release, ReleaseIf, Renew, Resource, Token};

use crate::call::ScriptCall;
use crate::keys::{clock_key, digest_of, inbox_prefix, resource_key, scratch_key, slot_of, tombstone_key};
use crate::layout::{RESTART_GUARD_KEY, USUAL_WAIT, push_mark};
use crate::script::Script;
use crate::variant::ScriptVariant;

/// Extra arguments for a quorum node. Other variants ignore them.
#[derive(Clone, Copy, Debug, Default)]
pub struct VoteArgs<'a> {
    /// Lower bound for new tokens.
    pub floor: Option<Token>,
    /// How long the node abstains if it may have lost leases. It is the maximum ttl in use. `None` if the node never
    /// abstains.
    pub abstains_for: Option<Duration>,
    /// The server's run id. It is only sent together with `abstains_for`.
    pub run_id: &'a str,
}

/// What a client expects of a lock. It changes what a command costs the server, and never what it does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Expectation {
    /// The lock is free, or has one holder and no waiter.
    #[default]
    Uncontended,
    /// The lock has waiters or several holders: the script looks first where it is stored then. If it is not there, that costs the
    /// server one command more. Quorum nodes ignore it.
    Contended,
}

impl ScriptVariant {
    /// Encodes a command. [`decode_answer`](crate::decode_answer) decodes the reply.
    #[must_use]
    pub fn encode(
        self,
        resource: &Resource,
        command: &Command,
        vote_args: VoteArgs<'_>,
        expectation: Expectation,
    ) -> ScriptCall {
        let script = script_of(command);
        let abstains_for = vote_args.abstains_for.filter(|_| self.is_voter() && script == Script::Acquire);
        let mut call = ScriptCall::new(self, script, 8, room_for(resource, command) + vote_args.run_id.len());
        call.push_key(resource_key(resource).as_bytes());
        self.push_clock(&mut call, resource);
        if abstains_for.is_some() {
            call.push_key(RESTART_GUARD_KEY.as_bytes());
        }
        if self.is_restricted() {
            call.push_key(scratch_key(Some(slot_of(resource))).as_bytes());
            if let Some(request) = request_of(command) {
                call.push_key(tombstone_key(resource, request).as_bytes());
            }
        }
        push_args(&mut call, command, if self.is_voter() { Expectation::Uncontended } else { expectation });
        if let Some(span) = abstains_for {
            call.push_arg(|bytes| {
                bytes.extend(number(micros(span)));
                bytes.extend(vote_args.run_id.as_bytes());
            });
        }
        self.push_floor(&mut call, vote_args);
        self.push_inbox(&mut call, resource);
        call
    }

    /// Encodes attempts at resources of one hash slot as one atomic command: all are granted, or none is. No attempt may
    /// wait, or replace a lease. The reply is the list of their replies, in order.
    ///
    /// Quorum nodes do not support it, because it has no lower bound for tokens.
    #[must_use]
    pub fn encode_acquire_all<'a>(
        self,
        attempts: impl Iterator<Item = (&'a Resource, &'a Command)> + Clone,
    ) -> ScriptCall {
        let first = attempts.clone().next();
        let mut call = self.several(Script::AcquireAll, attempts);
        if let Some((resource, _)) = first {
            self.push_inbox(&mut call, resource);
        }
        call
    }

    /// Encodes up to [`MAX_RENEWALS`](crate::MAX_RENEWALS) renewals that have one ttl and request no tokens. Clusters do not
    /// support it. [`decode_renewals`](crate::decode_renewals) decodes the reply.
    #[must_use]
    pub fn encode_renewals(self, renewals: &[(&Resource, &Renew)], vote_args: VoteArgs<'_>) -> ScriptCall {
        let room = renewals.iter().map(|(resource, _)| resource.name.as_str().len() + 80).sum();
        let mut call = ScriptCall::new(self, Script::RenewAll, 2 * renewals.len() + 2, room);
        for (resource, _) in renewals {
            call.push_key(resource_key(resource).as_bytes());
        }
        let ttl = renewals.first().map(|(_, renew)| renew.ttl).unwrap_or_default();
        debug_assert!(renewals.iter().all(|(_, renew)| renew.ttl == ttl), "a batch has one ttl");
        call.push_arg(|bytes| bytes.extend(micros(ttl).div_ceil(1_000).to_string().as_bytes()));
        for (_, renew) in renewals {
            call.push_arg(|bytes| {
                push_acquisition(bytes, renew.acquisition);
                if let Some(token) = renew.token {
                    push_mark(bytes, token);
                }
            });
        }
        self.push_floor(&mut call, vote_args);
        call
    }

    /// Encodes up to [`MAX_EACH`](crate::MAX_EACH) commands of one [kind](BatchKind), either attempts or releases: each is done for
    /// itself. The reply is the list of their replies, or 1 if all are plain leases that were released. Clusters and quorum nodes do
    /// not support it.
    #[must_use]
    pub fn encode_each<'a>(
        self,
        commands: impl Iterator<Item = (&'a Resource, &'a Command)> + Clone,
    ) -> ScriptCall {
        let kind = |(_, command): (&Resource, &Command)| BatchKind::of(command);
        let is_of_a_kind = |kind| matches!(kind, Some(BatchKind::Attempts | BatchKind::Releases));
        debug_assert!(commands.clone().map(kind).all(is_of_a_kind), "each may share a call");
        let script = match commands.clone().next() {
            Some((_, Command::Release(_))) => Script::ReleaseEach,
            _ => Script::AcquireEach,
        };
        self.several(script, commands)
    }

    /// The keys of these resources, the clock, and the arguments of each command.
    fn several<'a>(
        self,
        script: Script,
        commands: impl Iterator<Item = (&'a Resource, &'a Command)> + Clone,
    ) -> ScriptCall {
        let room = commands.clone().map(|(resource, command)| room_for(resource, command)).sum();
        let mut call = ScriptCall::new(self, script, commands.clone().count() * 4 + 2, room);
        for (resource, _) in commands.clone() {
            call.push_key(resource_key(resource).as_bytes());
        }
        if let Some((resource, _)) = commands.clone().next() {
            self.push_clock(&mut call, resource);
        }
        for (_, command) in commands {
            push_args(&mut call, command, Expectation::Uncontended);
        }
        call
    }

    fn push_clock(self, call: &mut ScriptCall, resource: &Resource) {
        call.push_key(clock_key(self.is_cluster().then(|| slot_of(resource))).as_bytes());
    }

    fn push_floor(self, call: &mut ScriptCall, vote_args: VoteArgs<'_>) {
        if self.is_voter() {
            call.push_arg(|bytes| bytes.extend(number(vote_args.floor.map_or(0, Token::get))));
        }
    }

    fn push_inbox(self, call: &mut ScriptCall, resource: &Resource) {
        if self.names_inbox() {
            call.push_arg(|bytes| bytes.extend(inbox_prefix(Some(slot_of(resource))).as_bytes()));
        }
    }
}

/// The kind of commands of which a server can do several in one script call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchKind {
    /// Attempts that the first lines of `acquire.lua` can grant: for [`ScriptVariant::encode_each`].
    Attempts,
    /// Releases without a minimum hold and a tombstone: for [`ScriptVariant::encode_each`].
    Releases,
    /// Renewals by this ttl that request no tokens: for [`ScriptVariant::encode_renewals`].
    Renewals(Duration),
}

impl BatchKind {
    /// The kind of this command; `None` if it has a script call of its own.
    #[must_use]
    pub fn of(command: &Command) -> Option<Self> {
        match command {
            // The script looks first whether the request has ended.
            Command::Acquire(acquire) if acquire.acquisition.is_requested() => None,
            Command::Acquire(acquire) => plain_ttl(acquire).map(|_| Self::Attempts),
            Command::Release(release) => is_plain(release).then_some(Self::Releases),
            Command::Renew(renew) if renew.reserve == 0 && !renew.only_asks() => {
                Some(Self::Renewals(renew.ttl))
            }
            Command::Renew(_) | Command::Inspect | Command::ForceRelease => None,
        }
    }
}

const fn script_of(command: &Command) -> Script {
    match command {
        Command::Acquire(_) => Script::Acquire,
        Command::Renew(_) => Script::Renew,
        Command::Release(_) => Script::Release,
        Command::Inspect => Script::Inspect,
        Command::ForceRelease => Script::ForceRelease,
    }
}

/// The request that the command makes or ends, if it is one.
fn request_of(command: &Command) -> Option<Acquisition> {
    let acquisition = match command {
        Command::Acquire(acquire) => acquire.acquisition,
        Command::Release(release) => release.acquisition,
        Command::Renew(_) | Command::Inspect | Command::ForceRelease => return None,
    };
    acquisition.is_requested().then_some(acquisition)
}

/// The expected size of a call, in bytes. A name with escaped characters may need more.
fn room_for(resource: &Resource, command: &Command) -> usize {
    let args = match command {
        Command::Acquire(acquire) => acquire.metadata.len() + 160,
        _ => 80,
    };
    resource.name.as_str().len() + 80 + args
}

/// Appends the first argument of the command's script, and the second and third one of `acquire.lua`. A hyphen says that the lock is
/// expected to be contended or shared.
fn push_args(call: &mut ScriptCall, command: &Command, expectation: Expectation) {
    let hyphen: &[u8] = if expectation == Expectation::Contended { b"-" } else { b"" };
    let is_plain_release = matches!(command, Command::Release(release) if is_plain(release));
    call.push_arg(|bytes| {
        push_command(bytes, command);
        if is_plain_release {
            bytes.extend(hyphen);
        }
    });
    if let Command::Acquire(acquire) = command {
        let ttl = plain_ttl(acquire);
        call.push_arg(|bytes| {
            bytes.extend(hyphen);
            bytes.extend(ttl.map_or_else(String::new, |ms| ms.to_string()).as_bytes());
        });
        call.push_arg(|bytes| push_wait(bytes, acquire, expectation));
    }
}

/// Without a minimum hold, a tombstone and a condition.
pub(crate) fn is_plain(release: &Release) -> bool {
    release.min_hold.is_zero() && release.tombstone.is_zero() && release.only_if.is_none()
}

/// Appends the first argument of the command's script.
fn push_command(bytes: &mut Vec<u8>, command: &Command) {
    match command {
        Command::Acquire(acquire) => push_acquire(bytes, acquire),
        Command::Renew(renew) => {
            push_acquisition(bytes, renew.acquisition);
            bytes.extend(micros(renew.ttl).to_be_bytes());
            bytes.extend(renew.reserve.to_be_bytes());
            if let Some(token) = renew.token {
                push_mark(bytes, token);
            }
        }
        Command::Release(release) => push_release(bytes, release),
        Command::Inspect | Command::ForceRelease => {}
    }
}

/// The ttl in milliseconds if the first lines of `acquire.lua` or `acquire_voter.lua` can grant the attempt. Without an owner,
/// reserved tokens and a lease to replace, the stored value tells everything.
fn plain_ttl(acquire: &Acquire) -> Option<u64> {
    let is_plain = acquire.owner.is_none() && acquire.replaces.is_none() && acquire.reserve == 0;
    let fits = (1..=acquire.capacity).contains(&acquire.weight);
    Some(micros(acquire.ttl).div_ceil(1_000)).filter(|ms| is_plain && fits && *ms > 0)
}

pub(crate) fn push_acquire(bytes: &mut Vec<u8>, acquire: &Acquire) {
    let owner = acquire.owner.as_ref().map(Owner::as_str);
    push_acquisition(bytes, acquire.acquisition);
    let extent = [acquire.capacity, acquire.weight, acquire.reserve];
    let has_extent = extent != [1, 1, 0];
    let flags = [false, owner.is_some(), acquire.replaces.is_some(), has_extent, acquire.inbox.is_some()];
    bytes.push(flags.into_iter().rev().fold(0, |flags, flag| flags << 1 | u8::from(flag)));
    bytes.extend(micros(acquire.ttl).to_be_bytes());
    if has_extent {
        extent.iter().for_each(|number| bytes.extend(number.to_be_bytes()));
    }
    if let Some(inbox) = acquire.inbox {
        bytes.extend(inbox.get().to_be_bytes());
    }
    if let Some(owner) = owner {
        bytes.extend(u32::try_from(owner.len()).unwrap_or(u32::MAX).to_be_bytes());
        bytes.extend(owner.as_bytes());
    }
    if let Some(sequence) = acquire.replaces {
        bytes.extend(sequence.to_be_bytes());
    }
    bytes.extend(acquire.metadata.as_bytes());
}

/// Appends how an attempt waits, apart from what a lease keeps of it. The inbox saves the script a digest if the attempt is queued.
fn push_wait(bytes: &mut Vec<u8>, acquire: &Acquire, expectation: Expectation) {
    let Some(wait) = acquire.wait else { return };
    bytes.extend(acquire.secret.bytes());
    let is_usual = wait == USUAL_WAIT;
    if !is_usual || expectation == Expectation::Contended {
        bytes.extend(digest_of(acquire.inbox()).as_bytes());
    }
    if !is_usual {
        bytes.extend(micros(wait.entry_ttl).to_be_bytes());
        bytes.extend(wait.max_queue.to_be_bytes());
    }
}

fn push_release(bytes: &mut Vec<u8>, release: &Release) {
    if !is_plain(release) {
        bytes.extend(micros(release.min_hold).to_be_bytes());
        bytes.extend(micros(release.tombstone).to_be_bytes());
    }
    push_acquisition(bytes, release.acquisition);
    match release.only_if {
        None => {}
        Some(ReleaseIf::SpeaksFor(client)) => bytes.extend(client.get().to_be_bytes()),
        Some(ReleaseIf::HasToken(token)) => push_mark(bytes, token),
    }
}

/// Appends an acquisition id: 24 bytes whose order is that of the numbers.
fn push_acquisition(bytes: &mut Vec<u8>, acquisition: Acquisition) {
    bytes.extend(acquisition.client.get().to_be_bytes());
    bytes.extend(acquisition.sequence.to_be_bytes());
}

/// Encodes a number like Lua's `struct.pack('>d')`.
#[allow(clippy::cast_precision_loss, reason = "tokens and spans are below 2^53")]
fn number(number: u64) -> [u8; 8] {
    (number as f64).to_be_bytes()
}

/// Microseconds, capped to what a Lua number represents exactly.
pub(crate) fn micros(span: Duration) -> u64 {
    const LONGEST: u64 = 1 << 52;
    u64::try_from(span.as_micros()).map_or(LONGEST, |micros| micros.min(LONGEST))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use leasehold_core::{ClientId, GrantSecret, Kind, Name, WaitFor};

    use super::*;
    use crate::keys::inbox_of;
    use crate::variant::Channels;

    fn resource(name: &str) -> Resource {
        Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() }
    }

    fn acquisition() -> Acquisition {
        Acquisition { client: ClientId::new(0x0102), sequence: 3 }
    }

    /// The bytes of an acquisition of client 0x0102 with sequence number 3.
    fn id() -> Vec<u8> {
        let mut id = vec![0; 24];
        (id[14], id[15], id[23]) = (1, 2, 3);
        id
    }

    fn args(call: &ScriptCall) -> Vec<Vec<u8>> {
        call.args().map(<[u8]>::to_vec).collect()
    }

    fn encode(variant: ScriptVariant, command: &Command, vote_args: VoteArgs<'_>) -> ScriptCall {
        let call = variant.encode(&resource("a"), command, vote_args, Expectation::default());
        let keys: Vec<&[u8]> = call.keys().collect();
        let clock = clock_key(variant.is_cluster().then(|| slot_of(&resource("a"))));
        assert_eq!(keys[..2], [resource_key(&resource("a")).as_bytes(), clock.as_bytes()]);
        call
    }

    #[test]
    fn acquire_is_encoded_as_documented() {
        let plain = Acquire::exclusive(acquisition(), Duration::from_micros(1_001));
        let plain = encode(ScriptVariant::Server, &Command::from(plain), VoteArgs::default());
        assert_eq!(args(&plain)[1], b"2", "milliseconds are rounded up");
        let acquire = Acquire { reserve: 5, ..Acquire::exclusive(acquisition(), Duration::from_micros(9)) };
        let plain = encode(ScriptVariant::Server, &Command::from(acquire.clone()), VoteArgs::default());
        let mut expected = id();
        expected.extend([8, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 5]);
        assert_eq!((plain.script(), args(&plain)), (Script::Acquire, vec![expected, Vec::new(), Vec::new()]));

        let all = Acquire {
            owner: Some(Owner::new("me")),
            wait: Some(WaitFor { entry_ttl: Duration::from_micros(7), max_queue: 8 }),
            replaces: Some(2),
            secret: GrantSecret::new(*b"8 bytes!"),
            metadata: Arc::from("{}"),
            ..acquire
        };
        let all = encode(ScriptVariant::Server, &Command::from(all), VoteArgs::default());
        let mut expected = id();
        expected.extend([14, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 5]);
        expected.extend(b"\0\0\0\x02me\0\0\0\0\0\0\0\x02{}");
        assert_eq!(
            args(&all),
            [
                expected,
                Vec::new(),
                [b"8 bytes!", digest_of(acquisition().client).as_bytes(), b"\0\0\0\0\0\0\0\x07\0\0\0\x08"]
                    .concat()
            ]
        );
    }

    #[test]
    fn ttl_is_an_argument_of_its_own_if_the_first_lines_can_grant() {
        let plain =
            Acquire { capacity: 3, weight: 3, ..Acquire::exclusive(acquisition(), Duration::from_secs(1)) };
        let ttl_arg = |variant, acquire: &Acquire| {
            let call = encode(variant, &Command::from(acquire.clone()), VoteArgs::default());
            args(&call).swap_remove(1)
        };
        for variant in ScriptVariant::ALL {
            assert_eq!(ttl_arg(variant, &plain), b"1000", "{variant:?}");
        }
        for acquire in [
            Acquire { owner: Some(Owner::new("me")), ..plain.clone() },
            Acquire { replaces: Some(2), ..plain.clone() },
            Acquire { reserve: 1, ..plain.clone() },
            Acquire { weight: 0, ..plain.clone() },
            Acquire { weight: 4, ..plain.clone() },
            Acquire { ttl: Duration::ZERO, ..plain },
        ] {
            assert_eq!(ttl_arg(ScriptVariant::Server, &acquire), b"", "{acquire:?}");
        }
    }

    /// A lease keeps nothing of how its attempt waited, and no secret.
    #[test]
    fn wait_is_an_argument_of_its_own_which_is_short_in_the_usual_case() {
        let secret = GrantSecret::new(*b"8 bytes!");
        let plain = Acquire { secret, ..Acquire::exclusive(acquisition(), Duration::from_secs(1)) };
        let encoded = |wait| {
            let command = Command::from(Acquire { wait, ..plain.clone() });
            args(&encode(ScriptVariant::Server, &command, VoteArgs::default()))
        };
        assert_eq!(encoded(None)[2], b"");
        assert_eq!(encoded(Some(USUAL_WAIT))[2], b"8 bytes!");
        assert_eq!(encoded(Some(USUAL_WAIT))[..2], encoded(None)[..2]);
        let command = Command::from(Acquire { wait: Some(USUAL_WAIT), ..plain.clone() });
        let call = ScriptVariant::Server.encode(
            &resource("a"),
            &command,
            VoteArgs::default(),
            Expectation::Contended,
        );
        let inbox = inbox_of(acquisition().client, None);
        let digest = inbox.strip_prefix(&inbox_prefix(None)).unwrap();
        assert_eq!(args(&call)[2], [b"8 bytes!", digest.as_bytes()].concat(), "with the inbox");
        for wait in
            [WaitFor { max_queue: 8, ..USUAL_WAIT }, WaitFor { entry_ttl: Duration::ZERO, ..USUAL_WAIT }]
        {
            assert_eq!(encoded(Some(wait))[2].len(), 60, "{wait:?}");
        }
        let text = ScriptVariant::Server.text(Script::Acquire);
        let (entry_ttl, max_queue) = (USUAL_WAIT.entry_ttl.as_micros(), USUAL_WAIT.max_queue);
        assert!(text.contains(&format!("USUAL_ENTRY_TTL, USUAL_MAX_QUEUE = {entry_ttl}, {max_queue}\n")));
    }

    #[test]
    fn each_option_of_an_acquire_has_its_own_flag() {
        let plain = Acquire::exclusive(acquisition(), Duration::from_secs(1));
        for (acquire, flag, option) in [
            (Acquire { owner: Some(Owner::new("me")), ..plain.clone() }, 2, b"\0\0\0\x02me".as_slice()),
            (Acquire { replaces: Some(9), ..plain.clone() }, 4, b"\0\0\0\0\0\0\0\x09"),
            (Acquire { capacity: 2, ..plain.clone() }, 8, b"\0\0\0\x02\0\0\0\x01\0\0\0\0"),
            (Acquire { weight: 0, ..plain.clone() }, 8, b"\0\0\0\x01\0\0\0\0\0\0\0\0"),
            (Acquire { reserve: 3, ..plain }, 8, b"\0\0\0\x01\0\0\0\x01\0\0\0\x03"),
        ] {
            let call = encode(ScriptVariant::Server, &Command::from(acquire), VoteArgs::default());
            let arg = &args(&call)[0];
            assert_eq!((arg[24], &arg[33..]), (flag, option));
        }
    }

    #[test]
    fn renew_and_release_are_encoded_as_documented() {
        let renew = Renew { reserve: 4, ..Renew::to(acquisition(), Duration::from_micros(9)) };
        let call = encode(ScriptVariant::Server, &Command::Renew(renew), VoteArgs::default());
        let expected = [id(), vec![0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 4]].concat();
        assert_eq!((call.script(), args(&call)), (Script::Renew, vec![expected]));

        let release = Release::now(acquisition());
        let call = encode(ScriptVariant::Server, &Command::Release(release.clone()), VoteArgs::default());
        assert_eq!((call.script(), args(&call)), (Script::Release, vec![id()]));
        for (min_hold, tombstone) in [(0, 6), (5, 0), (5, 6)] {
            let spans = [vec![0; 7], vec![min_hold], vec![0; 7], vec![tombstone]].concat();
            let [min_hold, tombstone] =
                [min_hold, tombstone].map(|micros| Duration::from_micros(micros.into()));
            let release = Command::Release(Release { min_hold, tombstone, ..release.clone() });
            let call = encode(ScriptVariant::Server, &release, VoteArgs::default());
            assert_eq!(args(&call), [[spans, id()].concat()]);
        }
    }

    #[test]
    fn inspect_and_force_release_have_an_empty_argument() {
        for (command, script) in
            [(Command::Inspect, Script::Inspect), (Command::ForceRelease, Script::ForceRelease)]
        {
            let call = encode(ScriptVariant::Server, &command, VoteArgs::default());
            assert_eq!((call.script(), args(&call)), (script, vec![Vec::new()]));
        }
    }

    #[test]
    fn voter_is_sent_a_floor_and_an_acquire_its_restart_guard() {
        let floor = Token::new(3);
        let vote_args = VoteArgs { floor, abstains_for: Some(Duration::from_micros(2)), run_id: "run" };
        let acquire = Command::from(Acquire::exclusive(acquisition(), Duration::from_secs(1)));
        let call = encode(ScriptVariant::Voter, &acquire, vote_args);
        assert_eq!(call.keys().nth(2), Some(RESTART_GUARD_KEY.as_bytes()));
        let guard = [&2_f64.to_be_bytes(), b"run".as_slice()].concat();
        assert_eq!(args(&call)[1..], [b"1000".to_vec(), Vec::new(), guard, 3_f64.to_be_bytes().to_vec()]);
        let call = encode(ScriptVariant::Voter, &Command::Inspect, vote_args);
        assert_eq!((call.keys().len(), args(&call)), (2, vec![Vec::new(), 3_f64.to_be_bytes().to_vec()]));
        let call = encode(ScriptVariant::Server, &acquire, vote_args);
        assert_eq!((call.keys().len(), call.args().len()), (2, 3));
    }

    #[test]
    fn cluster_is_sent_the_inbox_of_the_resources_slot() {
        let variant = ScriptVariant::Cluster(Channels::Sharded);
        let inbox = inbox_prefix(Some(slot_of(&resource("a"))));
        let call = encode(variant, &Command::Inspect, VoteArgs::default());
        assert_eq!(args(&call)[1..], [inbox.as_bytes()]);
        let acquire = Command::from(Acquire::exclusive(acquisition(), Duration::from_secs(1)));
        let (a, b) = (resource("a"), resource("b"));
        let call = variant.encode_acquire_all([(&a, &acquire), (&b, &acquire)].into_iter());
        assert_eq!((call.script(), call.keys().len(), call.args().len()), (Script::AcquireAll, 3, 7));
        assert_eq!(args(&call)[6], inbox.as_bytes());
    }

    #[test]
    fn several_attempts_have_one_clock_and_two_arguments_each() {
        let acquire = |sequence| {
            let acquisition = Acquisition { sequence, ..acquisition() };
            Command::from(Acquire::exclusive(acquisition, Duration::from_secs(sequence)))
        };
        let (a, b, first, second) = (resource("a"), resource("b"), acquire(3), acquire(4));
        let call = ScriptVariant::Server.encode_acquire_all([(&a, &first), (&b, &second)].into_iter());
        let keys: Vec<&[u8]> = call.keys().collect();
        let clock: &[u8] = b"leasehold:4:clock";
        assert_eq!(keys, [resource_key(&a).as_bytes(), resource_key(&b).as_bytes(), clock]);
        let single = |resource, command| {
            args(&ScriptVariant::Server.encode(
                resource,
                command,
                VoteArgs::default(),
                Expectation::default(),
            ))
        };
        assert_eq!(
            (call.script(), args(&call)),
            (Script::AcquireAll, [single(&a, &first), single(&b, &second)].concat())
        );
    }

    #[test]
    fn commands_that_share_a_call_have_their_own_arguments() {
        let acquire = |sequence| {
            let acquisition = Acquisition { sequence, ..acquisition() };
            Command::from(Acquire::exclusive(acquisition, Duration::from_secs(sequence)))
        };
        let release = |sequence| Command::Release(Release::now(Acquisition { sequence, ..acquisition() }));
        let (a, b) = (resource("a"), resource("b"));
        let single = |resource: &Resource, command: &Command| {
            args(&ScriptVariant::Server.encode(
                resource,
                command,
                VoteArgs::default(),
                Expectation::default(),
            ))
        };
        for (script, first, second) in
            [(Script::AcquireEach, acquire(3), acquire(4)), (Script::ReleaseEach, release(3), release(4))]
        {
            let call = ScriptVariant::Server.encode_each([(&a, &first), (&b, &second)].into_iter());
            let keys: Vec<&[u8]> = call.keys().collect();
            let own = [resource_key(&a), resource_key(&b)];
            let clock: &[u8] = b"leasehold:4:clock";
            assert_eq!(keys, [own[0].as_bytes(), own[1].as_bytes(), clock]);
            let single = [single(&a, &first), single(&b, &second)].concat();
            assert_eq!((call.script(), args(&call)), (script, single));
        }
    }

    #[test]
    fn commands_with_options_share_no_call() {
        let plain = Acquire::exclusive(acquisition(), Duration::from_secs(1));
        let now = Release::now(acquisition());
        let second = Duration::from_secs(1);
        let renew = Renew::to(acquisition(), second);
        for (command, kind) in [
            (Command::from(plain.clone()), Some(BatchKind::Attempts)),
            (Command::from(Acquire { capacity: 3, weight: 2, ..plain.clone() }), Some(BatchKind::Attempts)),
            (Command::from(Acquire { reserve: 1, ..plain.clone() }), None),
            (Command::from(Acquire { owner: Some(Owner::new("me")), ..plain }), None),
            (Command::Release(now.clone()), Some(BatchKind::Releases)),
            (Command::Release(Release { min_hold: second, ..now.clone() }), None),
            (Command::Release(Release { tombstone: second, ..now }), None),
            (Command::Renew(renew.clone()), Some(BatchKind::Renewals(second))),
            (Command::Renew(Renew { reserve: 1, ..renew.clone() }), None),
            (Command::Renew(Renew { ttl: Duration::ZERO, ..renew }), None),
            (Command::Inspect, None),
            (Command::ForceRelease, None),
        ] {
            assert_eq!(BatchKind::of(&command), kind, "{command:?}");
        }
    }

    #[test]
    fn condition_on_a_token_is_the_end_of_the_plain_value() {
        let token = Token::new(1_700_000_000_000 * 2_048 + 7).unwrap();
        let renew = Renew { token: Some(token), ..Renew::to(acquisition(), Duration::from_micros(9)) };
        let call = encode(ScriptVariant::Server, &Command::Renew(renew.clone()), VoteArgs::default());
        let mark = b" leasehold:4@1700000000000-7";
        assert_eq!(args(&call), [[&id(), &[0; 7][..], &[9], &[0; 4], mark].concat()]);
        let batch = ScriptVariant::Server.encode_renewals(&[(&resource("a"), &renew)], VoteArgs::default());
        assert_eq!(args(&batch), [b"1".to_vec(), [&id(), &mark[..]].concat()]);
        let only_if = Some(ReleaseIf::HasToken(token));
        let release = Command::Release(Release { only_if, ..Release::now(acquisition()) });
        let call = encode(ScriptVariant::Server, &release, VoteArgs::default());
        assert_eq!(args(&call), [[&[0; 16][..], &id(), mark].concat()]);
    }

    #[test]
    fn request_shares_no_call_with_other_attempts() {
        let request = Acquisition { sequence: leasehold_core::FIRST_REQUESTED, ..acquisition() };
        let attempt = |acquisition| Command::from(Acquire::exclusive(acquisition, Duration::from_secs(9)));
        assert_eq!(BatchKind::of(&attempt(request)), None);
        assert_eq!(BatchKind::of(&attempt(acquisition())), Some(BatchKind::Attempts));
    }

    #[test]
    fn renewals_have_one_ttl_and_an_id_each() {
        let renew =
            |sequence| Renew::to(Acquisition { sequence, ..acquisition() }, Duration::from_micros(1_001));
        let (a, b) = (resource("a"), resource("b"));
        let (first, second) = (renew(3), renew(4));
        let call = ScriptVariant::Server.encode_renewals(&[(&a, &first), (&b, &second)], VoteArgs::default());
        let other = [&id()[..23], &[4]].concat();
        assert_eq!((call.script(), args(&call)), (Script::RenewAll, vec![b"2".to_vec(), id(), other]));
        let keys: Vec<&[u8]> = call.keys().collect();
        assert_eq!(keys, [resource_key(&a).as_bytes(), resource_key(&b).as_bytes()]);
        let vote_args = VoteArgs { floor: Token::new(3), ..VoteArgs::default() };
        let call = ScriptVariant::Voter.encode_renewals(&[(&a, &first)], vote_args);
        assert_eq!(args(&call), [b"2".to_vec(), id(), 3_f64.to_be_bytes().to_vec()]);
    }

    #[test]
    fn spans_are_capped_to_what_lua_can_count() {
        assert_eq!(micros(Duration::from_micros(5)), 5);
        assert_eq!(micros(Duration::MAX), 1 << 52);
    }
}
