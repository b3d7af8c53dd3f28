//! Opens a client: its session, its thread or its manual clock, and its store.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Weak};

use leasehold_core::{ClientId, SecretKey};
use leasehold_store::clock::Clock;
use leasehold_store::clock::manual::ManualClock;
use leasehold_store::credentials::CredentialProvider;
use leasehold_store::digest::client_name;
use leasehold_store::process::look_for_fork;
use leasehold_store::{Inbox, Store, wakes};
use tokio::runtime;
use tokio::sync::oneshot;

use super::Client;
use crate::engine::{Session, driver};
use crate::error::{Error, ErrorKind};
use crate::handle::{ClientOptions, Handle};
use crate::open;
use crate::telemetry::ClientTelemetry;
use crate::url::StoreUrl;

impl Client {
    pub(crate) async fn connect_to(
        url: StoreUrl,
        provider: Option<CredentialProvider>,
        caller: Option<runtime::Handle>,
    ) -> Result<Self, Error> {
        if provider.is_some() {
            url.check_credentials()?;
        }
        let (opened, kept) = (url.clone(), provider.clone());
        let open = move |id, inbox, clock| async move {
            open::open(&opened, provider, clock, id, inbox, caller).await
        };
        let options = ClientOptions { provider: kept, ..ClientOptions::default() };
        Self::with_options(url.to_string(), options, open).await
    }

    /// A client of a clock that a test moves. It has no thread.
    pub(crate) fn with_manual_clock(
        clock: &Arc<ManualClock>,
        options: ClientOptions,
        open: impl FnOnce(ClientId, Weak<dyn Inbox>) -> Arc<dyn Store>,
    ) -> Result<Self, Error> {
        let telemetry = ClientTelemetry::new("memory:");
        let (id, key) = random_id()?;
        let session = Arc::new(Session::new(id, key, Clock::Manual(clock.clone()), telemetry.clone()));
        let inbox: Arc<dyn Inbox> = session.clone();
        let store = telemetry.meter(open(session.id, Arc::downgrade(&inbox)), Clock::Manual(clock.clone()));
        driver::start_manual(clock, session.clone(), store.clone());
        let handle = Handle::new(session, store, "memory:".to_owned(), options, telemetry);
        Ok(Self { handle: Arc::new(handle) })
    }

    #[cfg(test)]
    pub(crate) async fn with_store<O, F>(url: String, open: O) -> Result<Self, Error>
    where
        O: FnOnce(ClientId, Weak<dyn Inbox>) -> F + Send + 'static,
        F: Future<Output = Result<Arc<dyn Store>, Error>> + Send + 'static,
    {
        let open = move |id, inbox, _| open(id, inbox);
        Self::with_options(url, ClientOptions::default(), open).await
    }

    pub(crate) async fn with_options<O, F>(
        url: String,
        options: ClientOptions,
        open: O,
    ) -> Result<Self, Error>
    where
        O: FnOnce(ClientId, Weak<dyn Inbox>, Clock) -> F + Send + 'static,
        F: Future<Output = Result<Arc<dyn Store>, Error>> + Send + 'static,
    {
        look_for_fork();
        let clock = Clock::System;
        let telemetry = ClientTelemetry::new(&url);
        let (id, key) = random_id()?;
        let session = Arc::new(Session::new(id, key, clock.clone(), telemetry.clone()));
        let inbox: Arc<dyn Inbox> = session.clone();
        let (id, inbox) = (session.id, Arc::downgrade(&inbox));
        let (sender, mut receiver) = oneshot::channel();
        let (limit, shown, metered) = (options.connect_timeout, url.clone(), telemetry.clone());
        let open = move || async move {
            let opening = async { Ok(metered.meter(open(id, inbox, clock.clone()).await?, clock)) };
            let Some(limit) = limit else { return opening.await };
            let late = |_| {
                let what = format!("{shown}: not connected within {limit:?}");
                Err(Error::new(ErrorKind::Timeout, what))
            };
            tokio::time::timeout(limit, opening).await.unwrap_or_else(late)
        };
        let report = move |ready| sender.send(ready).is_ok();
        driver::start(session.clone(), open, report, thread_failed).map_err(thread_failed)?;
        let received =
            poll_fn(|context| wakes::guarded(context, |context| Pin::new(&mut receiver).poll(context)));
        let store = received.await.map_err(|_| {
            Error::new(ErrorKind::Unavailable, format!("the client's thread for {url} ended unexpectedly"))
        })??;
        tracing::debug!(store = %url, client = client_name(session.id), "connected");
        Ok(Self { handle: Arc::new(Handle::new(session, store, url, options, telemetry)) })
    }
}

/// The client's id, and the key of its secrets.
fn random_id() -> Result<(ClientId, SecretKey), Error> {
    let [id, key] = [random()?, random()?];
    Ok((ClientId::new(id), SecretKey::new(key)))
}

fn random() -> Result<u128, Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| {
        Error::new(ErrorKind::Unavailable, format!("the system gave no random numbers: {error}"))
    })?;
    Ok(u128::from_be_bytes(bytes))
}

/// Not `From`: the `?` of a program would turn its own IO errors into this one.
fn thread_failed(error: io::Error) -> Error {
    let what = format!("the client's thread could not be started: {error}");
    Error::new(ErrorKind::Unavailable, what).with_source(error)
}
