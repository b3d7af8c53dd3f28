//! What a call results in, as JavaScript sees it.

use leasehold_binding::Failure;
use napi::bindgen_prelude::{BigInt, Either, Either6, Null};
use napi_derive::napi;

/// An error of `lib/errors.js`.
#[napi]
pub struct Failed {
    class: &'static str,
    message: String,
    reason: Option<&'static str>,
}

impl Failed {
    pub(crate) fn lost(reason: &'static str, message: String) -> Self {
        Self { class: "LeaseLost", message, reason: Some(reason) }
    }
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

/// A lease, which the environment keeps by its id.
#[napi(object)]
pub struct Granted {
    pub lease: f64,
    pub name: String,
    pub token: BigInt,
}

/// 20 information, 30 warning, 40 error.
#[napi(object)]
pub struct Record {
    pub level: u8,
    pub message: String,
}

/// A result; or the key of a call that has none yet.
pub(crate) type Started = Either6<Failed, Granted, String, Vec<Record>, Null, f64>;
