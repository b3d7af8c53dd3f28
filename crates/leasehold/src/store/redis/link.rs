//! The way to one server: a connection that is there, or that is being made again.
//!
//! A link has a keeper, a task on the client's own thread that connects, tells everybody, waits until the connection is
//! lost, and connects again, with pauses that grow. What came over a connection that was given up is not believed.
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
use tokio::time::{Instant, timeout};

use super::express::{CallersRuntime, Express};
use super::lanes::{Fate, Hear, Lanes, config, ear, listen};
use super::sentinel::Sentinels;
use super::trouble::{explain, store_error};
use super::{ANSWER_LIMIT, CONNECT_LIMIT, greeting};
use crate::store::StoreError;

/// The pauses between attempts to connect again.
pub(super) const PAUSES: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(50)..=Duration::from_secs(2);

/// A connection that has lasted this long is made again without a pause.
const LASTING: Duration = Duration::from_secs(5);

/// Where a link leads.
pub(super) enum Goal {
    Server(ConnectionInfo),
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
    /// The connection is new: what was told meanwhile was missed.
    pub(super) renewed: Renewed,
    /// There is no connection: perhaps the server has been replaced.
    pub(super) missed: Arc<dyn Fn() + Send + Sync>,
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
        let doubt = Arc::new(Notify::new());
        let is_resp2 = terms.is_resp2;
        let keeper = Keeper { goal, terms, is_resp2, state: tell, doubt: doubt.clone() };
        Self { state, doubt, keeper: tokio::spawn(keeper.keep()).abort_handle() }
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
        let limit = match &*self.state.borrow() {
            State::Up(lanes) => return Ok(lanes.clone()),
            State::Down(error) => return Err(error.clone()),
            // The first time it may take longer, as connecting may.
            State::Dialing { is_first: true } => CONNECT_LIMIT,
            State::Dialing { is_first: false } => ANSWER_LIMIT,
        };
        let mut state = self.state.clone();
        let decided = state.wait_for(|state| !matches!(state, State::Dialing { .. }));
        match Box::pin(timeout(limit, decided)).await.map(|found| found.map(|state| state.clone())) {
            Ok(Ok(State::Up(lanes))) => Ok(lanes),
            Ok(Ok(State::Down(error))) => Err(error),
            _ => Err(not_sent(no_answer(limit))),
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
}

impl Drop for Link {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

const CLOSED_AT_ONCE: &str = "the server closes new connections: it may have as many clients as it may (maxclients), or \
                              speak TLS only";

fn no_answer(limit: Duration) -> String {
    format!("no answer within {limit:?}: check the host and the port, and whether it is one for TLS")
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
        let mut is_first = true;
        loop {
            let dialed = match timeout(CONNECT_LIMIT, self.dial()).await {
                Ok(dialed) => dialed,
                Err(_) => Err(not_sent(no_answer(CONNECT_LIMIT))),
            };
            match dialed {
                Ok(lanes) => {
                    let began = Instant::now();
                    self.state.send_replace(State::Up(lanes.clone()));
                    if !is_first {
                        (self.terms.renewed)(&|_| true);
                    }
                    is_first = false;
                    self.until_lost(&lanes).await;
                    tracing::warn!("the connection was lost");
                    lanes.give_up();
                    self.state.send_replace(State::Dialing { is_first: false });
                    (self.terms.missed)();
                    // One that is lost as soon as it is there is no better than none.
                    if began.elapsed() > LASTING {
                        pause = *PAUSES.start();
                        continue;
                    }
                }
                Err(error) => {
                    tracing::debug!(error.message, "not connected yet");
                    self.state.send_replace(State::Down(error));
                    (self.terms.missed)();
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(*PAUSES.end());
        }
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
        let fate = Arc::new(Fate::new(self.doubt.clone()));
        let mut tasks = JoinSet::new();
        let info = match &self.goal {
            Goal::Server(info) => info.clone(),
            Goal::Master(sentinels) => {
                let (master, info) = sentinels.find_master().await?;
                let (sentinels, fate) = (sentinels.clone(), fate.clone());
                tasks.spawn(async move {
                    sentinels.until_switched(master).await;
                    fate.end();
                });
                info
            }
        };
        loop {
            match self.dial_server(&info, &fate, &mut tasks).await {
                Ok(lanes) => {
                    lanes.own(tasks);
                    return Ok(lanes);
                }
                Err(error) if is_resp3_unknown(&error) && !self.is_resp2 => {
                    self.is_resp2 = true;
                }
                Err(error) if error.is_connection_dropped() && !error.is_connection_refusal() => {
                    return Err(not_sent(CLOSED_AT_ONCE.to_owned()));
                }
                Err(error) => return Err(store_error(&error)),
            }
        }
    }

    async fn dial_server(
        &self,
        info: &ConnectionInfo,
        fate: &Arc<Fate>,
        tasks: &mut JoinSet<()>,
    ) -> Result<Arc<Lanes>, RedisError> {
        let client = redis::Client::open(with_protocol(info, self.is_resp2))?;
        let config = config();
        let hear = self.terms.hear.clone();
        let config =
            if self.is_resp2 { config } else { config.set_push_sender(ear(hear.clone(), fate.clone())) };
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
        let server = greeting::greet(&mut home, &*self.terms.warn).await?;
        if self.terms.is_voter && server.is_none() {
            let error = greeting::run_id_unknown(info.redis_settings().username());
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
        Ok(lanes)
    }
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
