//! A client of a store, as Python sees it. It opens when it is first used.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold::{Client, Kind, LeaseId, SCHEMES, Token};
use pyo3::prelude::*;
use tokio::sync::OnceCell;

use crate::completions::{Completions, queue_of};
use crate::core::{Core, Outcome, Value};
use crate::errors::Failure;
use crate::fork::Forkable;
use crate::lease::{Held, LeaseParts};
use crate::lock::{Lock, Terms, duration};
use crate::operation::Operation;
use crate::{errors, exit};

/// `leasehold._terms.Settings`
#[derive(FromPyObject)]
pub(crate) struct Settings {
    ttl: Option<f64>,
    label: Option<String>,
    max_waiters: Option<u32>,
    replicas: Option<u32>,
    connect_timeout: Option<f64>,
    token: Option<String>,
}

/// A client that is open, or will be.
pub(crate) struct Opened {
    url: String,
    ttl: Option<Duration>,
    connect_timeout: Option<Duration>,
    label: Option<String>,
    max_waiters: Option<u32>,
    replicas: Option<u32>,
    client: OnceCell<Client>,
    is_closed: AtomicBool,
    /// Of the exit's list.
    key: u64,
}

impl Opened {
    fn new(py: Python<'_>, url: String, settings: Settings) -> PyResult<Arc<Self>> {
        let optional = |seconds: Option<f64>| seconds.map(|seconds| duration(py, seconds)).transpose();
        let (ttl, connect_timeout) = (optional(settings.ttl)?, optional(settings.connect_timeout)?);
        Ok(Arc::new_cyclic(|own: &Weak<Self>| Self {
            url,
            ttl,
            connect_timeout,
            label: settings.label,
            max_waiters: settings.max_waiters,
            replicas: settings.replicas,
            client: OnceCell::new(),
            is_closed: AtomicBool::new(false),
            key: exit::add(own),
        }))
    }

    /// The client. The first call opens it, and the next call tries again if that fails.
    pub(crate) async fn client(&self) -> Result<&Client, Failure> {
        if self.is_closed.load(Ordering::Acquire) || exit::is_exiting() {
            return Err(Failure::closed());
        }
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        let client = self.client.get_or_try_init(|| self.connect()).await?;
        if self.is_closed.load(Ordering::Acquire) {
            return Err(Failure::closed());
        }
        Ok(client)
    }

    async fn connect(&self) -> Result<Client, Failure> {
        let mut builder = Client::builder().store(self.url.as_str());
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
        Ok(builder.connect().await?)
    }

    pub(crate) async fn close(&self, limit: Option<Duration>) -> Outcome {
        self.is_closed.store(true, Ordering::Release);
        if let Some(client) = self.client.get().cloned() {
            match limit {
                Some(limit) => client.close_timeout(limit).await?,
                None => client.close().await?,
            }
        }
        Ok(Value::None)
    }

    async fn attach(self: Arc<Self>, text: String) -> Outcome {
        let id: LeaseId = text.parse()?;
        let guard = self.client().await?.attach(&id).await?;
        Ok(Value::Lease(Box::new(LeaseParts::new(Held::Plain(guard), self))))
    }

    async fn inspect(&self, kind: Kind, name: String) -> Outcome {
        text(&self.client().await?.inspect(kind, name).await?)
    }

    async fn list(&self) -> Outcome {
        text(&self.client().await?.list().await?)
    }

    async fn force_release(&self, kind: Kind, name: String, token: Option<Token>) -> Outcome {
        let client = self.client().await?;
        match token {
            Some(token) => text(&Vec::from_iter(client.force_release_token(kind, name, token).await?)),
            None => text(&client.force_release(kind, name).await?),
        }
    }

    /// The address without a password.
    fn shown(&self) -> String {
        if let Some(client) = self.client.get() {
            return client.address().to_owned();
        }
        match (self.url.split_once("://"), self.url.rsplit_once('@')) {
            (Some((scheme, _)), Some((_, host))) => format!("{scheme}://{host}"),
            _ => self.url.clone(),
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        exit::remove(self.key);
        if let Some(client) = self.client.take()
            && !*self.is_closed.get_mut()
        {
            exit::close(client);
        }
    }
}

/// JSON, as `leasehold serve` answers.
fn text(value: &impl serde::Serialize) -> Outcome {
    let text = serde_json::to_string(value).map_err(|error| Failure::Own("Error", error.to_string()))?;
    Ok(Value::Text(text))
}

fn kind_of(py: Python<'_>, kind: &str) -> PyResult<Kind> {
    Kind::ALL.iter().copied().find(|known| known.as_str() == kind).ok_or_else(|| {
        let known: Vec<_> = Kind::ALL.iter().map(|kind| kind.as_str()).collect();
        Failure::invalid(format!("{kind:?} is no kind of lock: they are {}", known.join(", ")))
            .into_exception(py)
    })
}

#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Backend {
    opened: Forkable<Arc<Opened>>,
}

impl Backend {
    fn opened(&self, py: Python<'_>) -> PyResult<&Arc<Opened>> {
        self.opened.get().ok_or_else(|| errors::forked(py))
    }

    fn start<F: Future<Output = Outcome> + Send + 'static>(
        &self,
        py: Python<'_>,
        completions: Option<&Bound<'_, Completions>>,
        call: impl FnOnce(Arc<Opened>) -> F,
    ) -> PyResult<Operation> {
        let queue = queue_of(completions)?;
        Ok(Operation::new(Core::start(call(self.opened(py)?.clone()), queue.as_ref())))
    }
}

#[pymethods]
impl Backend {
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.opened(py)?.shown())
    }

    #[staticmethod]
    fn completions() -> PyResult<Completions> {
        Completions::open()
    }

    fn lock(&self, py: Python<'_>, terms: Terms) -> PyResult<Lock> {
        let opened = self.opened(py)?.clone();
        Ok(Lock::new(opened, terms.check(py)?))
    }

    #[pyo3(signature = (lease, completions=None))]
    fn attach(
        &self,
        py: Python<'_>,
        lease: String,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        self.start(py, completions, |opened| async move { opened.attach(lease).await })
    }

    #[pyo3(signature = (kind, name, completions=None))]
    fn inspect(
        &self,
        py: Python<'_>,
        kind: &str,
        name: String,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        let kind = kind_of(py, kind)?;
        self.start(py, completions, move |opened| async move { opened.inspect(kind, name).await })
    }

    #[pyo3(signature = (completions=None))]
    fn list(&self, py: Python<'_>, completions: Option<&Bound<'_, Completions>>) -> PyResult<Operation> {
        self.start(py, completions, |opened| async move { opened.list().await })
    }

    #[pyo3(signature = (kind, name, token=None, completions=None))]
    fn force_release(
        &self,
        py: Python<'_>,
        kind: &str,
        name: String,
        token: Option<u64>,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        let kind = kind_of(py, kind)?;
        let known = |token| {
            Token::new(token)
                .ok_or_else(|| Failure::invalid(format!("{token} is no token")).into_exception(py))
        };
        let token = token.map(known).transpose()?;
        self.start(
            py,
            completions,
            move |opened| async move { opened.force_release(kind, name, token).await },
        )
    }

    #[pyo3(signature = (timeout=None, completions=None))]
    fn close(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        completions: Option<&Bound<'_, Completions>>,
    ) -> PyResult<Operation> {
        let limit = timeout.map(|limit| duration(py, limit)).transpose()?;
        self.start(py, completions, move |opened| async move { opened.close(limit).await })
    }
}

/// Notes the address. Nothing is sent.
#[pyfunction]
pub(crate) fn open(py: Python<'_>, url: String, settings: Settings) -> PyResult<Backend> {
    let scheme = url.split(':').next().unwrap_or_default();
    if !SCHEMES.contains(&scheme) {
        let what = format!(
            "{scheme:?} is no scheme of a store: they are {}, http, https and unix",
            SCHEMES.join(", ")
        );
        return Err(Failure::invalid(what).into_exception(py));
    }
    if settings.token.is_some() {
        return Err(Failure::invalid("token is for servers of leasehold serve (http:, https:, unix:)")
            .into_exception(py));
    }
    Ok(Backend { opened: Forkable::new(Opened::new(py, url, settings)?) })
}
