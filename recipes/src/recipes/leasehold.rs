//! leasehold's own locks, step by step: the state machines of its core and its scripts, under the explorer's schedule.
//!
//! This covers the protocol, not the library around it, which has threads and timers of its own. A local hand-off takes no
//! step on a server; the library's tests cover it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{
    Acquire, AcquireMachine, Acquisition, ClientId, Command, GrantSecret, Kind, LeaseMachine, LeaseState,
    LeaseTerms, LocalTime, Name, Outcome, Owner, Release, Reply, Resource, SecretKey, WaitFor, WaitPolicy,
};
use leasehold_redis_protocol::{
    Expectation, Script, ScriptVariant, VIRTUAL_TIME, VoteArgs, decode_answer, decode_push, inbox_of, weight,
};
use redis::{RedisResult, Value};

use super::scenarios::{Traits, scenarios};
use crate::explorer::{CLOCK, Fault, MakeClient, NAMES, PROBE, Scenario, Subject};
use crate::recipe::{Recipe, Role};
use crate::redis::{Hold, Redis, Request, Text, misuse};

/// The lease.
const TTL: Duration = Duration::from_secs(10);

/// Changes a script, to verify that the explorer catches the damage.
pub type Modify = fn(&str) -> String;

/// One of leasehold's locks.
#[derive(Clone, Copy, Debug)]
pub struct Own {
    /// Its id.
    pub id: &'static str,
    /// Its type or method.
    pub title: &'static str,
    kind: Kind,
    /// Whether its holders have an owner.
    has_owners: bool,
    /// Whether it queues and waits for a push.
    pub waits: bool,
}

/// Leaves the scripts unchanged.
#[must_use]
pub fn unmodified(script: &str) -> String {
    script.to_owned()
}

/// A release that does not compare its acquisition with the holder's: the explorer must catch it.
#[must_use]
pub fn releasing_any_holder(script: &str) -> String {
    script.replace("raw and string.sub(raw, 1, #released) == released", "raw")
}

/// A grant that is published to the wrong channel: the explorer must catch it.
#[must_use]
pub fn publishing_to_wrong_channel(script: &str) -> String {
    script.replace("call('PUBLISH', ", "call('PUBLISH', 'wrong' .. ")
}

/// A grant with the token of the previous one if no time has passed: the explorer must catch it.
#[must_use]
pub fn repeating_tokens(script: &str) -> String {
    script
        .replace("      return id\n", "      return string.match(id, '^%d+-') .. '0'\n")
        .replace("math.max(next_one, h.last_token + 1, floor)", "next_one - next_one % TOKENS_PER_MS")
}

/// All of them.
pub const OWN: [Own; 4] = [
    Own { id: "leasehold-mutex", title: "`Mutex`", kind: Kind::Mutex, has_owners: false, waits: true },
    Own {
        id: "leasehold-try",
        title: "`Mutex::try_lock`",
        kind: Kind::Mutex,
        has_owners: false,
        waits: false,
    },
    Own { id: "leasehold-rw", title: "`RwLock`", kind: Kind::ReadWrite, has_owners: false, waits: true },
    Own {
        id: "leasehold-reentrant",
        title: "`ReentrantMutex`",
        kind: Kind::Mutex,
        has_owners: true,
        waits: true,
    },
];

impl Own {
    /// This lock as the lock under test. The probe does not wait. `modify` receives the source of each script.
    #[must_use]
    pub fn subject(self, modify: Modify) -> Subject {
        let text =
            |script| Text::new(&[CLOCK, VIRTUAL_TIME, &modify(&ScriptVariant::Server.text(script))].concat());
        let texts = Script::ALL.map(|script| (script, text(script)));
        let texts: Arc<HashMap<_, _>> = Arc::new(texts.into());
        let make: MakeClient = Arc::new(move |redis, role, who| {
            let client = ClientId::new(1 + u128::try_from(who).unwrap_or(0));
            let owner = self.has_owners.then(|| Owner::new(NAMES[who]));
            let Ok(name) = Name::new("lock") else { unreachable!("it is a name") };
            let resource = Resource { kind: self.kind, name };
            let waits = self.waits && who < PROBE;
            let own = Own { waits, ..self };
            Box::new(Leasehold {
                redis,
                texts: texts.clone(),
                own,
                resource,
                role,
                client,
                owner,
                held: Vec::new(),
                next: 1,
                is_subscribed: false,
            })
        });
        Subject { make, lease: |_| Some(TTL.as_secs()), longest: 12, nodes: 1 }
    }

    /// The scenarios in which it is explored: those of the recipes, with renewal.
    #[must_use]
    pub fn scenarios(self) -> Vec<Scenario> {
        let faults = &[Fault::ClocksDiffer];
        scenarios(&Traits {
            has_readers: self.kind == Kind::ReadWrite,
            renews: true,
            reenters: self.has_owners,
            // It waits within each attempt.
            waits: false,
            passes: &[6, 12],
            faults,
        })
    }
}

struct Leasehold {
    redis: Redis,
    texts: Arc<HashMap<Script, Text>>,
    own: Own,
    resource: Resource,
    role: Role,
    client: ClientId,
    owner: Option<Owner>,
    /// The leases held, the outermost first.
    held: Vec<LeaseMachine>,
    /// The next attempt's number.
    next: u64,
    is_subscribed: bool,
}

impl Leasehold {
    fn now(&self) -> LocalTime {
        LocalTime::from_micros(u64::try_from(self.redis.clock().as_micros()).unwrap_or(0))
    }

    async fn send(&self, command: &Command) -> RedisResult<leasehold_core::Answer> {
        let call = ScriptVariant::Server.encode(
            &self.resource,
            command,
            VoteArgs::default(),
            Expectation::default(),
        );
        let text = self.texts[&call.script()].clone();
        let words: Vec<_> = call.keys().chain(call.args()).map(<[u8]>::to_vec).collect();
        let request = Request::Script { text, keys: call.keys().len(), words };
        let value: Value = self.redis.send(request, display_value(command)).await?;
        decode_answer(command, &value).map_err(|_| misuse("a reply of another layout version"))
    }

    fn begin(&mut self) -> AcquireMachine {
        let acquisition = Acquisition { client: self.client, sequence: self.next };
        self.next += 1;
        let capacity = if self.own.kind == Kind::ReadWrite { weight::WRITER } else { 1 };
        let is_reader = self.own.kind == Kind::ReadWrite && self.role == Role::Reader;
        let weight = if is_reader { weight::READER } else { capacity };
        let is_in = !self.held.is_empty();
        let waits = self.own.waits && !is_in;
        let command = Acquire {
            acquisition,
            inbox: None,
            owner: self.owner.clone(),
            capacity,
            weight,
            ttl: TTL,
            reserve: 0,
            wait: waits.then_some(WaitFor { entry_ttl: 8 * TTL, max_queue: 9 }),
            replaces: None,
            secret: GrantSecret::UNUSED,
            metadata: Arc::from(""),
        };
        let repoll_interval = Duration::from_secs(25);
        let patience = waits.then_some(WaitPolicy {
            deadline: LocalTime::NEVER,
            repoll_interval,
            confirms_pushes: false,
            secret_key: SecretKey::new(!self.client.get()),
        });
        AcquireMachine::new(command, patience, self.now())
    }

    /// Steps an attempt until it has an outcome or must wait.
    async fn advance(&mut self, attempt: &mut AcquireMachine) -> RedisResult<Option<Outcome>> {
        while let Some(command) = attempt.poll_transmit(self.now()) {
            let sent_at = self.now();
            let answer = self.send(&command).await?;
            if matches!(command, Command::Acquire(_)) {
                attempt.handle_answer(sent_at, self.now(), &answer);
            }
        }
        Ok(attempt.poll_outcome())
    }

    /// Steps an attempt, and waits for pushes, until it has an outcome.
    async fn complete(&mut self, mut attempt: AcquireMachine) -> RedisResult<Outcome> {
        loop {
            if let Some(outcome) = self.advance(&mut attempt).await? {
                return Ok(outcome);
            }
            let due = attempt.poll_timeout().unwrap_or(LocalTime::NEVER).since(self.now());
            if let Some(message) = self.redis.message(due).await?
                && let Ok(push) = decode_push(self.client, &message)
            {
                attempt.handle_push(self.now(), &push);
            }
        }
    }

    fn hold(&self, token: Option<u64>) -> Hold {
        let lease = self.held.last().expect("the client holds the lock");
        let until = lease.remaining(self.now());
        Hold { valid_until: Some(self.redis.clock() + until), token }
    }
}

impl Recipe for Leasehold {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        if self.own.waits && !self.is_subscribed {
            self.redis.subscribe(&inbox_of(self.client, None)).await?;
            self.is_subscribed = true;
        }
        let attempt = self.begin();
        let acquisition = attempt.acquisition();
        let outcome = self.complete(attempt).await?;
        let Outcome::Granted { grant, since, trusted_until } = outcome else { return Ok(None) };
        let terms =
            LeaseTerms { ttl: TTL, renews: true, max_hold: None, min_lifetime: Duration::ZERO, replicas: 0 };
        self.held.push(LeaseMachine::new(acquisition, terms, since, grant.valid_for, trusted_until, false));
        Ok(Some(self.hold(Some(grant.tokens.first.get()))))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        let lease = self.held.pop().ok_or_else(|| misuse("the client does not hold the lock"))?;
        let release = Release::now(lease.acquisition());
        let answer = self.send(&Command::Release(release)).await?;
        Ok(answer.reply == Reply::Released)
    }

    async fn renew(&mut self) -> RedisResult<Option<Option<Hold>>> {
        let now = self.now();
        let mut lease = self.held.pop().ok_or_else(|| misuse("the client does not hold the lock"))?;
        lease.handle_hint(now);
        if let Some(command) = lease.poll_transmit(now) {
            let answer = self.send(&command).await?;
            lease.handle_reply(self.now(), now, &answer.reply);
        }
        let is_lost = matches!(lease.state(self.now()), LeaseState::Lost(_));
        self.held.push(lease);
        if is_lost {
            // The store may have renewed a lease that its holder has given up.
            self.unlock().await?;
            return Ok(Some(None));
        }
        Ok(Some(Some(self.hold(None))))
    }
}

fn display_value(command: &Command) -> String {
    let (word, acquisition) = match command {
        Command::Acquire(acquire) if acquire.wait.is_some() => ("acquire or queue", acquire.acquisition),
        Command::Acquire(acquire) => ("acquire", acquire.acquisition),
        Command::Renew(renew) => ("renew", renew.acquisition),
        Command::Release(release) => ("release", release.acquisition),
        Command::Inspect | Command::ForceRelease => return "inspect".to_owned(),
    };
    format!("script {word} #{}", acquisition.sequence)
}
