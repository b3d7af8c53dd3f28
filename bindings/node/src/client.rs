//! A client of a store, as JavaScript sees it.

use std::sync::Arc;

use leasehold_binding::{Client as Opened, Failure, Operation, Queue, Settings as CheckedSettings};
use napi::bindgen_prelude::BigInt;
use napi_derive::napi;

use crate::answer::{Checked, Started, checked};
use crate::environment::Environment;
use crate::lock::{Lock, Terms};
use crate::time::optional_duration;

/// Of `lib/terms.js`. Times are milliseconds.
#[napi(object)]
pub struct Settings {
    pub ttl: Option<f64>,
    pub label: Option<String>,
    pub max_waiters: Option<u32>,
    pub replicas: Option<u32>,
    pub connect_timeout: Option<f64>,
}

#[napi]
pub struct Client {
    client: Opened,
}

impl Client {
    fn start(
        &self,
        environment: &Environment,
        start: impl FnOnce(&Opened, Option<&Arc<Queue>>) -> Result<Arc<Operation>, Failure>,
    ) -> Started {
        environment.started(start(&self.client, Some(&environment.queue)))
    }
}

#[napi]
impl Client {
    #[napi(getter)]
    pub fn address(&self) -> String {
        self.client.address()
    }

    #[napi]
    pub fn lock(&self, terms: Terms) -> Checked<Lock> {
        checked(terms.check().and_then(|terms| self.client.lock(terms)).map(Lock::new))
    }

    #[napi]
    pub fn connect(&self, environment: &Environment) -> Started {
        self.start(environment, |client, queue| Ok(client.connect(queue)))
    }

    #[napi]
    pub fn attach(&self, environment: &Environment, text: String) -> Started {
        self.start(environment, |client, queue| Ok(client.attach(text, queue)))
    }

    #[napi]
    pub fn inspect(&self, environment: &Environment, kind: String, name: String) -> Started {
        self.start(environment, |client, queue| client.inspect(&kind, name, queue))
    }

    #[napi]
    pub fn list(&self, environment: &Environment) -> Started {
        self.start(environment, |client, queue| Ok(client.list(queue)))
    }

    #[napi]
    pub fn force_release(
        &self,
        environment: &Environment,
        kind: String,
        name: String,
        token: Option<BigInt>,
    ) -> Started {
        self.start(environment, |client, queue| {
            let token = token.as_ref().map(token_of).transpose()?;
            client.force_release(&kind, name, token, queue)
        })
    }

    #[napi]
    pub fn close(&self, environment: &Environment, timeout: Option<f64>) -> Started {
        self.start(environment, |client, queue| Ok(client.close(optional_duration(timeout)?, queue)))
    }
}

fn token_of(token: &BigInt) -> Result<u64, Failure> {
    match token.get_u64() {
        (false, token, true) => Ok(token),
        _ => Err(Failure::invalid("a fencing token is positive and below 2^64")),
    }
}

/// Notes the address. Nothing is sent.
#[napi]
pub fn open(environment: &Environment, url: String, settings: Settings) -> Checked<Client> {
    let open = || {
        let checked = CheckedSettings {
            ttl: optional_duration(settings.ttl)?,
            label: settings.label,
            max_waiters: settings.max_waiters,
            replicas: settings.replicas,
            connect_timeout: optional_duration(settings.connect_timeout)?,
        };
        Ok(Client { client: Opened::open(&environment.exit, url, checked)? })
    };
    checked(open())
}
