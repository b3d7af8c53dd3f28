//! Locks with their terms, as JavaScript sees them.

use leasehold_binding::{Failure, Lock as Prepared, Terms as CheckedTerms};
use napi_derive::napi;

use crate::answer::Started;
use crate::environment::Environment;
use crate::time::{duration, limit, optional_duration};

/// Of `lib/terms.js`. Times are milliseconds.
#[napi(object)]
pub struct Terms {
    pub kind: String,
    pub names: Vec<String>,
    pub ttl: Option<f64>,
    pub auto_renew: bool,
    pub min_hold: f64,
    pub max_hold: Option<f64>,
    pub max_waiters: Option<u32>,
    pub replicas: Option<u32>,
    pub label: Option<String>,
    pub trace_id: Option<String>,
    pub owner: Option<String>,
    pub permits: u32,
    pub capacity: u32,
    pub period: f64,
    pub at_least_once: bool,
    pub global_fifo: bool,
    pub detachable: bool,
    pub bridge: Option<Vec<String>>,
}

impl Terms {
    pub(crate) fn check(self) -> Result<CheckedTerms, Failure> {
        Ok(CheckedTerms {
            kind: self.kind,
            names: self.names,
            ttl: optional_duration(self.ttl)?,
            auto_renew: self.auto_renew,
            min_hold: duration(self.min_hold)?,
            max_hold: optional_duration(self.max_hold)?,
            max_waiters: self.max_waiters,
            replicas: self.replicas,
            label: self.label,
            trace_id: self.trace_id,
            owner: self.owner,
            permits: self.permits,
            capacity: self.capacity,
            period: duration(self.period)?,
            at_least_once: self.at_least_once,
            global_fifo: self.global_fifo,
            detachable: self.detachable,
            bridge: self.bridge,
        })
    }
}

#[napi]
pub struct Lock {
    prepared: Prepared,
}

impl Lock {
    pub(crate) fn new(prepared: Prepared) -> Self {
        Self { prepared }
    }
}

#[napi]
impl Lock {
    #[napi]
    pub fn acquire(&self, environment: &Environment, wait: Option<f64>) -> Started {
        environment.started(limit(wait).map(|limit| self.prepared.acquire(limit, Some(&environment.queue))))
    }
}
