//! The way to one server: a connection that is there, or that is being made again.
//!
//! A link has a keeper, a task on the client's own thread that connects, tells everybody, waits until the connection is
//! lost, and connects again; while that fails, with pauses that grow. What came over a connection that was given up is not
//! believed, and pushes over a new one only count once everybody knows that it is new: it may lead to another server, with
//! another clock.
//!
//! There are two lanes. The *home* connection belongs to the client's thread. The *express* connection belongs to the runtime
//! that the client was made in, where there is one (`express`). It is a convenience; everything also works without it, so
//! that renewals depend on nobody's runtime.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Failure, Resource};
use redis::{ConnectionInfo, ErrorKind, ProtocolVersion, RedisError};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::caller_conn::{CallersRuntime, Express};
use super::connections::{Fate, Hear, Lanes, config, ear, listen};
use super::error::{AddressState, explain};
use super::sentinel::Sentinels;
use super::{ANSWER_LIMIT, CONNECT_LIMIT, handshake};
use crate::store::StoreError;

/// The pauses between attempts to connect that fail.
pub(super) const PAUSES: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(50)..=Duration::from_secs(2);

/// Attempts to connect begin no closer together than this, however soon a connection is lost and whoever is in a hurry. It
/// bounds what a server has to bear that closes every connection.
const SPACING: Duration = Duration::from_millis(200);

/// The least that an attempt to connect again may take.
const LEAST_DIAL: Duration = Duration::from_millis(500);

/// An attempt to connect again may take this part of the shortest ttl at stake, so that several fit into what is left of it.
const DIAL_PART: u32 = 4;

/// An attempt to connect again may take this many times what the last one took that succeeded.
const DIAL_SLOWER: u32 = 4;

/// Where a link leads.
pub(super) enum Goal {
    Server(ConnectionInfo),
    /// A server that others have named.
    Node(ConnectionInfo),
    Master(Sentinels),
}

/// Called when what was told about resources, those that this is true of, was missed.
pub(super) type Renewed = Arc<dyn Fn(&dyn Fn(&Resource) -> bool) + Send + Sync>;

/// What a link does besides carrying commands.
pub(super) struct Terms {
    /// Subscribed to as soon as a connection is there.
    pub(super) channel: Option<String>,
    /// What to do with a channel's message.
    pub(super) hear: Hear,
    /// The connection is new, or the server was emptied: what was told meanwhile was missed, or is void.
    pub(super) renewed: Renewed,
    /// There is no connection: perhaps the server has been replaced.
    pub(super) missed: Arc<dyn Fn() + Send + Sync>,
    /// The shortest ttl of the leases that are held.
    pub(super) at_stake: Arc<dyn Fn() -> Option<Duration> + Send + Sync>,
    /// What an operator should know about the server.
    pub(super) warn: Arc<dyn Fn(String) + Send + Sync>,
    /// Of the runtime that the client was made in.
    pub(super) caller: Option<Handle>,
    pub(super) is_resp2: bool,
    pub(super) runtime: Arc<CallersRuntime>,
    /// The server votes, so no connection counts that does not tell its run id.
    pub(super) is_voter: bool,
}

pub(super) struct Link {
    state: watch::Receiver<State>,
    doubt: Arc<Notify>,
    hurry: Arc<Notify>,
    keeper: AbortHandle,
}

#[derive(Clone)]
enum State {
    Dialing {
        is_first: bool,
    },
    /// The last attempt failed like this.
    Down(StoreError),
    Up(Arc<Lanes>),
}

impl Link {
    /// Begins to connect. Runs on the client's own runtime.
    pub(super) fn new(goal: Goal, terms: Terms) -> Self {
        let (tell, state) = watch::channel(State::Dialing { is_first: true });
        let (doubt, hurry) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let is_resp2 = terms.is_resp2;
        let keeper = Keeper {
            goal,
            terms,
            is_resp2,
            state: tell,
            doubt: doubt.clone(),
            hurry: hurry.clone(),
            usual: None,
        };
        Self { state, doubt, hurry, keeper: tokio::spawn(keeper.keep()).abort_handle() }
    }

    /// The connections, if they are there now.
    pub(super) fn lanes_now(&self) -> Option<Arc<Lanes>> {
        match &*self.state.borrow() {
            State::Up(lanes) => Some(lanes.clone()),
            State::Dialing { .. } | State::Down(_) => None,
        }
    }

    /// The connections, once they are there. An error says that nothing was sent.
    pub(super) async fn lanes(&self) -> Result<Arc<Lanes>, StoreError> {
        let (limit, address) = match &*self.state.borrow() {
            State::Up(lanes) => return Ok(lanes.clone()),
            State::Down(error) => return Err(error.clone()),
            // The first time it may take longer, as connecting may.
            State::Dialing { is_first: true } => (CONNECT_LIMIT, AddressState::Unproven),
            State::Dialing { is_first: false } => (ANSWER_LIMIT, AddressState::Proven),
        };
        let mut state = self.state.clone();
        let decided = state.wait_for(|state| !matches!(state, State::Dialing { .. }));
        match Box::pin(timeout(limit, decided)).await.map(|found| found.map(|state| state.clone())) {
            Ok(Ok(State::Up(lanes))) => Ok(lanes),
            Ok(Ok(State::Down(error))) => Err(error),
            _ => Err(not_sent(address.no_answer(limit))),
        }
    }

    /// One of these lanes' connections was lost: waits until it is known whether the other one is too, and what has become
    /// of the link then; not for long.
    pub(super) async fn settled(&self, lanes: &Arc<Lanes>) {
        if !lanes.is_over() && lanes.answers().await {
            return;
        }
        self.doubt();
        let mut state = self.state.clone();
        let is_settled = |state: &State| match state {
            State::Dialing { .. } => false,
            State::Down(_) => true,
            State::Up(now) => !Arc::ptr_eq(now, lanes),
        };
        let _ = timeout(ANSWER_LIMIT, state.wait_for(is_settled)).await;
    }

    /// The server is not the master any more: another one is looked for.
    pub(super) fn seek(&self) {
        if let Some(lanes) = self.lanes_now() {
            lanes.give_up();
        }
    }

    /// Something suggests that the connection may not be any good: it is looked at.
    pub(super) fn doubt(&self) {
        self.doubt.notify_one();
    }

    /// A lease is to be renewed and there is no connection: the next attempt to connect does not wait for its pause.
    pub(super) fn hurry(&self) {
        self.hurry.notify_one();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

/// What a connection that is closed before its first answer may mean.
fn closed_at_once(address: AddressState) -> String {
    let what = "the server closes new connections: it may have as many clients as it may (maxclients)";
    match address {
        AddressState::Unproven => format!("{what}, or speak TLS only"),
        AddressState::Proven => what.to_owned(),
    }
}

fn not_sent(message: String) -> StoreError {
    StoreError { failure: Failure::NotSent, message }
}

/// What keeps a link connected.
struct Keeper {
    goal: Goal,
    terms: Terms,
    /// The server has nothing newer, or the caller wants nothing newer.
    is_resp2: bool,
    state: watch::Sender<State>,
    doubt: Arc<Notify>,
    hurry: Arc<Notify>,
    /// How long it took to connect the last time; none before the first time.
    usual: Option<Duration>,
}

impl Drop for Keeper {
    /// With the client's thread. Whoever still has the link is not to keep the connections with it.
    fn drop(&mut self) {
        self.state.send_replace(State::Down(not_sent("the client was closed".to_owned())));
    }
}

impl Keeper {
    async fn keep(mut self) {
        let mut pause = *PAUSES.start();
        let mut failures = 0_u32;
        loop {
            let began = Instant::now();
            let limit = dial_limit(self.usual, (self.terms.at_stake)());
            let dialed = match timeout(limit, self.dial()).await {
                Ok(dialed) => dialed,
                Err(_) => Err(not_sent(self.address().no_answer(limit))),
            };
            match dialed {
                Ok(lanes) => {
                    let is_first = self.usual.replace(began.elapsed()).is_none();
                    failures = 0;
                    self.publish(&lanes, is_first);
                    self.until_lost(&lanes).await;
                    tracing::warn!("the connection was lost");
                    lanes.give_up();
                    self.state.send_replace(State::Dialing { is_first: false });
                    (self.terms.missed)();
                    // The server has answered, so this is no reason to wait for long.
                    pause = *PAUSES.start();
                    sleep_until(began + SPACING).await;
                }
                Err(error) => {
                    tracing::debug!(error.message, "not connected yet");
                    failures = failures.saturating_add(1);
                    // Whatever cut a connection may have cut the next one too: that alone fails no command.
                    if failures > 1 || self.usual.is_none() {
                        self.state.send_replace(State::Down(error));
                    }
                    (self.terms.missed)();
                    let hurried = async {
                        self.hurry.notified().await;
                        sleep_until(began + SPACING).await;
                    };
                    tokio::select! {
                        () = sleep(pause) => {}
                        () = hurried => {}
                    }
                    pause = (pause * 2).min(*PAUSES.end());
                }
            }
        }
    }

    /// Without a pause for anything else on this thread: nothing can be heard, asked or answered in between.
    ///
    /// What waits has measured time by the last server that it heard from, which may have been another one. So that it does
    /// not measure a push from this one by that, it is told of the new connection before any push counts; and it asks again,
    /// so what was pushed before that is not missed.
    fn publish(&self, lanes: &Arc<Lanes>, is_first: bool) {
        if !is_first {
            (self.terms.renewed)(&|_| true);
        }
        lanes.begin_to_hear();
        self.state.send_replace(State::Up(lanes.clone()));
    }

    fn address(&self) -> AddressState {
        let is_proven = self.usual.is_some() || matches!(self.goal, Goal::Node(_));
        if is_proven { AddressState::Proven } else { AddressState::Unproven }
    }

    /// Waits until the connection is lost, or does not answer when there is doubt about it.
    async fn until_lost(&self, lanes: &Lanes) {
        loop {
            self.doubt.notified().await;
            if lanes.is_over() {
                return;
            }
            let mut home = lanes.home();
            if home.send_packed_command(&redis::cmd("PING")).await.is_err_and(|error| error.code().is_none())
            {
                return;
            }
        }
    }

    async fn dial(&mut self) -> Result<Arc<Lanes>, StoreError> {
        let sentinels = match &self.goal {
            Goal::Server(info) | Goal::Node(info) => {
                let info = info.clone();
                return self.dial_either(&info, self.address()).await;
            }
            Goal::Master(sentinels) => sentinels.clone(),
        };
        loop {
            let (master, info) = sentinels.find_master(self.address()).await?;
            let mut switched = Box::pin(sentinels.clone().until_switched(master.clone()));
            let connected = async {
                // The sentinels know this address, whether it has ever answered or not.
                let lanes = self.dial_either(&info, AddressState::Proven).await.map_err(|error| {
                    StoreError { message: format!("the master {}: {}", info.addr(), error.message), ..error }
                })?;
                sentinels.confirm(&master, &mut lanes.home()).await.map(|()| lanes)
            };
            tokio::select! {
                lanes = connected => {
                    let lanes = lanes?;
                    lanes.end_after(switched);
                    return Ok(lanes);
                }
                // It may be frozen, which is no reason to wait for it.
                () = &mut switched => {}
            }
        }
    }

    /// By the newest protocol that the server has.
    async fn dial_either(
        &mut self,
        info: &ConnectionInfo,
        address: AddressState,
    ) -> Result<Arc<Lanes>, StoreError> {
        loop {
            match self.dial_server(info).await {
                Ok(lanes) => return Ok(lanes),
                Err(error) if is_resp3_unknown(&error) && !self.is_resp2 => {
                    self.is_resp2 = true;
                }
                Err(error) if error.is_connection_dropped() && !error.is_connection_refusal() => {
                    return Err(not_sent(closed_at_once(address)));
                }
                Err(error) => return Err(address.store_error(&error)),
            }
        }
    }

    async fn dial_server(&self, info: &ConnectionInfo) -> Result<Arc<Lanes>, RedisError> {
        let fate = Arc::new(Fate::new(self.doubt.clone()));
        let mut tasks = JoinSet::new();
        let client = redis::Client::open(with_protocol(info, self.is_resp2))?;
        let config = config();
        let hear = self.terms.hear.clone();
        let config = if self.is_resp2 {
            config
        } else {
            config.set_push_sender(ear(hear.clone(), self.terms.renewed.clone(), fate.clone()))
        };
        let mut home = client.get_multiplexed_async_connection_with_config(&config).await?;
        if let Some(channel) = &self.terms.channel {
            if self.is_resp2 {
                let mut inbox = client.get_async_pubsub().await?;
                inbox.subscribe(channel).await?;
                tasks.spawn(listen(inbox, hear.clone(), fate.clone()));
            } else {
                home.subscribe(channel).await?;
            }
        }
        let server = handshake::greet(&mut home, self.is_resp2, &*self.terms.warn).await?;
        if self.terms.is_voter && server.is_none() {
            let error = handshake::run_id_unknown(info.redis_settings().username());
            (self.terms.warn)(explain(&error));
            return Err(error);
        }
        let caller = self.terms.caller.as_ref().map(Handle::id);
        let lanes = Arc::new(Lanes::new(
            home,
            fate.clone(),
            caller,
            client.clone(),
            server.clone().unwrap_or_default(),
        ));
        // With the older protocol nobody would notice that it is lost.
        if let Some(caller) = self.terms.caller.as_ref().filter(|_| !self.is_resp2) {
            let express = Express {
                client,
                caller: caller.clone(),
                lanes: Arc::downgrade(&lanes),
                fate: fate.clone(),
                hear,
                channel: self.terms.channel.clone(),
                server,
                runtime: self.terms.runtime.clone(),
            };
            tasks.spawn(express.keep());
        }
        lanes.own(tasks);
        Ok(lanes)
    }
}

/// How long an attempt to connect may take, where the last one took `usual`. An attempt that began while nothing reached the
/// server stays lost when that is over, so a long one costs leases.
fn dial_limit(usual: Option<Duration>, shortest_ttl: Option<Duration>) -> Duration {
    let Some(usual) = usual else { return CONNECT_LIMIT };
    let at_stake = shortest_ttl.map_or(CONNECT_LIMIT, |ttl| ttl / DIAL_PART);
    at_stake.max(usual.saturating_mul(DIAL_SLOWER)).clamp(LEAST_DIAL, CONNECT_LIMIT)
}

/// The server is older than the protocol. What it says then repeats what it was told, the password included.
fn is_resp3_unknown(error: &RedisError) -> bool {
    let text = error.to_string().to_lowercase();
    error.kind() == ErrorKind::RESP3NotSupported || text.contains("unknown command") && text.contains("hello")
}

fn with_protocol(info: &ConnectionInfo, is_resp2: bool) -> ConnectionInfo {
    let protocol = if is_resp2 { ProtocolVersion::RESP2 } else { ProtocolVersion::RESP3 };
    let settings = info.redis_settings().clone().set_protocol(protocol);
    info.clone().set_redis_settings(settings)
}

#[cfg(test)]
mod tests;
