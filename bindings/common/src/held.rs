//! What a client holds, of any kind.

use std::time::Duration;

use futures_util::FutureExt as _;
use leasehold::{Error, Guard, Loss, SetGuard, UpgradableGuard, WriteGuard};

use crate::failure::Failure;

/// What was granted. Dropping it releases it in the background.
pub(crate) enum Held {
    Plain(Guard),
    Writer(WriteGuard),
    Upgradable(UpgradableGuard),
    Set(SetGuard),
}

impl Held {
    pub(crate) fn guards(&self) -> &[Guard] {
        match self {
            Self::Plain(guard) => std::slice::from_ref(guard),
            Self::Writer(guard) => std::slice::from_ref(&**guard),
            Self::Upgradable(guard) => std::slice::from_ref(&**guard),
            Self::Set(guard) => guard.guards(),
        }
    }

    pub(crate) fn remaining(&self) -> Duration {
        self.guards().iter().map(Guard::remaining).min().unwrap_or_default()
    }

    pub(crate) async fn lost(&self) -> Loss {
        match self {
            Self::Set(guard) => guard.lost().await.1,
            Self::Plain(guard) => guard.lost().await,
            Self::Writer(guard) => guard.lost().await,
            Self::Upgradable(guard) => guard.lost().await,
        }
    }

    /// The loss, if the lease is lost now.
    pub(crate) fn loss(&self) -> Option<(Loss, Error)> {
        let lost = self.guards().iter().find(|guard| !guard.is_held())?;
        let loss = lost.lost().now_or_never()?;
        let error = lost.run(std::future::pending::<()>()).now_or_never()?.err()?;
        Some((loss, error))
    }

    fn failure(&self, error: Error) -> Failure {
        match self.loss() {
            Some((loss, _)) if error.is_lost() => Failure::Lost(format!("{error:#}"), loss),
            _ => Failure::Library(error),
        }
    }

    pub(crate) async fn renew(&self) -> Result<(), Failure> {
        let renewed = match self {
            Self::Set(guard) => guard.renew().await,
            _ => match self.guards() {
                [guard] => guard.renew().await,
                _ => Ok(()),
            },
        };
        match renewed {
            Ok(()) => Ok(()),
            Err(error) => Err(self.failure(error)),
        }
    }

    pub(crate) async fn release(self, limit: Option<Duration>) -> Result<(), Failure> {
        let loss = self.loss();
        let released = match (self, limit) {
            (Self::Plain(guard), None) => guard.release().await,
            (Self::Plain(guard), Some(limit)) => guard.release_timeout(limit).await,
            (Self::Writer(guard), None) => guard.release().await,
            (Self::Writer(guard), Some(limit)) => guard.release_timeout(limit).await,
            (Self::Upgradable(guard), None) => guard.release().await,
            (Self::Upgradable(guard), Some(limit)) => guard.release_timeout(limit).await,
            (Self::Set(guard), None) => guard.release().await,
            (Self::Set(guard), Some(limit)) => {
                let guards = guard.into_guards().into_iter().map(|guard| guard.release_timeout(limit));
                futures_util::future::join_all(guards).await.into_iter().collect()
            }
        };
        match (released, loss) {
            // Whatever has become of the release.
            (_, Some((loss, error))) => Err(Failure::Lost(format!("{error:#}"), loss)),
            (Err(error), None) if error.is_lost() => Err(Failure::Lost(format!("{error:#}"), Loss::Gone)),
            (Err(error), None) => Err(error.into()),
            (Ok(()), None) => Ok(()),
        }
    }

    pub(crate) async fn detach(self) -> Result<String, Failure> {
        let guard = match self {
            Self::Plain(guard) => guard,
            Self::Writer(guard) => guard.into(),
            Self::Upgradable(_) | Self::Set(_) => return Err(Failure::unsupported(NO_DETACH)),
        };
        Ok(guard.detach().await?.to_string())
    }

    pub(crate) async fn downgrade(self) -> Result<Self, Failure> {
        match self {
            Self::Writer(guard) => Ok(Self::Plain(guard.downgrade().await?)),
            Self::Upgradable(guard) => Ok(Self::Plain(guard.downgrade().await?)),
            Self::Plain(_) | Self::Set(_) => Err(Failure::unsupported(NO_READER)),
        }
    }
}

pub(crate) const NO_DETACH: &str =
    "the lease of an upgradable reader, and those of several locks together, cannot be detached";
pub(crate) const NO_READER: &str = "only the lease of a writer or of an upgradable reader can be downgraded";
pub(crate) const NO_WRITER: &str =
    "only the lease of an upgradable reader can be upgraded: acquire rwlock(name).upgradable()";
