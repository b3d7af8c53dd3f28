//! A client of a store, as the languages have it.

use std::sync::Arc;
use std::time::Duration;

use leasehold::{Kind, Token};

use crate::exit::Exit;
use crate::failure::Failure;
use crate::held::Held;
use crate::lease::{Answer, Granted, Operation, Outcome};
use crate::lock::{Lock, Terms};
use crate::opened::{Opened, Settings};
use crate::queue::Queue;

/// Opens when it is first used. Dropping it closes it in the background, after its last lease.
pub struct Client {
    opened: Arc<Opened>,
}

impl Client {
    /// Notes the address. Nothing is sent.
    ///
    /// # Errors
    /// The address has no scheme of a store.
    pub fn open(exit: &Arc<Exit>, url: String, settings: Settings) -> Result<Self, Failure> {
        Ok(Self { opened: Opened::new(exit, url, settings)? })
    }

    /// The address without a password.
    #[must_use]
    pub fn address(&self) -> String {
        self.opened.address()
    }

    /// A lock with these terms.
    ///
    /// # Errors
    /// The bridge is none.
    pub fn lock(&self, terms: Terms) -> Result<Lock, Failure> {
        Lock::new(self.opened.clone(), terms)
    }

    /// Connects now, if it has not yet.
    #[must_use]
    pub fn connect(&self, queue: Option<&Arc<Queue>>) -> Arc<Operation> {
        self.start(queue, |opened| async move { opened.client().await.map(|_| Answer::Nothing) })
    }

    /// Ends with the lease of this text.
    #[must_use]
    pub fn attach(&self, text: String, queue: Option<&Arc<Queue>>) -> Arc<Operation> {
        self.start(queue, |opened| async move {
            let guard = opened.attach(&text).await?;
            Ok(Answer::Lease(Granted::new(Held::Plain(guard), opened)))
        })
    }

    /// Ends with the JSON of one lock.
    ///
    /// # Errors
    /// The kind is none.
    pub fn inspect(
        &self,
        kind: &str,
        name: String,
        queue: Option<&Arc<Queue>>,
    ) -> Result<Arc<Operation>, Failure> {
        let kind = kind_of(kind)?;
        Ok(self.start(queue, move |opened| async move { opened.inspect(kind, name).await.map(Answer::Text) }))
    }

    /// Ends with a JSON array of locks.
    #[must_use]
    pub fn list(&self, queue: Option<&Arc<Queue>>) -> Arc<Operation> {
        self.start(queue, |opened| async move { opened.list().await.map(Answer::Text) })
    }

    /// Ends with a JSON array of the holders that were released.
    ///
    /// # Errors
    /// The kind is none, or the token.
    pub fn force_release(
        &self,
        kind: &str,
        name: String,
        token: Option<u64>,
        queue: Option<&Arc<Queue>>,
    ) -> Result<Arc<Operation>, Failure> {
        let kind = kind_of(kind)?;
        let known = |token| Token::new(token).ok_or_else(|| Failure::invalid(format!("{token} is no token")));
        let token = token.map(known).transpose()?;
        Ok(self.start(queue, move |opened| async move {
            opened.force_release(kind, name, token).await.map(Answer::Text)
        }))
    }

    /// Releases all leases and ends all waits. `limit`: how long the confirmation is waited for.
    #[must_use]
    pub fn close(&self, limit: Option<Duration>, queue: Option<&Arc<Queue>>) -> Arc<Operation> {
        self.start(queue, move |opened| async move { opened.close(limit).await.map(|()| Answer::Nothing) })
    }

    fn start<F: Future<Output = Outcome> + Send + 'static>(
        &self,
        queue: Option<&Arc<Queue>>,
        call: impl FnOnce(Arc<Opened>) -> F,
    ) -> Arc<Operation> {
        Operation::start(call(self.opened.clone()), queue)
    }
}

fn kind_of(kind: &str) -> Result<Kind, Failure> {
    Kind::ALL.iter().copied().find(|known| known.as_str() == kind).ok_or_else(|| {
        let known: Vec<_> = Kind::ALL.iter().map(|kind| kind.as_str()).collect();
        Failure::invalid(format!("{kind:?} is no kind of lock: they are {}", known.join(", ")))
    })
}
