//! The leases that a command runs under: one, or those of several locks. If one of them is lost, all are.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use leasehold::{Error, Guard, Loss, Token};

pub(crate) struct Held {
    guards: Vec<Guard>,
}

impl From<Guard> for Held {
    fn from(guard: Guard) -> Self {
        Self { guards: vec![guard] }
    }
}

/// The first of these futures that ends.
async fn first<T>(mut all: Vec<Pin<Box<dyn Future<Output = T> + '_>>>) -> T {
    poll_fn(|context| {
        let ended = all.iter_mut().find_map(|future| match future.as_mut().poll(context) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        });
        ended.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

impl Held {
    /// In the order in which the locks were named.
    pub(crate) fn several(guards: Vec<Guard>) -> Self {
        Self { guards }
    }

    /// The lease, if there is one only.
    pub(crate) fn into_only(mut self) -> Option<Guard> {
        self.guards.pop().filter(|_| self.guards.is_empty())
    }

    pub(crate) fn names(&self) -> Vec<&str> {
        self.guards.iter().map(Guard::name).collect()
    }

    pub(crate) fn tokens(&self) -> Vec<Token> {
        self.guards.iter().map(Guard::token).collect()
    }

    /// As other clients see them.
    pub(crate) fn lease_tokens(&self) -> Vec<Token> {
        self.guards.iter().map(Guard::lease_token).collect()
    }

    pub(crate) fn is_held(&self) -> bool {
        self.guards.iter().all(Guard::is_held)
    }

    pub(crate) fn remaining(&self) -> Duration {
        self.guards.iter().map(Guard::remaining).min().unwrap_or_default()
    }

    /// Why one of the leases is not renewed at present.
    pub(crate) fn renewal_error(&self) -> Option<Error> {
        self.guards.iter().find_map(Guard::renewal_error)
    }

    /// Waits until one of the leases is lost.
    pub(crate) async fn lost(&self) -> Loss {
        first(
            self.guards
                .iter()
                .map(|guard| Box::pin(guard.lost()) as Pin<Box<dyn Future<Output = _> + '_>>)
                .collect(),
        )
        .await
    }

    /// Waits until one of the leases has at most this much time left.
    pub(crate) async fn wait_until_expiring(&self, left: Duration) {
        let expiring = |guard| {
            Box::pin(Guard::wait_until_expiring(guard, left)) as Pin<Box<dyn Future<Output = ()> + '_>>
        };
        first(self.guards.iter().map(expiring).collect()).await;
    }

    pub(crate) async fn renew(&self) -> Result<(), Error> {
        for guard in &self.guards {
            guard.renew().await?;
        }
        Ok(())
    }

    /// The command did not start, so a minimum hold need not block others.
    pub(crate) fn forget_min_hold(&self) {
        for guard in &self.guards {
            let _ = guard.set_min_hold(Duration::ZERO);
        }
    }

    /// Releases all leases, at the same time. Returns the first error, and one of a lost lease before any other.
    pub(crate) async fn release_timeout(self, limit: Duration) -> Result<(), Error> {
        let mut releases: Vec<_> =
            self.guards.into_iter().map(|guard| Box::pin(guard.release_timeout(limit))).collect();
        let mut failures = Vec::new();
        poll_fn(|context| {
            releases.retain_mut(|release| match release.as_mut().poll(context) {
                Poll::Ready(released) => {
                    failures.extend(released.err());
                    false
                }
                Poll::Pending => true,
            });
            if releases.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        failures.sort_by_key(|error| !error.is_lost());
        failures.into_iter().next().map_or(Ok(()), Err)
    }
}
