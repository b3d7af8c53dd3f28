//! What every lock and guard of one client shares: its table, its store, and the errors that name both.

use std::fmt;
use std::mem::forget;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{
    Acquire, Answer, Command, Failure, Kind, LocalTime, Loss, Name, NameError, Release, Reply, Resource,
    Token, View,
};
use leasehold_store::credentials::CredentialProvider;
use leasehold_store::process::Own;
use leasehold_store::{Call, Capabilities, HolderMetadata, Store, StoreError};

use crate::engine::Session;
use crate::error::{Error, ErrorKind};
use crate::inspect::{ForeignInfo, HolderInfo, LockInfo};
use crate::options::MIN_TTL;
use crate::telemetry::ClientTelemetry;

const DEFAULT_TTL: Duration = Duration::from_secs(10);
const DEFAULT_MAX_WAITERS: u32 = 100_000;

/// The settings of a client, and of its locks unless they set their own.
#[derive(Clone, Debug)]
pub(crate) struct ClientOptions {
    pub(crate) ttl: Duration,
    pub(crate) max_waiters: u32,
    pub(crate) replicas: u32,
    /// What holders and waiters publish about themselves.
    pub(crate) metadata: HolderMetadata,
    pub(crate) connect_timeout: Option<Duration>,
    pub(crate) close_timeout: Option<Duration>,
    /// Where logins come from, if not from the address.
    pub(crate) provider: Option<CredentialProvider>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            ttl: DEFAULT_TTL,
            max_waiters: DEFAULT_MAX_WAITERS,
            replicas: 0,
            metadata: HolderMetadata::this_process(),
            connect_timeout: None,
            close_timeout: None,
            provider: None,
        }
    }
}

/// The session and the store of one client, shared by its locks and guards.
pub(crate) struct Handle {
    pub(crate) session: Arc<Session>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) capabilities: Capabilities,
    /// The store's address without secrets.
    pub(crate) url: String,
    pub(crate) options: ClientOptions,
    /// What an attempt stores of the metadata among the options.
    pub(crate) encoded_metadata: Arc<str>,
    /// The store keeps the client's part of the metadata once, and not with each attempt.
    keeps_client: bool,
    pub(crate) telemetry: ClientTelemetry,
    /// From the first lock that is bridged.
    bridges: std::sync::OnceLock<crate::bridge::Bridges>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.session.is_forked() {
            forget((self.session.clone(), self.store.clone(), self.telemetry.clone(), self.bridges.take()));
            return;
        }
        self.session.on_handles_dropped();
    }
}

impl Handle {
    pub(crate) fn new(
        session: Arc<Session>,
        store: Arc<dyn Store>,
        url: String,
        options: ClientOptions,
        telemetry: ClientTelemetry,
    ) -> Self {
        let records = store.client_records();
        let keeps_client = records.is_some();
        if let Some(records) = records {
            records.publish(options.metadata.encode_client());
        }
        let encoded_metadata = encode_metadata(&options.metadata, keeps_client);
        let capabilities = store.capabilities();
        Self {
            session,
            store,
            capabilities,
            url,
            options,
            encoded_metadata,
            keeps_client,
            telemetry,
            bridges: std::sync::OnceLock::new(),
        }
    }

    /// The client's bridges to locks of other libraries, of which this is one.
    pub(crate) fn bridges(
        &self,
        foreign: &crate::bridge::Foreign,
    ) -> Result<&crate::bridge::Bridges, StoreError> {
        if let Some(bridges) = self.bridges.get() {
            return Ok(bridges);
        }
        let started = crate::bridge::Bridges::start(self.session.clone(), self.store.clone(), foreign)?;
        // Another task may have been faster; the ones that are not kept have no legs, and end.
        Ok(self.bridges.get_or_init(|| started))
    }

    /// What an attempt with this metadata stores.
    pub(crate) fn encode_metadata(&self, metadata: &HolderMetadata) -> Arc<str> {
        encode_metadata(metadata, self.keeps_client)
    }

    /// The time by the client's clock.
    pub(crate) fn now(&self) -> LocalTime {
        self.session.now()
    }

    /// Runs a command that concerns no attempt or lease of this client.
    pub(crate) async fn ask(&self, resource: Resource, command: Command) -> Result<Answer, Error> {
        self.check_open()?;
        let resource = Arc::new(resource);
        let answered = match self.store.try_call_inline(&resource, &command) {
            Some(answered) => answered,
            None => Own::new(self.store.call(Call::new(resource.clone(), command), 0)).await,
        };
        answered.map_err(|error| self.store_error(&resource, &error))
    }

    /// The state with what the clients in it have published, for the user.
    pub(crate) async fn inspect(&self, resource: Resource) -> Result<LockInfo, Error> {
        let answer = self.ask(resource.clone(), Command::Inspect).await?;
        self.view(&resource, self.add_clients(answer).await)
    }

    /// The answer with what the clients in it have published.
    pub(crate) async fn add_clients(&self, answer: Answer) -> Answer {
        let Some(records) = self.store.client_records() else { return answer };
        let unchanged = answer.clone();
        records.add_to(vec![answer]).await.pop().unwrap_or(unchanged)
    }

    /// The state as it is stored, for those who poll: holders and waiters may lack what their clients have published.
    pub(crate) async fn look_up(&self, resource: Resource) -> Result<LockInfo, Error> {
        let answer = self.ask(resource.clone(), Command::Inspect).await?;
        self.view(&resource, answer)
    }

    /// Fails unless so many replicas have what was read of the resource before. A store waits for them after a write only: this one is a
    /// release of nothing, which would retain the lease. False if there was no answer, so that what was read may be of another master than
    /// the next one is; an error instead if this is the last try.
    pub(crate) async fn confirm_replicated(
        &self,
        resource: Arc<Resource>,
        replicas: u32,
        is_last_try: bool,
    ) -> Result<bool, Error> {
        let release =
            Release { min_hold: Duration::from_millis(1), ..Release::now(self.session.next_acquisition()) };
        let answered = self.store.call(Call::new(resource.clone(), release), replicas).await;
        match answered {
            Ok(_) => Ok(true),
            Err(error) if !is_last_try && error.failure == Failure::Unknown => Ok(false),
            Err(error) => Err(self.store_error(&resource, &error)),
        }
    }

    /// What an answer to `Inspect` shows.
    pub(crate) fn view(&self, resource: &Resource, answer: Answer) -> Result<LockInfo, Error> {
        match answer.reply {
            Reply::View(view) => Ok(LockInfo::new(resource, view, answer.at, self.session.id)),
            Reply::Foreign { expires_at } => {
                let expires_in = expires_at.map(|expires_at| expires_at.since(answer.at));
                let info = LockInfo::new(resource, View::default(), answer.at, self.session.id);
                Ok(LockInfo { foreign: Some(ForeignInfo { expires_in }), ..info })
            }
            reply => Err(self.unexpected(resource, &reply)),
        }
    }

    pub(crate) async fn force_release(&self, resource: Resource) -> Result<Vec<HolderInfo>, Error> {
        let answer = self.ask(resource.clone(), Command::ForceRelease).await?;
        let answer = self.add_clients(answer).await;
        match answer.reply {
            Reply::Forced(holders) => {
                tracing::warn!(%resource, holders = holders.len(), "lock released by force");
                let view = |holder| HolderInfo::new(resource.kind, holder, answer.at, self.session.id);
                Ok(holders.iter().map(view).collect())
            }
            Reply::Foreign { .. } => {
                let what = "its key has a value of another program, which only that program may remove";
                Err(self.error(ErrorKind::Invalid, &resource, what))
            }
            reply => Err(self.unexpected(&resource, &reply)),
        }
    }

    /// Releases the holder with this token, if there is one: all acquisitions of an owner have the same.
    pub(crate) async fn force_release_token(
        &self,
        resource: Resource,
        token: Token,
    ) -> Result<Option<HolderInfo>, Error> {
        let info = self.inspect(resource.clone()).await?;
        let (retained, holders): (Vec<_>, Vec<_>) = info
            .holders
            .into_iter()
            .filter(|holder| holder.token == token)
            .partition(|holder| holder.retained);
        if holders.is_empty() && !retained.is_empty() {
            let what = format!(
                "the holder with the token {token} has released it, and it stays taken for its minimum hold: only a release by \
                 force without a token frees it"
            );
            return Err(self.error(ErrorKind::Invalid, &resource, what));
        }
        let mut released = None;
        for holder in holders {
            let request = Acquire::exclusive(holder.acquisition, holder.expires_in.max(MIN_TTL));
            if let Some(attempts) = self.store.voted_attempts() {
                attempts.attach(&Arc::new(resource.clone()), Arc::new(request), token);
            }
            let release = Command::Release(Release::now(holder.acquisition));
            match self.ask(resource.clone(), release).await?.reply {
                Reply::Released => {
                    tracing::warn!(%resource, %token, "lease released by force");
                    released.get_or_insert(holder);
                }
                // It ended in the meantime.
                Reply::NotHeld | Reply::Dequeued => {}
                reply => return Err(self.unexpected(&resource, &reply)),
            }
        }
        Ok(released)
    }

    pub(crate) fn error(&self, kind: ErrorKind, resource: &Resource, what: impl fmt::Display) -> Error {
        Error::new(kind, format!("{resource} on {}: {what}", self.url))
    }

    pub(crate) fn unavailable(&self, resource: &Resource, message: &str) -> Error {
        self.error(ErrorKind::Unavailable, resource, message)
    }

    /// A command failed without a reply.
    pub(crate) fn store_error(&self, resource: &Resource, error: &StoreError) -> Error {
        Error::from_store(format_args!("{resource} on {}", self.url), error)
    }

    /// `renewal_error`: why a lease that has expired was not renewed.
    pub(crate) fn lost(&self, resource: &Resource, loss: Loss, renewal_error: Option<&StoreError>) -> Error {
        if self.session.is_forked() {
            return self.closed();
        }
        let why = renewal_error.map_or_else(String::new, |error| format!(": {}", error.message));
        self.error(ErrorKind::Lost, resource, format_args!("the lease was lost: {loss}{why}"))
    }

    /// An error if the client was closed.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        if self.session.is_closed() { Err(self.closed()) } else { Ok(()) }
    }

    /// An error if this process was forked since.
    pub(crate) fn check_process(&self) -> Result<(), Error> {
        if self.session.is_forked() { Err(self.closed()) } else { Ok(()) }
    }

    /// The error of a wait that has lost a lease which it needs: that the client was closed, if it was.
    pub(crate) fn closed_or(&self, error: Error) -> Error {
        if error.is_lost() && self.session.is_closed() { self.closed() } else { error }
    }

    /// Why the client can't be used any more.
    pub(crate) fn closed(&self) -> Error {
        if self.session.is_forked() {
            let what = "this process was forked from the one that has connected: connect again here";
            return Error::new(ErrorKind::Forked, format!("the client of {}: {what}", self.url));
        }
        Error::new(ErrorKind::Closed, format!("the client of {} was closed", self.url))
    }

    pub(crate) fn unexpected(&self, resource: &Resource, reply: &Reply) -> Error {
        self.unavailable(resource, &format!("the store sent an unexpected reply: {reply:?}"))
    }
}

fn encode_metadata(metadata: &HolderMetadata, keeps_client: bool) -> Arc<str> {
    if keeps_client { metadata.encode_label() } else { metadata.encode() }
}

/// The resource of this kind and name, if the name is valid.
pub(crate) fn resource_of(kind: Kind, name: &str) -> Result<Resource, NameError> {
    Ok(Resource { kind, name: Name::new(name)? })
}
