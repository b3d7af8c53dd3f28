//! A client that opens when it is first used.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::BoxFuture;
use leasehold::testing::TestStore;
use leasehold::{Client, Kind, Token};
use pyo3::prelude::*;
use tokio::sync::OnceCell;

use crate::core::{Outcome, done};
use crate::errors::Failure;
use crate::exit::{self, Close};
use crate::time::duration;

/// `leasehold._terms.Settings`
#[derive(FromPyObject)]
pub(crate) struct Settings {
    ttl: Option<f64>,
    label: Option<String>,
    max_waiters: Option<u32>,
    replicas: Option<u32>,
    connect_timeout: Option<f64>,
    pub(crate) token: Option<String>,
}

/// A client that is open, or will be.
pub(crate) struct Opened {
    url: String,
    /// The store of a test: nothing waits for its clients, because only the test moves their clock.
    test: Option<TestStore>,
    ttl: Option<Duration>,
    connect_timeout: Option<Duration>,
    label: Option<String>,
    max_waiters: Option<u32>,
    replicas: Option<u32>,
    /// None once it is closed, so that its connections end although Python still has its locks.
    client: Mutex<Option<Arc<OnceCell<Client>>>>,
    /// Of the exit's list.
    key: u64,
}

impl Opened {
    pub(crate) fn new(
        py: Python<'_>,
        url: String,
        test: Option<TestStore>,
        settings: Settings,
    ) -> PyResult<Arc<Self>> {
        let optional = |seconds: Option<f64>| seconds.map(|seconds| duration(py, seconds)).transpose();
        let (ttl, connect_timeout) = (optional(settings.ttl)?, optional(settings.connect_timeout)?);
        Ok(Arc::new_cyclic(|own: &Weak<Self>| Self {
            url,
            test,
            ttl,
            connect_timeout,
            label: settings.label,
            max_waiters: settings.max_waiters,
            replicas: settings.replicas,
            client: Mutex::new(Some(Arc::default())),
            key: exit::add(own.clone() as Weak<dyn Close>),
        }))
    }

    fn cell(&self) -> MutexGuard<'_, Option<Arc<OnceCell<Client>>>> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The client. The first call opens it, and the next call tries again if that fails.
    pub(crate) async fn client(&self) -> Result<Client, Failure> {
        let cell = self.cell().clone().filter(|_| !exit::is_exiting()).ok_or_else(Failure::closed)?;
        if let Some(client) = cell.get() {
            return Ok(client.clone());
        }
        let client = cell.get_or_try_init(|| self.connect()).await.map_err(unanswered)?;
        if self.cell().is_none() { Err(Failure::closed()) } else { Ok(client.clone()) }
    }

    async fn connect(&self) -> Result<Client, Failure> {
        let mut builder = Client::builder();
        if let Some(ttl) = self.ttl {
            builder = builder.ttl(ttl);
        }
        if let Some(limit) = self.connect_timeout {
            builder = builder.connect_timeout(limit);
        }
        if let Some(label) = &self.label {
            builder = builder.label(label);
        }
        if let Some(max_waiters) = self.max_waiters {
            builder = builder.max_waiters(max_waiters);
        }
        if let Some(replicas) = self.replicas {
            builder = builder.replicas(replicas);
        }
        match &self.test {
            Some(store) => Ok(store.client_with(builder)?),
            None => Ok(builder.store(self.url.as_str()).connect().await?),
        }
    }

    pub(crate) async fn close(&self, limit: Option<Duration>) -> Outcome {
        let client = self.cell().take().and_then(|cell| cell.get().cloned());
        match (client, limit) {
            (Some(client), Some(limit)) => client.close_timeout(limit).await?,
            (Some(client), None) => client.close().await?,
            (None, _) => {}
        }
        done(())
    }

    pub(crate) async fn inspect(&self, kind: Kind, name: String) -> Outcome {
        text(&self.client().await?.inspect(kind, name).await?)
    }

    pub(crate) async fn list(&self) -> Outcome {
        text(&self.client().await?.list().await?)
    }

    pub(crate) async fn force_release(&self, kind: Kind, name: String, token: Option<Token>) -> Outcome {
        let client = self.client().await?;
        match token {
            Some(token) => text(&Vec::from_iter(client.force_release_token(kind, name, token).await?)),
            None => text(&client.force_release(kind, name).await?),
        }
    }

    /// The address without a password.
    pub(crate) fn shown(&self) -> String {
        if let Some(client) = self.cell().as_ref().and_then(|cell| cell.get()) {
            return client.address().to_owned();
        }
        match (self.url.split_once("://"), self.url.rsplit_once('@')) {
            (Some((scheme, _)), Some((_, host))) => format!("{scheme}://{host}"),
            _ => self.url.clone(),
        }
    }
}

impl Close for Opened {
    fn close(&self, limit: Duration) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            if self.test.is_some() {
                return drop(self.cell().take());
            }
            // What was not confirmed expires with its ttl.
            let _ = self.close(Some(limit)).await;
        })
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        exit::remove(self.key);
        let cell = self.client.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(client) = cell.and_then(Arc::into_inner).and_then(OnceCell::into_inner)
            && self.test.is_none()
        {
            exit::close(client);
        }
    }
}

/// A connection that took too long. It is not the `Timeout` of a lock that is busy.
fn unanswered(failure: Failure) -> Failure {
    match failure {
        Failure::Library(error) if error.is_timeout() => Failure::Own("Unavailable", format!("{error:#}")),
        other => other,
    }
}

/// JSON, as `leasehold serve` answers.
fn text(value: &impl serde::Serialize) -> Outcome {
    let text = serde_json::to_string(value).map_err(|error| Failure::Own("Error", error.to_string()))?;
    done(text)
}
