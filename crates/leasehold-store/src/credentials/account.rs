//! The credentials for one server: asked for once, shared by all connections of a client, and replaced before they expire.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold_core::Failure;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::{CredentialProvider, CredentialRequest, Credentials};
use crate::StoreError;
use crate::tasks::{self, Tasks};

/// Max time for a call of a provider.
pub const PROVIDER_TIMEOUT: Duration = Duration::from_secs(10);

/// The pause after a provider has failed, at first and at most.
const MIN_RETRY_PAUSE: Duration = Duration::from_millis(250);
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(10);

/// The longest pause while there are no credentials that last. Meanwhile connections fail with the provider's error.
const MAX_URGENT_PAUSE: Duration = Duration::from_secs(2);

/// Credentials are not replaced before they are this old, also if the server refuses them: a provider may give the refused ones again.
const MIN_AGE: Duration = Duration::from_millis(200);

/// Max time within which the connections of a client log in again, one by one.
const MAX_SPREAD: Duration = Duration::from_secs(30);

/// The same for credentials that do not expire.
const SPREAD: Duration = Duration::from_secs(1);

/// A provider, and what it has given a client for each server.
#[derive(Clone)]
pub struct CredentialCache(Arc<Accounts>);

struct Accounts {
    provider: CredentialProvider,
    tasks: Tasks,
    of_servers: Mutex<HashMap<CredentialRequest, Arc<Account>>>,
}

impl CredentialCache {
    /// A cache for the client whose task this is called in.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    #[must_use]
    pub fn new(provider: CredentialProvider) -> Self {
        let (tasks, of_servers) = (Tasks::current(), Mutex::default());
        Self(Arc::new(Accounts { provider, tasks, of_servers }))
    }

    /// The credentials for a server. The provider is not asked yet.
    #[must_use]
    pub fn account(&self, request: CredentialRequest) -> Arc<Account> {
        let mut accounts = self.0.of_servers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(account) = accounts.get(&request) {
            return account.clone();
        }
        // Servers come and go, such as the nodes of a cluster.
        accounts.retain(|_, account| Arc::strong_count(account) > 1 || account.will_expire());
        let account = Arc::new(Account::new(self.0.provider.clone(), self.0.tasks.clone(), request.clone()));
        accounts.insert(request, account.clone());
        account
    }
}

/// Two are equal if they are one.
impl PartialEq for CredentialCache {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for CredentialCache {}

/// The credentials for one server.
pub struct Account {
    provider: CredentialProvider,
    request: CredentialRequest,
    /// Of the client, whose thread outlives any connection.
    tasks: Tasks,
    state: watch::Sender<State>,
    /// Kept by a call until it returns, also if it is given up before.
    running: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Default)]
struct State {
    issued: Option<Issued>,
    /// Why the last call failed, if it did.
    failure: Option<Failed>,
    is_asking: bool,
    /// How many calls have ended.
    calls: u64,
}

struct Failed {
    error: StoreError,
    at: Instant,
    /// Before the provider is asked again.
    pause: Duration,
}

/// What a provider has given.
#[derive(Clone)]
pub struct Issued {
    pub(crate) credentials: Credentials,
    /// Rises with each answer of the provider.
    serial: u64,
    /// How often the provider had been asked for others when it was called.
    refreshes: u64,
    at: Instant,
    /// When others are asked for.
    due: Option<Instant>,
}

impl Issued {
    fn new(credentials: Credentials, serial: u64, refreshes: u64) -> Self {
        let at = Instant::now();
        let due = credentials.expires.map(|expires| {
            let lifetime = expires.saturating_duration_since(at);
            at + lifetime.mul_f64(0.6 + fraction() / 15.0).max(MIN_AGE)
        });
        Self { credentials, serial, refreshes, at, due }
    }

    /// When others are to be asked for.
    fn due(&self, refreshes: u64) -> Option<Instant> {
        if self.refreshes < refreshes { Some(self.at) } else { self.due }
    }

    fn is_valid(&self) -> bool {
        self.credentials.expires.is_none_or(|expires| Instant::now() < expires)
    }

    /// Whether they end by themselves.
    #[must_use]
    pub fn will_expire(&self) -> bool {
        self.credentials.expires.is_some()
    }

    /// A random time after which one of many connections logs in with these.
    #[must_use]
    pub fn spread(&self) -> Duration {
        let lifetime = self.credentials.expires.map(|expires| expires.saturating_duration_since(self.at));
        let most = lifetime.map_or(SPREAD, |lifetime| (lifetime / 10).min(MAX_SPREAD));
        most.mul_f64(fraction())
    }
}

/// A random number between 0 and 1.
fn fraction() -> f64 {
    let random = RandomState::new().hash_one(()) >> 32;
    f64::from(u32::try_from(random).unwrap_or_default()) / f64::from(u32::MAX)
}

impl State {
    /// When a provider that has failed may be asked again.
    fn ask_again_at(&self) -> Option<Instant> {
        let Failed { at, pause, .. } = self.failure.as_ref()?;
        let lasts = self.issued.as_ref().is_some_and(Issued::is_valid);
        Some(*at + if lasts { *pause } else { (*pause).min(MAX_URGENT_PAUSE) })
    }
}

impl Account {
    fn new(provider: CredentialProvider, tasks: Tasks, request: CredentialRequest) -> Self {
        Self { provider, request, tasks, state: watch::Sender::default(), running: Arc::default() }
    }

    fn will_expire(&self) -> bool {
        self.issued().is_some_and(|issued| issued.will_expire() && issued.is_valid())
    }

    fn is_fresh(&self, issued: &Issued) -> bool {
        issued.due(*self.provider.refreshes.borrow()).is_none_or(|due| Instant::now() < due)
    }

    /// What was given last, if anything was.
    pub(crate) fn issued(&self) -> Option<Issued> {
        self.state.borrow().issued.clone()
    }

    /// Credentials for a new connection: those that the provider gave last, unless they have expired. Otherwise it is asked, or its answer
    /// to another connection is waited for, at most for [`PROVIDER_TIMEOUT`].
    ///
    /// # Errors
    ///
    /// The provider fails, and what it gave last has expired.
    pub async fn current(self: &Arc<Self>) -> Result<Issued, StoreError> {
        let known = self.issued();
        match &known {
            Some(issued) if self.is_fresh(issued) => return Ok(issued.clone()),
            // Others are not waited for yet.
            Some(issued) if issued.is_valid() => {
                self.begin();
                return Ok(issued.clone());
            }
            _ => self.ask().await,
        }
        self.newer_than(known.as_ref())
    }

    /// Others than these, which the server refuses: what the provider has given meanwhile, or gives now.
    ///
    /// # Errors
    ///
    /// The provider fails.
    pub async fn replace(self: &Arc<Self>, refused: &Issued) -> Result<Issued, StoreError> {
        if self.newer_than(Some(refused)).is_err() {
            sleep_until(refused.at + MIN_AGE).await;
            self.ask().await;
        }
        self.newer_than(Some(refused))
    }

    /// Waits until there are others than these. The provider is asked for them before these expire, again and again while it fails.
    pub async fn next(self: &Arc<Self>, known: &Issued) -> Issued {
        let (mut state, mut refreshes) = (self.state.subscribe(), self.provider.refreshes.subscribe());
        loop {
            let due = known.due(*refreshes.borrow_and_update());
            let ask_at = {
                let state = state.borrow_and_update();
                match &state.issued {
                    Some(issued) if issued.serial > known.serial => return issued.clone(),
                    _ => due.map(|due| state.ask_again_at().map_or(due, |again| due.max(again))),
                }
            };
            let asking = async {
                match ask_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
                self.ask().await;
            };
            tokio::select! {
                // The account is held here, so that both channels are open.
                _ = state.changed() => {}
                _ = refreshes.changed() => {}
                () = asking => {}
            }
        }
    }

    fn newer_than(&self, known: Option<&Issued>) -> Result<Issued, StoreError> {
        let state = self.state.borrow();
        let serial = known.map_or(0, |issued| issued.serial);
        if let Some(issued) = state.issued.as_ref().filter(|issued| issued.serial > serial) {
            return Ok(issued.clone());
        }
        let failure = state.failure.as_ref().map(|failed| failed.error.clone());
        Err(failure.unwrap_or_else(|| self.failed("the provider has not answered")))
    }

    fn failed(&self, what: impl std::fmt::Display) -> StoreError {
        StoreError::new(Failure::NotSent, format!("no credentials for {}: {what}", self.request))
    }

    /// Has the provider asked, unless it is being asked, and waits for the end of that call.
    async fn ask(self: &Arc<Self>) {
        let mut state = self.state.subscribe();
        if let Some(calls) = self.begin() {
            let _ = state.wait_for(|state| state.calls > calls).await;
        }
    }

    /// Has the provider asked, unless it is being asked, or has just failed: then there is no call to wait for. Returns the number of the
    /// calls before.
    fn begin(self: &Arc<Self>) -> Option<u64> {
        let (mut begins, mut calls) = (false, None);
        self.state.send_if_modified(|state| {
            let may_ask = state.ask_again_at().is_none_or(|at| at <= Instant::now());
            begins = !state.is_asking && may_ask;
            state.is_asking |= begins;
            calls = state.is_asking.then_some(state.calls);
            false
        });
        if begins {
            let refreshes = *self.provider.refreshes.borrow();
            let outcome = Err(self.failed("the client has ended"));
            let mut call = Call { account: self.clone(), refreshes, outcome };
            self.tasks.spawn(async move {
                let outcome = call.account.provide().await;
                drop(std::mem::replace(&mut call.outcome, outcome));
            });
        }
        calls
    }

    async fn provide(&self) -> Result<Credentials, StoreError> {
        let Ok(running) = self.running.clone().try_lock_owned() else {
            return Err(self.failed("an earlier call of the provider has not returned yet"));
        };
        let (provider, request) = (self.provider.clone(), self.request.clone());
        let providing = tasks::apart(move || async move {
            let _running = running;
            timeout(PROVIDER_TIMEOUT, provider.provide(request)).await
        });
        // The provider may block its thread.
        match timeout(PROVIDER_TIMEOUT, providing).await {
            Ok(Ok(Ok(Ok(credentials)))) if credentials.have_expired() => Err(self.failed(
                "what the provider gave has expired already: check the clock of this machine, and a cache of the provider's",
            )),
            Ok(Ok(Ok(Ok(credentials)))) => Ok(credentials),
            Ok(Ok(Ok(Err(error)))) => {
                let failed = self.failed(&error);
                Err(StoreError { cause: Some(error), ..failed })
            }
            Ok(Err(tasks::TaskEnded)) => Err(self.failed("the provider has panicked")),
            Ok(Ok(Err(_))) | Err(_) => {
                Err(self.failed(format_args!("the provider has not answered within {PROVIDER_TIMEOUT:?}")))
            }
        }
    }

    fn end_call(&self, refreshes: u64, outcome: Result<Credentials, StoreError>) {
        // The first after credentials: nothing else fails while these last.
        let mut first_failure = None;
        self.state.send_modify(|state| {
            state.is_asking = false;
            state.calls += 1;
            match outcome {
                Ok(credentials) => {
                    state.issued = Some(Issued::new(credentials, state.calls, refreshes));
                    state.failure = None;
                }
                Err(error) => {
                    if state.failure.is_none() && state.issued.is_some() {
                        first_failure = Some(error.message.clone());
                    }
                    let pause = state.failure.as_ref().map_or(MIN_RETRY_PAUSE, |failed| failed.pause * 2);
                    let pause = pause.min(MAX_RETRY_PAUSE);
                    state.failure = Some(Failed { error, at: Instant::now(), pause });
                }
            }
        });
        if let Some(error) = first_failure {
            tracing::warn!("{error}; the last credentials are used while they last");
        }
    }
}

/// A call of the provider. It ends also if its task does.
struct Call {
    account: Arc<Account>,
    refreshes: u64,
    outcome: Result<Credentials, StoreError>,
}

impl Drop for Call {
    fn drop(&mut self) {
        let ended = Err(self.account.failed("the call has ended"));
        self.account.end_call(self.refreshes, std::mem::replace(&mut self.outcome, ended));
    }
}

#[cfg(test)]
mod tests;
