//! How a store logs in to its servers: with a password that stays, one in a file, or credentials of the program's.

use std::sync::Arc;
use std::time::Duration;

use crate::StoreError;
use crate::credentials::{Account, CredentialCache, CredentialRequest, Issued};
use crate::password::PasswordFile;

/// Where the passwords of new connections come from.
#[derive(Clone, PartialEq, Eq)]
pub enum PasswordSource {
    /// The address or the environment; or there is none.
    Fixed(Option<String>),
    /// A file, which is read for each connection.
    File(PasswordFile),
    /// Code of the program, which may name another user, too.
    Provider(CredentialCache),
}

impl Default for PasswordSource {
    fn default() -> Self {
        Self::Fixed(None)
    }
}

impl PasswordSource {
    /// Whether there is none.
    #[must_use]
    pub const fn is_none(&self) -> bool {
        matches!(self, Self::Fixed(None))
    }

    /// The login of the connections to one server.
    #[must_use]
    pub fn at(&self, request: CredentialRequest) -> Login {
        let user = request.user.clone();
        let password = match self {
            Self::Fixed(password) => Password::Fixed(password.clone()),
            Self::File(file) => Password::File(file.clone()),
            Self::Provider(cache) => Password::Provider(cache.account(request)),
        };
        Login { user, password }
    }
}

/// The login of the connections to one server.
#[derive(Clone)]
pub struct Login {
    /// Of the address.
    user: Option<String>,
    password: Password,
}

#[derive(Clone)]
enum Password {
    Fixed(Option<String>),
    File(PasswordFile),
    Provider(Arc<Account>),
}

/// What a connection logs in with.
#[derive(Clone, Default)]
pub struct Secret {
    /// None: the server's default.
    pub user: Option<String>,
    /// None: it does not log in.
    pub password: Option<String>,
    /// From a provider, which may give others.
    issued: Option<Issued>,
}

impl Secret {
    /// Whether others follow it while a connection is open.
    #[must_use]
    pub const fn may_change(&self) -> bool {
        self.issued.is_some()
    }

    /// Whether the server accepts it for a limited time only.
    #[must_use]
    pub fn will_expire(&self) -> bool {
        self.issued.as_ref().is_some_and(Issued::will_expire)
    }

    /// A random time after which one of many connections logs in with it.
    #[must_use]
    pub fn spread(&self) -> Duration {
        self.issued.as_ref().map_or(Duration::ZERO, Issued::spread)
    }
}

impl Login {
    /// A login that stays.
    #[must_use]
    pub const fn fixed(user: Option<String>, password: Option<String>) -> Self {
        Self { user, password: Password::Fixed(password) }
    }

    /// Without a provider's answer, what is known of it.
    #[must_use]
    pub fn latest(&self) -> Secret {
        let plain = |password| Secret { user: self.user.clone(), password, issued: None };
        match &self.password {
            Password::Fixed(password) => plain(password.clone()),
            Password::File(file) => plain(file.latest()),
            Password::Provider(account) => {
                account.issued().map_or_else(|| plain(None), |issued| self.of(issued))
            }
        }
    }

    fn of(&self, issued: Issued) -> Secret {
        let user = issued.credentials.user.clone().or_else(|| self.user.clone());
        Secret { user, password: issued.credentials.password.clone(), issued: Some(issued) }
    }

    /// What a new connection logs in with. A file is read again, because the password may have been changed. While it can't be read, the
    /// password is the one before. A provider is asked if what it gave last has expired.
    ///
    /// # Errors
    ///
    /// The provider fails.
    pub async fn current(&self) -> Result<Secret, StoreError> {
        match &self.password {
            Password::Fixed(_) => {}
            Password::File(file) => {
                if let Err(error) = file.renew().await {
                    tracing::warn!(%error, "the last password is used");
                }
            }
            Password::Provider(account) => return Ok(self.of(account.current().await?)),
        }
        Ok(self.latest())
    }

    /// Has a provider asked, if it will be: it may take longer than an attempt to connect.
    ///
    /// # Errors
    ///
    /// The provider fails.
    pub async fn prepare(&self) -> Result<(), StoreError> {
        match &self.password {
            Password::Provider(account) => account.current().await.map(drop),
            _ => Ok(()),
        }
    }

    /// Whether a provider gives its credentials.
    #[must_use]
    pub const fn is_provided(&self) -> bool {
        matches!(self.password, Password::Provider(_))
    }

    /// Another one, after the server has refused this one. `None` if there is no provider.
    ///
    /// # Errors
    ///
    /// The provider fails.
    pub async fn replace(&self, refused: &Secret) -> Option<Result<Secret, StoreError>> {
        let (Password::Provider(account), Some(issued)) = (&self.password, &refused.issued) else {
            return None;
        };
        Some(account.replace(issued).await.map(|issued| self.of(issued)))
    }

    /// Waits until the provider has given another one. Never ends without a provider.
    pub async fn next(&self, known: &Secret) -> Secret {
        match (&self.password, &known.issued) {
            (Password::Provider(account), Some(issued)) => self.of(account.next(issued).await),
            _ => std::future::pending().await,
        }
    }
}
