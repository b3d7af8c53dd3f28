//! `acquire_each.lua` and `release_each.lua` against the scripts of single commands: the same replies, pushes and leases, apart from
//! the tokens.

use std::collections::HashSet;
use std::time::Duration;

use leasehold_core::{
    Acquire, Acquisition, Answer, ClientId, Command, Kind, Name, Now, Reply, Resource, Token, View,
};
use leasehold_redis_protocol::{clock_key, resource_key};
use leasehold_store::histories::{Step, client_id, release_of, steps};
use leasehold_testkit::{Flavor, extent};
use proptest::test_runner::{Config, TestRunner};

use super::comparison::{ScriptRunner, set_clock, start, with_scripts, with_scripts_on};
use super::{acquire_or_queue, may_share_a_call};

const RESOURCES: usize = 3;

fn resource(name: &str) -> Resource {
    Resource { kind: Kind::Mutex, name: Name::new(name).unwrap() }
}

/// The text of a value without its tokens.
fn without_tokens(value: &impl std::fmt::Debug) -> String {
    // A proof depends on the tokens.
    without_numbers("GrantProof([", &without_numbers("Token(", &format!("{value:?}")))
}

/// The text without the numbers behind this.
fn without_numbers(behind: &str, text: &str) -> String {
    let mut parts = text.split(behind);
    let first = parts.next().unwrap_or_default().to_owned();
    let is_number = |c: char| c.is_ascii_digit() || c == ',' || c == ' ';
    parts.fold(first, |text, part| text + behind + part.trim_start_matches(is_number))
}

/// Two sets of locks with the same history: one is used by shared calls, the other one by single ones.
struct Twins<'l, 'c> {
    runner: &'l mut ScriptRunner<'c>,
    shared: Vec<Resource>,
    single: Vec<Resource>,
    now: Now,
    absent: Vec<u128>,
    /// The tokens of plain grants.
    tokens: HashSet<Token>,
    /// The highest token of each lock.
    last: [[Option<Token>; RESOURCES]; 2],
    /// Commands that shared a call.
    count: usize,
}

impl<'l, 'c> Twins<'l, 'c> {
    fn new(runner: &'l mut ScriptRunner<'c>, name: &str) -> Self {
        redis::cmd("DEL").arg(clock_key(None)).exec(runner.commands).unwrap();
        let resources =
            |set: &str| (0..RESOURCES).map(|at| resource(&format!("{set}-{name}-{at}"))).collect::<Vec<_>>();
        Self {
            runner,
            shared: resources("shared"),
            single: resources("single"),
            now: Now::same(start()),
            absent: Vec::new(),
            tokens: HashSet::new(),
            last: [[None; RESOURCES]; 2],
            count: 0,
        }
    }

    /// Runs one step of each lock's history.
    fn round(&mut self, steps: &[Option<&Step>]) {
        let mut commands = Vec::new();
        for (at, step) in steps.iter().enumerate() {
            match step {
                None | Some(Step::Sweep | Step::Raise(_)) => {}
                Some(Step::Pass(ms)) => self.now = Now::same(self.now.time + Duration::from_millis(*ms)),
                Some(Step::SetBack(ms)) => {
                    self.now = Now::same(self.now.time.saturating_sub(Duration::from_millis(*ms)));
                }
                Some(Step::Leave(client)) if !self.absent.contains(client) => {
                    self.absent.push(*client);
                    self.runner.unsubscribe(client_id(*client));
                }
                Some(Step::Return(client)) if self.absent.contains(client) => {
                    self.absent.retain(|absent| absent != client);
                    self.runner.subscribe(client_id(*client));
                }
                Some(Step::Leave(_) | Step::Return(_)) => {}
                Some(Step::Do(command)) => commands.push((at, command)),
            }
        }
        let (shared, unshared): (Vec<_>, Vec<_>) =
            commands.into_iter().partition(|(_, command)| may_share_a_call(command));
        let (attempts, releases): (Vec<_>, Vec<_>) =
            shared.into_iter().partition(|(_, command)| matches!(command, Command::Acquire(_)));
        self.count += attempts.len() + releases.len();

        let mut of_shared = Vec::new();
        for batch in [&attempts, &releases] {
            let calls: Vec<_> = batch.iter().map(|(at, command)| (&self.shared[*at], *command)).collect();
            of_shared.extend(self.runner.run_each(&calls, self.now));
        }
        of_shared.extend(
            unshared.iter().map(|(at, command)| self.runner.run(&self.shared[*at], command, self.now)),
        );
        let pushed_to_shared = self.runner.pushes();

        let ordered: Vec<_> = attempts.into_iter().chain(releases).chain(unshared).collect();
        let of_single: Vec<_> = ordered
            .iter()
            .map(|(at, command)| self.runner.run(&self.single[*at], command, self.now))
            .collect();
        let pushed_to_single = self.runner.pushes();

        for ((at, command), (shared, single)) in ordered.iter().zip(of_shared.iter().zip(&of_single)) {
            self.expect_next_token(0, *at, shared);
            self.expect_next_token(1, *at, single);
            assert_eq!(comparable(shared), comparable(single), "after {command:?} among {ordered:?}");
        }
        assert_eq!(without_tokens(&pushed_to_shared), without_tokens(&pushed_to_single), "after {ordered:?}");
        // Looking may let a lease end, too.
        let [shared, single] = [&self.shared, &self.single].map(|resources| {
            let view = |resource| comparable(&self.runner.run(resource, &Command::Inspect, self.now));
            let views: Vec<_> = resources.iter().map(view).collect();
            let forms: Vec<_> = resources.iter().map(|resource| self.runner.key_type(resource)).collect();
            (views, forms, without_tokens(&self.runner.pushes()))
        });
        assert_eq!(shared, single, "after {ordered:?}");
    }

    /// The token of a plain lease is above those of the lock before, and no other lock's.
    fn expect_next_token(&mut self, set: usize, at: usize, answer: &Answer) {
        let Reply::Granted(grant) = &answer.reply else { return };
        let (first, last) = (grant.tokens.first, &mut self.last[set][at]);
        if grant.is_plain {
            assert!(*last < Some(first), "{first:?} after {last:?}");
            assert!(self.tokens.insert(first), "{first:?} was given before");
        }
        *last = (*last).max(Some(grant.tokens.last));
    }

    fn end(self) {
        for client in self.absent {
            self.runner.subscribe(client_id(client));
        }
    }
}

/// The time of a plain grant is that of its token.
fn comparable(answer: &Answer) -> String {
    match &answer.reply {
        Reply::Granted(grant) if grant.is_plain => without_tokens(&grant),
        // A view of a released lock may have a last token.
        Reply::View(view) => without_tokens(&(view.capacity, view.in_use, &view.holders, &view.waiters)),
        _ => without_tokens(answer),
    }
}

fn compare(capacity: u32) {
    with_scripts(|runner| {
        let runner = std::cell::RefCell::new(runner);
        let (number, count) = (std::cell::Cell::new(0_u64), std::cell::Cell::new(0));
        let config =
            Config { cases: extent(60, 600, 15_000), failure_persistence: None, ..Config::default() };
        let histories = [steps(capacity), steps(capacity), steps(capacity)];
        let result = TestRunner::new(config).run(&histories, |histories| {
            number.set(number.get() + 1);
            let mut runner = runner.borrow_mut();
            let mut twins = Twins::new(&mut runner, &number.get().to_string());
            for at in 0..histories.iter().map(Vec::len).max().unwrap_or(0) {
                twins.round(&histories.each_ref().map(|history| history.get(at)));
            }
            count.set(count.get() + twins.count);
            twins.end();
            Ok(())
        });
        if let Err(error) = result {
            panic!("{error}");
        }
        assert!(count.get() > 300, "{} commands shared a call", count.get());
    });
}

#[test]
fn shared_calls_match_single_ones() {
    compare(1);
}

#[test]
fn shared_calls_match_single_ones_for_shared_locks() {
    compare(4);
}

fn attempt(sequence: u64) -> Command {
    let acquisition = Acquisition { client: client_id(0), sequence };
    Command::from(Acquire::exclusive(acquisition, Duration::from_secs(10)))
}

fn tokens(answers: &[Answer]) -> Vec<u64> {
    let token = |answer: &Answer| match &answer.reply {
        Reply::Granted(grant) => grant.tokens.first.get(),
        other => panic!("{other:?}"),
    };
    answers.iter().map(token).collect()
}

/// The ids of a call are one behind the other, and end where a millisecond's do: the rules then give later ones.
#[test]
fn shared_call_draws_one_id_for_each_attempt() {
    const MS: u64 = 4_000_000_000_000;
    // The clock's last id, and whether the first lines can use those behind it.
    for (name, last, are_plain) in [
        ("fits", (MS - 1, 996), [true; 3]),
        // The last id of the millisecond is one attempt's.
        ("one too many", (MS - 1, 997), [true, false, false]),
        ("next century", (MS, 0), [false; 3]),
    ] {
        with_scripts(|runner| {
            let now = Now::same(start());
            set_clock(runner, last);
            let (resources, attempts) = (["a", "b", "c"].map(resource), [1, 2, 3].map(attempt));
            let calls: Vec<_> = resources.iter().zip(&attempts).collect();
            let answers = runner.run_each(&calls, now);
            for (answer, is_plain) in answers.iter().zip(are_plain) {
                let Reply::Granted(grant) = &answer.reply else { panic!("{name}: {answer:?}") };
                assert_eq!(grant.is_plain, is_plain, "{name}");
            }
            let given = tokens(&answers);
            assert!(given.is_sorted_by(|one, next| one < next), "{name}: {given:?}");
            // The clock is behind the last of them.
            let next = tokens(&[runner.run(&resource("d"), &attempt(4), now)])[0];
            assert!(next > given[2], "{name}: {next} after {given:?}");
            if are_plain[2] {
                assert_eq!([given[1], given[2], next], [given[0] + 1, given[0] + 2, given[0] + 3], "{name}");
            }
        });
    }
}

/// The rules move the clock to the last token that they reserve: not back from the ids of the other attempts.
#[test]
fn attempt_among_others_grants_a_waiter_its_reserve() {
    with_scripts(|runner| {
        let acquire = |client, reserve| {
            let Command::Acquire(plain) = acquire_or_queue(client, 1, 1, 1) else { panic!("not an attempt") };
            Step::Do(Command::from(Acquire { reserve, ..(*plain).clone() }))
        };
        let (holder, waiter, pass) = (acquire(0, 0), acquire(1, 1), Step::Pass(11_000));
        let (first, second) = (acquire(2, 0), acquire(3, 0));
        let mut twins = Twins::new(runner, "reserve");
        twins.round(&[Some(&holder)]);
        twins.round(&[Some(&waiter)]);
        // The first one finds that the lease has expired.
        twins.round(&[Some(&first), Some(&second), Some(&pass)]);
        let view = twins.runner.run(&twins.shared[0], &Command::Inspect, twins.now).reply;
        let Reply::View(View { holders, last_token, .. }) = view else { panic!("{view:?}") };
        let [granted] = &holders[..] else { panic!("{holders:?}") };
        assert_eq!(granted.acquisition.client, client_id(1));
        assert_eq!(last_token.map(Token::get), Some(granted.token.get() + 1));
        twins.end();
    });
}

/// Another program's key fails one command of a call, and no other.
#[test]
fn error_concerns_one_command_of_a_shared_call() {
    for flavor in [Flavor::Redis7, Flavor::Valkey9] {
        with_scripts_on(flavor, |runner| {
            let now = Now::same(start());
            let resources = ["a", "b", "c"].map(resource);
            let foreign = resource_key(&resources[1]);
            redis::cmd("HSET").arg(&foreign).arg("field").arg("value").exec(runner.commands).unwrap();
            let attempts = [1, 2, 3].map(attempt);
            let releases =
                [1, 2, 3].map(|sequence| release_of(Acquisition { client: client_id(0), sequence }));
            for commands in [attempts, releases] {
                let calls: Vec<_> = resources.iter().zip(&commands).collect();
                let values = runner.values_of_each(&calls, now);
                let values: Vec<_> = values.into_iter().map(redis::Value::extract_error).collect();
                assert!(values[0].is_ok() && values[2].is_ok(), "{values:?}");
                let error = values[1].as_ref().unwrap_err();
                assert_eq!(error.code(), Some("WRONGTYPE"), "{error}");
            }
            for resource in [&resources[0], &resources[2]] {
                assert_eq!(runner.key_type(resource), "none");
            }
        });
    }
}

/// Releases work, and attempts fail one by one.
#[test]
fn shared_call_with_full_memory() {
    with_scripts(|runner| {
        let now = Now::same(start());
        let held = ["a", "b", "c"].map(resource);
        let attempts = [1, 2, 3].map(attempt);
        let calls: Vec<_> = held.iter().zip(&attempts).collect();
        tokens(&runner.run_each(&calls, now));
        redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(1).exec(runner.commands).unwrap();
        let (free, more) = (["d", "e"].map(resource), [4, 5].map(attempt));
        let calls: Vec<_> = free.iter().zip(&more).collect();
        for value in runner.values_of_each(&calls, now) {
            let error = value.extract_error().unwrap_err();
            assert!(error.to_string().contains("OOM"), "{error}");
        }
        let releases = [1, 2, 3].map(|sequence| release_of(Acquisition { client: client_id(0), sequence }));
        let calls: Vec<_> = held.iter().zip(&releases).collect();
        for answer in runner.run_each(&calls, now) {
            assert_eq!(answer.reply, Reply::Released);
        }
        for resource in held.iter().chain(&free) {
            assert_eq!(runner.key_type(resource), "none");
        }
    });
}

/// The bytes of an acquisition are no pattern, though these could be one that every lease matches; nor are they those of a label.
#[test]
fn shared_release_of_any_bytes_is_that_of_one_lease() {
    with_scripts(|runner| {
        let now = Now::same(start());
        let resources = ["a", "b", "c"].map(resource);
        let attempts = [1, 2, 3].map(|sequence| {
            let Command::Acquire(plain) = attempt(sequence) else { panic!("not an attempt") };
            Command::from(Acquire { metadata: ".".repeat(24).into(), ..(*plain).clone() })
        });
        let calls: Vec<_> = resources.iter().zip(&attempts).collect();
        tokens(&runner.run_each(&calls, now));
        let dots = Acquisition {
            client: ClientId::new(u128::from_be_bytes([b'.'; 16])),
            sequence: u64::from_be_bytes([b'.'; 8]),
        };
        let releases = [release_of(dots), release_of(dots), release_of(dots)];
        let calls: Vec<_> = resources.iter().zip(&releases).collect();
        for answer in runner.run_each(&calls, now) {
            assert_eq!(answer.reply, Reply::NotHeld);
        }
        for resource in &resources {
            assert_eq!(runner.key_type(resource), "string");
        }
    });
}

/// Two attempts at one lock, each of which goes to the rules.
#[test]
fn shared_call_grants_two_shares_of_a_lock_that_has_expired() {
    with_scripts(|runner| {
        let resources = ["a", "x"].map(resource);
        let now = Now::same(start());
        for resource in &resources {
            for (client, weight) in [(0, 3), (1, 1)] {
                runner.run(resource, &acquire_or_queue(client, 1, 3, weight), now);
            }
        }
        let later = Now::same(now.time + Duration::from_secs(11));
        let attempts =
            [(2, 1), (2, 2), (3, 1)].map(|(client, number)| acquire_or_queue(client, number, 3, 1));
        let calls: Vec<_> =
            [&resources[0], &resources[1], &resources[0]].into_iter().zip(&attempts).collect();
        let given = tokens(&runner.run_each(&calls, later));
        assert_eq!(given.iter().collect::<HashSet<_>>().len(), 3, "{given:?}");
    });
}
