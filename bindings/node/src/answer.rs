//! A started call, and the lease that it may end with, as JavaScript sees them.

use std::sync::Arc;

use leasehold_binding::{Answer, Failure, Granted, Lease as Held, Operation as Call, Queue};
use napi::bindgen_prelude::{BigInt, Either, Either5, Null};
use napi_derive::napi;

use crate::environment::{Environment, key};
use crate::time::{duration, limit, milliseconds, optional_duration};

/// An error of `lib/errors.js`.
#[napi]
pub struct Failed {
    class: &'static str,
    message: String,
    reason: Option<&'static str>,
}

#[napi]
impl Failed {
    /// The name of its class.
    #[napi(getter)]
    pub fn class(&self) -> &str {
        self.class
    }

    #[napi(getter)]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Of `LeaseLost`.
    #[napi(getter)]
    pub fn reason(&self) -> Option<&str> {
        self.reason
    }
}

impl From<Failure> for Failed {
    fn from(failure: Failure) -> Self {
        let (class, message, reason) = failure.parts();
        Self { class, message, reason }
    }
}

/// A value, or why there is none.
pub(crate) type Checked<T> = Either<Failed, T>;

pub(crate) fn checked<T>(result: Result<T, Failure>) -> Checked<T> {
    match result {
        Ok(value) => Either::B(value),
        Err(failure) => Either::A(failure.into()),
    }
}

#[napi]
pub struct Record {
    record: leasehold_binding::Record,
}

#[napi]
impl Record {
    /// 20 information, 30 warning, 40 error.
    #[napi(getter)]
    pub fn level(&self) -> u8 {
        self.record.level
    }

    #[napi(getter)]
    pub fn message(&self) -> &str {
        &self.record.message
    }
}

/// A started call. Dropping it cancels it.
#[napi]
pub struct Operation {
    call: Arc<Call>,
}

impl Operation {
    pub(crate) fn new(call: Arc<Call>) -> Self {
        Self { call }
    }
}

#[napi]
impl Operation {
    /// By which `Environment.take` names it.
    #[napi(getter)]
    pub fn key(&self) -> f64 {
        key(self.call.key())
    }

    /// Whether it was done when it started, or was cancelled.
    #[napi(getter)]
    pub fn is_done(&self) -> bool {
        self.call.is_done()
    }

    /// Ends it without a result. A lease that it was granted, and nobody took, is released in the background.
    #[napi]
    pub fn cancel(&self) {
        self.call.cancel();
    }

    /// The result, once.
    #[napi]
    pub fn result(&self) -> Either5<Failed, Lease, String, Vec<Record>, Null> {
        match self.call.take() {
            None => Either5::A(Failed {
                class: "LeaseholdError",
                message: "the operation runs, was cancelled, or its result was taken".to_owned(),
                reason: None,
            }),
            Some(Err(failure)) => Either5::A(failure.into()),
            Some(Ok(Answer::Nothing)) => Either5::E(Null),
            Some(Ok(Answer::Text(text))) => Either5::C(text),
            Some(Ok(Answer::Loss(reason))) => Either5::C(reason.to_owned()),
            Some(Ok(Answer::Lease(granted))) => Either5::B(Lease::new(granted)),
            Some(Ok(Answer::Records(records))) => {
                Either5::D(records.into_iter().map(|record| Record { record }).collect())
            }
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        self.call.cancel();
    }
}

/// A held lease. Dropping it releases it in the background.
#[napi]
pub struct Lease {
    held: Held,
}

impl Lease {
    fn new(granted: Granted) -> Self {
        Self { held: Held::new(granted) }
    }

    fn start(
        &self,
        environment: &Environment,
        start: impl FnOnce(&Held, Option<&Arc<Queue>>) -> Result<Arc<Call>, Failure>,
    ) -> Checked<Operation> {
        checked(start(&self.held, Some(&environment.queue)).map(Operation::new))
    }
}

#[napi]
impl Lease {
    #[napi(getter)]
    pub fn name(&self) -> &str {
        self.held.name()
    }

    #[napi(getter)]
    pub fn token(&self) -> BigInt {
        self.held.token().into()
    }

    /// The names, each followed by its token.
    #[napi]
    pub fn tokens(&self) -> Vec<Either<String, BigInt>> {
        let tokens = self.held.tokens().iter();
        tokens.flat_map(|(name, token)| [Either::A(name.clone()), Either::B((*token).into())]).collect()
    }

    /// Milliseconds for which it may be trusted.
    #[napi]
    pub fn remaining(&self) -> f64 {
        milliseconds(self.held.remaining())
    }

    /// Why it is lost.
    #[napi]
    pub fn loss(&self) -> Option<Failed> {
        let (reason, message) = self.held.loss()?;
        Some(Failed { class: "LeaseLost", message, reason: Some(reason) })
    }

    #[napi]
    pub fn lost(&self, environment: &Environment) -> Operation {
        Operation::new(self.held.lost(Some(&environment.queue)))
    }

    #[napi]
    pub fn renew(&self, environment: &Environment) -> Operation {
        Operation::new(self.held.renew(Some(&environment.queue)))
    }

    #[napi]
    pub fn release(&self, environment: &Environment, timeout: Option<f64>) -> Checked<Operation> {
        self.start(environment, |held, queue| Ok(held.release(optional_duration(timeout)?, queue)))
    }

    #[napi]
    pub fn detach(&self, environment: &Environment) -> Checked<Operation> {
        self.start(environment, Held::detach)
    }

    #[napi]
    pub fn downgrade(&self, environment: &Environment) -> Checked<Operation> {
        self.start(environment, Held::downgrade)
    }

    #[napi]
    pub fn upgrade(&self, environment: &Environment, wait: Option<f64>) -> Checked<Operation> {
        self.start(environment, |held, queue| held.upgrade(limit(wait)?, queue))
    }

    /// Why it could not be set.
    #[napi]
    pub fn set_min_hold(&self, milliseconds: f64) -> Option<Failed> {
        let set = duration(milliseconds).and_then(|min_hold| self.held.set_min_hold(min_hold));
        set.err().map(Failed::from)
    }

    #[napi]
    pub fn abandon(&self) {
        self.held.abandon();
    }
}

/// What the library has reported since the last call. Ends once there is something.
#[napi]
pub fn records(environment: &Environment) -> Operation {
    Operation::new(leasehold_binding::records(Some(&environment.queue)))
}
