//! One attempt to acquire a lock of any kind.

use std::time::Duration;

use leasehold::{Client, Error, Kind};
use serde::Deserialize;

use crate::leases::Held;
use crate::problem::{Code, Problem};

/// The mode of a read-write lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum RequestedMode {
    Read,
    Write,
}

/// What a request asks for.
pub(super) struct Attempt<'a> {
    pub(super) kind: Kind,
    pub(super) name: &'a str,
    pub(super) ttl: Duration,
    /// Whether the server renews the lease.
    pub(super) renews: bool,
    pub(super) label: Option<String>,
    pub(super) mode: Option<RequestedMode>,
    pub(super) permits: Option<u32>,
    pub(super) capacity: Option<u32>,
    pub(super) owner: Option<String>,
}

/// The lock with the options that all kinds have.
macro_rules! with_options {
    ($attempt:expr, $lock:expr) => {{
        let lock = $lock.ttl($attempt.ttl).auto_renew($attempt.renews);
        match &$attempt.label {
            Some(label) => lock.label(label.as_str()),
            None => lock,
        }
    }};
}

impl Attempt<'_> {
    /// Checks that the kind has leases, and that it has the options of the request.
    pub(super) fn check(&self) -> Result<(), Problem> {
        let unsupported = |what: String| Err(Problem::new(Code::Unsupported, what));
        if matches!(self.kind, Kind::Latch | Kind::Barrier) {
            let known = "mutex, semaphore, rw and election";
            return unsupported(format!("a {} has no leases over HTTP; {known} have", self.kind));
        }
        for (option, is_given, kind) in [
            ("mode", self.mode.is_some(), Kind::ReadWrite),
            ("permits", self.permits.is_some(), Kind::Semaphore),
            ("capacity", self.capacity.is_some(), Kind::Semaphore),
            ("owner", self.owner.is_some(), Kind::Mutex),
        ] {
            if is_given && self.kind != kind {
                return unsupported(format!("only the kind {kind} has the option `{option}`"));
            }
        }
        if self.kind == Kind::Semaphore && self.capacity.is_none() {
            let what = "a semaphore needs `capacity`, the same in all requests";
            return Err(Problem::new(Code::InvalidRequest, what));
        }
        Ok(())
    }

    /// Acquires the lock: at once if `wait` is zero.
    ///
    /// A mutex is not handed from one request to the next within this server. Each request has its own place in the store's
    /// queue, so that the order is the same for all servers and clients, and every waiter is shown.
    pub(super) async fn run(&self, client: &Client, wait: Duration) -> Result<Option<Held>, Error> {
        let is_now = wait.is_zero();
        let guard = match self.kind {
            Kind::Mutex => match &self.owner {
                None => {
                    let lock = with_options!(self, client.mutex(self.name).global_fifo());
                    if is_now { lock.try_lock().await? } else { lock.lock_timeout(wait).await? }
                }
                Some(owner) => {
                    let lock = with_options!(self, client.reentrant_mutex(self.name, owner));
                    if is_now { lock.try_lock().await? } else { lock.lock_timeout(wait).await? }
                }
            },
            Kind::Semaphore => {
                let permits = self.permits.unwrap_or(1);
                let lock = with_options!(self, client.semaphore(self.name, self.capacity.unwrap_or(1)));
                if is_now {
                    lock.try_acquire(permits).await?
                } else {
                    lock.acquire_timeout(permits, wait).await?
                }
            }
            Kind::Election => {
                let lock = with_options!(self, client.election(self.name));
                if is_now { lock.try_campaign().await? } else { lock.campaign_timeout(wait).await? }
            }
            Kind::ReadWrite => {
                let lock = with_options!(self, client.rw_lock(self.name));
                if self.mode == Some(RequestedMode::Read) {
                    if is_now { lock.try_read().await? } else { lock.read_timeout(wait).await? }
                } else {
                    let guard =
                        if is_now { lock.try_write().await? } else { lock.write_timeout(wait).await? };
                    return Ok(guard.map(Held::Write));
                }
            }
            // `check` has refused them.
            _ => None,
        };
        Ok(guard.map(Held::Guard))
    }
}
