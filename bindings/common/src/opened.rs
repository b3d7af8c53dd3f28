//! A client that opens when it is first used.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::BoxFuture;
use leasehold::testing::TestStore;
use leasehold::{Client, Guard, Kind, LeaseId, SCHEMES, Token};
use leasehold_store::address::without_passwords;
use tokio::sync::OnceCell;

use crate::exit::{Close, Exit};
use crate::failure::Failure;
use crate::testing;

/// The settings of a client. None: the library's default.
#[derive(Default)]
#[expect(missing_docs, reason = "as the builder of the library has them")]
pub struct Settings {
    pub ttl: Option<Duration>,
    pub label: Option<String>,
    pub max_waiters: Option<u32>,
    pub replicas: Option<u32>,
    pub connect_timeout: Option<Duration>,
}

/// A client that is open, or will be.
pub(crate) struct Opened {
    url: String,
    /// The store of a test: nothing waits for its clients, because only the test moves their clock.
    test: Option<TestStore>,
    settings: Settings,
    /// None once it is closed, so that its connections end although the language still has its locks.
    client: Mutex<Option<Arc<OnceCell<Client>>>>,
    exit: Arc<Exit>,
    /// Of the exit's list.
    key: u64,
}

impl Opened {
    /// Notes the address. Nothing is sent.
    pub(crate) fn new(exit: &Arc<Exit>, url: String, settings: Settings) -> Result<Arc<Self>, Failure> {
        let scheme = url.split(':').next().unwrap_or_default();
        let test = testing::find(&url);
        if test.is_none() && scheme == testing::SCHEME {
            return Err(Failure::invalid(format!("{url}: no TestStore of this process has this address")));
        }
        if test.is_none() && !SCHEMES.contains(&scheme) {
            // Anything else may be a password.
            let is_word =
                scheme.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'+' || byte == b'-');
            let what =
                if is_word { format!("{scheme:?}") } else { "the beginning of the address".to_owned() };
            let known = SCHEMES.join(", ");
            return Err(Failure::invalid(format!(
                "{what} is no scheme of a store: they are {known}, http, https and unix"
            )));
        }
        Ok(Arc::new_cyclic(|own: &Weak<Self>| Self {
            url,
            test,
            settings,
            client: Mutex::new(Some(Arc::default())),
            exit: exit.clone(),
            key: exit.add(own.clone() as Weak<dyn Close>),
        }))
    }

    fn cell(&self) -> MutexGuard<'_, Option<Arc<OnceCell<Client>>>> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The client. The first call opens it, and the next call tries again if that fails.
    pub(crate) async fn client(&self) -> Result<Client, Failure> {
        let cell = self.cell().clone().filter(|_| !self.exit.has_begun()).ok_or_else(Failure::closed)?;
        if let Some(client) = cell.get() {
            return Ok(client.clone());
        }
        let client = cell.get_or_try_init(|| self.build()).await.map_err(unanswered)?;
        if self.cell().is_none() { Err(Failure::closed()) } else { Ok(client.clone()) }
    }

    async fn build(&self) -> Result<Client, Failure> {
        let (mut builder, settings) = (Client::builder(), &self.settings);
        if let Some(ttl) = settings.ttl {
            builder = builder.ttl(ttl);
        }
        if let Some(limit) = settings.connect_timeout {
            builder = builder.connect_timeout(limit);
        }
        if let Some(label) = &settings.label {
            builder = builder.label(label);
        }
        if let Some(max_waiters) = settings.max_waiters {
            builder = builder.max_waiters(max_waiters);
        }
        if let Some(replicas) = settings.replicas {
            builder = builder.replicas(replicas);
        }
        match &self.test {
            Some(store) => Ok(store.client_with(builder)?),
            None => Ok(builder.store(self.url.as_str()).connect().await?),
        }
    }

    pub(crate) async fn attach(&self, text: &str) -> Result<Guard, Failure> {
        let id: LeaseId = text.parse()?;
        Ok(self.client().await?.attach(&id).await?)
    }

    pub(crate) async fn close(&self, limit: Option<Duration>) -> Result<(), Failure> {
        let client = self.cell().take().and_then(|cell| cell.get().cloned());
        match (client, limit) {
            (Some(client), Some(limit)) => client.close_timeout(limit).await?,
            (Some(client), None) => client.close().await?,
            (None, _) => {}
        }
        Ok(())
    }

    pub(crate) async fn inspect(&self, kind: Kind, name: String) -> Result<String, Failure> {
        text(&self.client().await?.inspect(kind, name).await?)
    }

    pub(crate) async fn list(&self) -> Result<String, Failure> {
        text(&self.client().await?.list().await?)
    }

    pub(crate) async fn force_release(
        &self,
        kind: Kind,
        name: String,
        token: Option<Token>,
    ) -> Result<String, Failure> {
        let client = self.client().await?;
        match token {
            Some(token) => text(&Vec::from_iter(client.force_release_token(kind, name, token).await?)),
            None => text(&client.force_release(kind, name).await?),
        }
    }

    /// The address without a password.
    pub(crate) fn address(&self) -> String {
        if let Some(client) = self.cell().as_ref().and_then(|cell| cell.get()) {
            return client.address().to_owned();
        }
        without_passwords(&self.url)
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
        self.exit.remove(self.key);
        let cell = self.client.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(client) = cell.and_then(Arc::into_inner).and_then(OnceCell::into_inner)
            && self.test.is_none()
        {
            self.exit.close(client);
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
fn text(value: &impl serde::Serialize) -> Result<String, Failure> {
    serde_json::to_string(value).map_err(|error| Failure::Own("Error", error.to_string()))
}
