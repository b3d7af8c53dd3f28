//! One attempt to acquire a lock of any kind.

use std::time::Duration;

use leasehold::{Client, Error, Guard, Kind};
use serde::Deserialize;

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
    /// The caller repeats the attempt by this id.
    pub(super) request_id: Option<Vec<u8>>,
    /// The holder that inspection shows: the caller's name, and its host.
    pub(super) holder: (&'a str, String),
    pub(super) ttl: Duration,
    pub(super) min_hold: Option<Duration>,
    /// It is granted once in this period.
    pub(super) period: Option<Duration>,
    pub(super) label: Option<String>,
    pub(super) mode: Option<RequestedMode>,
    pub(super) permits: Option<u32>,
    pub(super) capacity: Option<u32>,
    pub(super) owner: Option<String>,
}

/// The lock with the options that all kinds have.
macro_rules! with_options {
    ($attempt:expr, $lock:expr) => {{
        // The caller renews it.
        let lock = $lock.ttl($attempt.ttl).auto_renew(false);
        let lock = match &$attempt.request_id {
            Some(id) => lock.request(id),
            None => lock.detachable(),
        };
        let lock = lock.holder($attempt.holder.0, $attempt.holder.1.as_str());
        match &$attempt.label {
            Some(label) => lock.label(label.as_str()),
            None => lock,
        }
    }};
}

/// As `with_options`, with the minimum hold.
macro_rules! with_min_hold {
    ($attempt:expr, $lock:expr) => {
        with_options!($attempt, $lock.min_hold($attempt.min_hold.unwrap_or_default()))
    };
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
            ("once_per_ms", self.period.is_some(), Kind::Mutex),
        ] {
            if is_given && self.kind != kind {
                return unsupported(format!("only the kind {kind} has the option `{option}`"));
            }
        }
        if self.kind == Kind::Semaphore && self.capacity.is_none() {
            let what = "a semaphore needs `capacity`, the same in all requests";
            return Err(Problem::new(Code::InvalidRequest, what));
        }
        if self.period.is_some() && (self.owner.is_some() || self.min_hold.is_some()) {
            let what = "`once_per_ms` goes with neither `owner` nor `min_hold_ms`";
            return Err(Problem::new(Code::InvalidRequest, what));
        }
        Ok(())
    }

    /// Acquires the lock: at once if `wait` is zero.
    ///
    /// A mutex is not handed from one request to the next within this server. Each request has its own place in the store's
    /// queue, so that the order is the same for all servers and clients, and every waiter is shown.
    pub(super) async fn run(&self, client: &Client, wait: Duration) -> Result<Option<Guard>, Error> {
        let is_now = wait.is_zero();
        let guard = match self.kind {
            Kind::Mutex => match (&self.owner, self.period) {
                (_, Some(period)) => {
                    let lock = with_options!(self, client.once_per(self.name, period));
                    if is_now { lock.start().await? } else { lock.start_timeout(wait).await? }
                }
                (None, None) => {
                    let lock = with_min_hold!(self, client.mutex(self.name).global_fifo());
                    if is_now { lock.try_lock().await? } else { lock.lock_timeout(wait).await? }
                }
                (Some(owner), None) => {
                    let lock = with_min_hold!(self, client.reentrant_mutex(self.name, owner));
                    if is_now { lock.try_lock().await? } else { lock.lock_timeout(wait).await? }
                }
            },
            Kind::Semaphore => {
                let permits = self.permits.unwrap_or(1);
                let lock = with_min_hold!(self, client.semaphore(self.name, self.capacity.unwrap_or(1)));
                if is_now {
                    lock.try_acquire(permits).await?
                } else {
                    lock.acquire_timeout(permits, wait).await?
                }
            }
            Kind::Election => {
                let lock = with_min_hold!(self, client.election(self.name));
                if is_now { lock.try_campaign().await? } else { lock.campaign_timeout(wait).await? }
            }
            Kind::ReadWrite => {
                let lock = with_min_hold!(self, client.rw_lock(self.name));
                if self.mode == Some(RequestedMode::Read) {
                    if is_now { lock.try_read().await? } else { lock.read_timeout(wait).await? }
                } else {
                    let guard =
                        if is_now { lock.try_write().await? } else { lock.write_timeout(wait).await? };
                    guard.map(Guard::from)
                }
            }
            // `check` has refused them.
            _ => None,
        };
        Ok(guard)
    }
}
