//! leasehold's own locks, step by step: the machines of its core, its scripts, and a client that goes on when the schedule
//! says so.
//!
//! It is the protocol that is driven here, not the library around it, which has threads and timers of its own. Local
//! hand-off needs no step on a server, and has its own tests.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold::steps;
use leasehold_core::{
    Acquire, AcquireMachine, Acquisition, ClientId, Command, Kind, LeaseMachine, LeaseState, LeaseTerms,
    LocalTime, Name, Outcome, Owner, Release, Reply, Resource, WaitFor, WaitPolicy, lua,
};
use redis::{RedisResult, Value};

use super::plays::{Traits, plays};
use crate::explorer::{CLOCK, Fault, MakeClient, NAMES, PROBE, Scenario, Subject};
use crate::recipe::{Recipe, Role};
use crate::redis::{Hold, Redis, Said, Text, misuse};

/// How long a lease runs.
const TTL: Duration = Duration::from_secs(10);

/// What is changed in the scripts to see whether it is noticed.
pub type Alter = fn(&str) -> String;

/// One of leasehold's locks.
#[derive(Clone, Copy, Debug)]
pub struct Own {
    /// Its name here.
    pub id: &'static str,
    /// What it is.
    pub title: &'static str,
    kind: Kind,
    /// Whether its holders are named.
    has_owners: bool,
    /// Whether it queues, and waits for word.
    pub waits: bool,
}

/// Scripts as they are.
#[must_use]
pub fn unaltered(script: &str) -> String {
    script.to_owned()
}

/// A release that frees whatever is held, whoever held it: what the explorer must catch.
#[must_use]
pub fn releasing_anything(script: &str) -> String {
    script.replace("if form == 1 and id == ARGV[1] and ends > now and", "if form == 1 and ends > now and")
}

/// Grants that are told where nobody listens: what the explorer must catch too.
#[must_use]
pub fn telling_nobody(script: &str) -> String {
    script.replace("redis.call(PUBLISH, ", "redis.call(PUBLISH, 'nobody' .. ")
}

/// Grants with the token of the one before, where no time has passed since: what the explorer must catch too.
#[must_use]
pub fn repeating_tokens(script: &str) -> String {
    script
        .replace("local token = math.max(h.last_token + 1, ", "local token = math.max(h.last_token, ")
        .replace("local token, lasts = math.max(last + 1, ", "local token, lasts = math.max(last, ")
}

/// What is driven.
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
    Own { id: "leasehold-reentrant", title: "`Reentrant`", kind: Kind::Mutex, has_owners: true, waits: true },
];

impl Own {
    /// What is explored. Whoever comes to see does not wait. `alter` gets each script's text.
    #[must_use]
    pub fn subject(self, alter: Alter) -> Subject {
        let text = |script| Text::new(&alter(&steps::text(script, CLOCK)));
        let texts = lua::Script::ALL.map(|script| (script, text(script)));
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
                hears: false,
            })
        });
        Subject { make, lease: |_| Some(TTL.as_secs()), longest: 12, nodes: 1 }
    }

    /// In which scenarios it is explored: those of the recipes, with renewal.
    #[must_use]
    pub fn scenarios(self) -> Vec<Scenario> {
        let faults = &[Fault::ClocksDiffer];
        plays(&Traits {
            has_readers: self.kind == Kind::ReadWrite,
            renews: true,
            reenters: self.has_owners,
            // It does in each try.
            waits: false,
            passes: &[6, 12],
            faults,
        })
    }
}

struct Leasehold {
    redis: Redis,
    /// The scripts.
    texts: Arc<HashMap<lua::Script, Text>>,
    own: Own,
    resource: Resource,
    role: Role,
    client: ClientId,
    owner: Option<Owner>,
    /// The leases that are held, the outermost first.
    held: Vec<LeaseMachine>,
    /// The next attempt's number.
    next: u64,
    /// It hears what is pushed to it.
    hears: bool,
}

impl Leasehold {
    fn now(&self) -> LocalTime {
        LocalTime::from_micros(u64::try_from(self.redis.clock().as_micros()).unwrap_or(0))
    }

    async fn say(&self, command: &Command) -> RedisResult<leasehold_core::Answer> {
        let (script, keys, said) = steps::encode(&self.resource, command);
        let text = self.texts[&script].clone();
        let words: Vec<_> = keys.iter().map(|key| key.as_bytes().to_vec()).chain([said]).collect();
        let said = Said::Script { text, keys: keys.len(), words };
        let value: Value = self.redis.ask(said, shown(command)).await?;
        steps::answer(command, &value).ok_or_else(|| misuse("no version of the script returns that"))
    }

    fn begin(&mut self) -> AcquireMachine {
        let acquisition = Acquisition { client: self.client, sequence: self.next };
        self.next += 1;
        let capacity = if self.own.kind == Kind::ReadWrite { steps::WRITER } else { 1 };
        let is_reader = self.own.kind == Kind::ReadWrite && self.role == Role::Reader;
        let weight = if is_reader { steps::READER } else { capacity };
        let is_in = !self.held.is_empty();
        let waits = self.own.waits && !is_in;
        let command = Acquire {
            acquisition,
            owner: self.owner.clone(),
            capacity,
            weight,
            ttl: TTL,
            reserve: 0,
            wait: waits.then_some(WaitFor { entry_ttl: 8 * TTL, max_queue: 9 }),
            replaces: None,
            metadata: Arc::from(""),
        };
        let repoll_interval = Duration::from_secs(25);
        let patience = waits.then_some(WaitPolicy {
            deadline: LocalTime::NEVER,
            repoll_interval,
            confirms_pushes: false,
        });
        AcquireMachine::new(command, patience, self.now())
    }

    /// Goes on with an attempt until it has ended, or has to wait.
    async fn go_on(&mut self, attempt: &mut AcquireMachine) -> RedisResult<Option<Outcome>> {
        while let Some(command) = attempt.poll_transmit(self.now()) {
            let sent_at = self.now();
            let answer = self.say(&command).await?;
            if matches!(command, Command::Acquire(_)) {
                attempt.handle_answer(sent_at, self.now(), &answer);
            }
        }
        Ok(attempt.poll_outcome())
    }

    /// Waits in the queue, where it waits, until it is granted.
    async fn stand(&mut self, mut attempt: AcquireMachine) -> RedisResult<Outcome> {
        loop {
            if let Some(outcome) = self.go_on(&mut attempt).await? {
                return Ok(outcome);
            }
            let due = attempt.poll_timeout().unwrap_or(LocalTime::NEVER).since(self.now());
            if let Some(message) = self.redis.message(due).await?
                && let Some(push) = steps::push(&message)
            {
                attempt.handle_push(self.now(), &push);
            }
        }
    }

    fn hold(&self, token: Option<u64>) -> Hold {
        let lease = self.held.last().expect("it holds");
        let until = lease.remaining(self.now());
        Hold { valid_until: Some(self.redis.clock() + until), token }
    }
}

impl Recipe for Leasehold {
    async fn try_lock(&mut self) -> RedisResult<Option<Hold>> {
        if self.own.waits && !self.hears {
            self.redis.subscribe(&steps::inbox_of(self.client)).await?;
            self.hears = true;
        }
        let attempt = self.begin();
        let acquisition = attempt.acquisition();
        let outcome = self.stand(attempt).await?;
        let Outcome::Granted { grant, since, trusted_until } = outcome else { return Ok(None) };
        let terms =
            LeaseTerms { ttl: TTL, renews: true, max_hold: None, min_lifetime: Duration::ZERO, replicas: 0 };
        self.held.push(LeaseMachine::new(acquisition, terms, since, grant.valid_for, trusted_until));
        Ok(Some(self.hold(Some(grant.tokens.first.get()))))
    }

    async fn unlock(&mut self) -> RedisResult<bool> {
        let lease = self.held.pop().ok_or_else(|| misuse("it does not hold"))?;
        let release = Release::now(lease.acquisition());
        let answer = self.say(&Command::Release(release)).await?;
        Ok(answer.reply == Reply::Released)
    }

    async fn renew(&mut self) -> RedisResult<Option<Option<Hold>>> {
        let now = self.now();
        let mut lease = self.held.pop().ok_or_else(|| misuse("it does not hold"))?;
        lease.handle_hint(now);
        if let Some(command) = lease.poll_transmit(now) {
            let answer = self.say(&command).await?;
            lease.handle_reply(self.now(), now, &answer.reply);
        }
        let is_lost = matches!(lease.state(self.now()), LeaseState::Lost(_));
        self.held.push(lease);
        if is_lost {
            // The store may still keep what came too late for its holder.
            self.unlock().await?;
            return Ok(Some(None));
        }
        Ok(Some(Some(self.hold(None))))
    }
}

fn shown(command: &Command) -> String {
    let (word, acquisition) = match command {
        Command::Acquire(acquire) if acquire.wait.is_some() => ("acquire, or queue", acquire.acquisition),
        Command::Acquire(acquire) => ("acquire", acquire.acquisition),
        Command::Renew(renew) => ("renew", renew.acquisition),
        Command::Release(release) => ("release", release.acquisition),
        Command::Inspect | Command::ForceRelease => return "look".to_owned(),
    };
    format!("script {word} #{}", acquisition.sequence)
}
