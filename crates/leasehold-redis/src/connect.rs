//! Opens connections, with the settings and the login of an address. No other module does.

use std::time::Duration;

use leasehold_store::credentials::{CredentialCache, CredentialRequest, ServerRole};
use leasehold_store::login::{Login, PasswordSource, Secret};
use leasehold_store::{BoxFuture, OpenError, StoreError};
use redis::aio::PubSub;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, ConnectionAddr, ConnectionInfo, ErrorKind as RedisErrorKind,
    IntoConnectionInfo as _, ProtocolVersion, RedisConnectionInfo, RedisError,
};
use tokio::time::sleep;

use super::error::{OWN, is_login_refused};
use super::limits::{ANSWER_TIMEOUT, CONNECT_TIMEOUT};
use super::own_connection::OwnConnection;
use crate::url::{Host, Login as UrlLogin, RedisUrl, Tls};

/// Max time that written data may stay unacknowledged. An idle waiter sends nothing, so the kernel sends keepalives: after
/// [`KEEPALIVE_IDLE`] of silence, and then every [`KEEPALIVE_INTERVAL`].
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(3);

/// Settings of every connection: how long connecting and an answer may take.
pub(super) fn config() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(Some(CONNECT_TIMEOUT))
        .set_response_timeout(Some(ANSWER_TIMEOUT))
}

/// How one server is connected to.
#[derive(Clone)]
pub(super) struct Dial {
    /// Without the login, and without the certificates of `files`.
    info: ConnectionInfo,
    files: Option<TlsFiles>,
    login: Login,
}

impl From<ConnectionInfo> for Dial {
    /// The settings of a client of the program.
    fn from(info: ConnectionInfo) -> Self {
        let settings = info.redis_settings();
        let own = |word: Option<&str>| word.map(ToOwned::to_owned);
        let login = Login::fixed(own(settings.username()), own(settings.password()));
        Self { info, files: None, login }
    }
}

impl Dial {
    /// The same with credentials of the program's, unless it has a password.
    pub(super) fn with_credentials(self, cache: CredentialCache) -> Self {
        let Secret { user, password: None, .. } = self.login.latest() else { return self };
        let login = PasswordSource::Provider(cache).at(request(ServerRole::Redis, self.info.addr(), user));
        Self { login, ..self }
    }

    /// Where it leads to.
    pub(super) fn addr(&self) -> &ConnectionAddr {
        self.info.addr()
    }

    /// The user that logs in, as far as it is known.
    pub(super) fn user(&self) -> Option<String> {
        self.login.latest().user
    }

    /// Whether its connections log in.
    pub(super) fn has_password(&self) -> bool {
        self.login.is_provided() || self.login.latest().password.is_some()
    }

    /// Whether a provider gives its credentials.
    pub(super) const fn has_provider(&self) -> bool {
        self.login.is_provided()
    }

    /// Has the credentials of new connections at hand: a provider may take longer than an attempt to connect.
    pub(super) async fn prepare(&self) -> Result<(), StoreError> {
        self.login.prepare().await
    }

    /// The settings of a new connection with this login. The files of the certificates are read again, because they may have been
    /// replaced: off the runtime's thread, which may have to renew leases meanwhile.
    async fn info(&self, secret: &Secret, is_resp2: bool) -> Result<ConnectionInfo, RedisError> {
        let protocol = if is_resp2 { ProtocolVersion::RESP2 } else { ProtocolVersion::RESP3 };
        let mut settings = self.info.redis_settings().clone().set_protocol(protocol);
        if let Some(password) = &secret.password {
            settings = settings.set_password(password);
            if let Some(user) = &secret.user {
                settings = settings.set_username(user);
            }
        }
        let info = self.info.clone().set_redis_settings(settings);
        let Some(files) = self.files.clone() else { return Ok(info) };
        files.renew().await;
        files.apply(info)
    }

    /// Connects with this protocol version. The connection logs in again before its credentials expire.
    pub(super) async fn open(
        &self,
        is_resp2: bool,
        config: &AsyncConnectionConfig,
    ) -> Result<OwnConnection, RedisError> {
        let mut secret = self.secret().await?;
        let client = self.client(&secret, is_resp2).await?;
        let mut connected = client.get_multiplexed_async_connection_with_config(config).await;
        if let Err(error) = connected {
            secret = self.other_secret(&secret, error).await?;
            let client = self.client(&secret, is_resp2).await?;
            connected = client.get_multiplexed_async_connection_with_config(config).await;
        }
        Ok(OwnConnection::new(connected?, self.login.clone(), secret))
    }

    /// Connects for messages only, with RESP2. Such a connection can't log in again: it is to be replaced when the second part ends.
    pub(super) async fn open_pubsub(&self) -> Result<(PubSub, BoxFuture<()>), RedisError> {
        let mut secret = self.secret().await?;
        let mut connected = self.client(&secret, true).await?.get_async_pubsub().await;
        if let Err(error) = connected {
            secret = self.other_secret(&secret, error).await?;
            connected = self.client(&secret, true).await?.get_async_pubsub().await;
        }
        let login = self.login.clone();
        let outdated = async move {
            if !secret.will_expire() {
                std::future::pending::<()>().await;
            }
            let next = login.next(&secret).await;
            sleep(next.spread()).await;
        };
        Ok((connected?, Box::pin(outdated)))
    }

    async fn secret(&self) -> Result<Secret, RedisError> {
        self.login.current().await.map_err(|error| own_error(error.message))
    }

    /// What to log in with after this error: if the server has refused credentials of the program's, they may have been replaced, and are
    /// asked for again.
    async fn other_secret(&self, used: &Secret, error: RedisError) -> Result<Secret, RedisError> {
        if !is_login_refused(&error) {
            return Err(error);
        }
        match self.login.replace(used).await {
            None => Err(error),
            Some(other) => other.map_err(|error| own_error(error.message)),
        }
    }

    async fn client(&self, secret: &Secret, is_resp2: bool) -> Result<redis::Client, RedisError> {
        redis::Client::open(self.info(secret, is_resp2).await?)
    }
}

fn own_error(message: String) -> RedisError {
    (RedisErrorKind::Client, OWN, message).into()
}

fn request(role: ServerRole, address: &ConnectionAddr, user: Option<String>) -> CredentialRequest {
    let (host, port) = match address {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            (host.clone(), Some(*port))
        }
        ConnectionAddr::Unix(path) => (path.display().to_string(), None),
        other => (other.to_string(), None),
    };
    CredentialRequest::new(role, host, port, user)
}

/// Login, database and TLS settings for every node of a store.
#[derive(Clone)]
pub(super) struct Credentials {
    login: UrlLogin,
    role: ServerRole,
    database: i64,
    tls: Option<TlsFiles>,
}

impl Credentials {
    /// Those of the servers of an address. Reads the files of the password and the certificates that it names.
    pub(super) fn of_servers(url: &RedisUrl) -> Result<Self, OpenError> {
        let role = if url.is_cluster() { ServerRole::ClusterNode } else { ServerRole::Redis };
        Self::new(&url.login, role, url.database, url.tls.as_ref())
    }

    /// Those of the sentinels of an address.
    pub(super) fn of_sentinels(login: &UrlLogin, url: &RedisUrl) -> Result<Self, OpenError> {
        Self::new(login, ServerRole::Sentinel, 0, url.tls.as_ref())
    }

    fn new(login: &UrlLogin, role: ServerRole, database: i64, tls: Option<&Tls>) -> Result<Self, OpenError> {
        if let PasswordSource::File(file) = &login.password {
            file.open()?;
        }
        Ok(Self { login: login.clone(), role, database, tls: tls.map(TlsFiles::read).transpose()? })
    }

    /// Whether a provider gives them.
    pub(super) const fn has_provider(&self) -> bool {
        matches!(self.login.password, PasswordSource::Provider(_))
    }

    /// The same for a server that is a node of a cluster, as it has turned out.
    pub(super) fn of_cluster(self) -> Self {
        Self { role: ServerRole::ClusterNode, ..self }
    }

    pub(super) fn at(&self, host: &Host) -> Result<Dial, OpenError> {
        let (name, port) = (host.name.clone(), host.port);
        let address = match self.tls {
            None => ConnectionAddr::Tcp(name, port),
            Some(_) => ConnectionAddr::TcpTls { host: name, port, insecure: false, tls_params: None },
        };
        self.at_addr(address)
    }

    pub(super) fn at_addr(&self, address: ConnectionAddr) -> Result<Dial, OpenError> {
        let invalid = |error: RedisError| OpenError::invalid(error.to_string());
        let keepalive =
            socket2::TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL);
        let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
        #[cfg(target_os = "linux")]
        let tcp = tcp.set_user_timeout(TCP_USER_TIMEOUT);
        let settings =
            RedisConnectionInfo::default().set_db(self.database).set_lib_name("leasehold", VERSION);
        let info = address.into_connection_info().map_err(invalid)?;
        let info = info.set_tcp_settings(tcp).set_redis_settings(settings);
        if let Some(files) = &self.tls {
            files.apply(info.clone()).map_err(invalid)?;
        }
        let login = self.login.password.at(request(self.role, info.addr(), self.login.user.clone()));
        Ok(Dial { info, files: self.tls.clone(), login })
    }
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

#[cfg(feature = "tls")]
use with_tls::TlsFiles;
#[cfg(not(feature = "tls"))]
use without_tls::TlsFiles;

#[cfg(feature = "tls")]
mod with_tls {
    use std::path::Path;
    use std::sync::Arc;

    use leasehold_store::OpenError;
    use leasehold_store::reread::{Reread, read_file};
    use redis::{Client, ClientTlsConfig, ConnectionInfo, RedisResult, TlsCertificates};
    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use rustls::sign::CertifiedKey;

    use crate::url::Tls;

    /// The certificate files that an address names, shared by all connections of a store.
    #[derive(Clone)]
    pub(super) struct TlsFiles {
        paths: Arc<Tls>,
        /// What was read from them last.
        content: Arc<Reread<TlsCertificates>>,
    }

    impl TlsFiles {
        pub(super) fn read(tls: &Tls) -> Result<Self, OpenError> {
            if rustls::crypto::CryptoProvider::get_default().is_none() {
                // Only if the program has chosen none. Fails only if another thread was faster.
                let _ = rustls::crypto::ring::default_provider().install_default();
            }
            let content = Arc::new(Reread::new(read_all(tls)?));
            Ok(Self { paths: Arc::new(tls.clone()), content })
        }

        /// Reads the files again. While they can't be read, or do not fit each other because they are being replaced, what was read last counts.
        pub(super) async fn renew(&self) {
            let paths = self.paths.clone();
            if let Err(error) = self.content.renew(move || read_all(&paths)).await {
                tracing::warn!(%error, "certificates not read again: the last ones are used");
            }
        }

        /// With what was read last.
        pub(super) fn apply(&self, info: ConnectionInfo) -> RedisResult<ConnectionInfo> {
            with(info, self.content.latest())
        }
    }

    /// Fails if the key is not that of the certificate: a connection would fail with it, where the last ones would do.
    fn check_key(client: &ClientTlsConfig) -> Result<(), String> {
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&client.client_cert).collect();
        let chain = chain.map_err(|error| error.to_string())?;
        let key = PrivateKeyDer::from_pem_slice(&client.client_key).map_err(|error| error.to_string())?;
        let Some(provider) = rustls::crypto::CryptoProvider::get_default() else { return Ok(()) };
        CertifiedKey::from_der(chain, key, provider).map(drop).map_err(|error| error.to_string())
    }

    fn with(info: ConnectionInfo, content: TlsCertificates) -> RedisResult<ConnectionInfo> {
        Ok(Client::build_with_tls(info, content)?.get_connection_info().clone())
    }

    fn read_all(tls: &Tls) -> Result<TlsCertificates, OpenError> {
        let client_tls = match (&tls.certificate, &tls.key) {
            (Some(certificate), Some(key)) => {
                let own =
                    ClientTlsConfig { client_cert: read_certificates(certificate)?, client_key: read(key)? };
                check_key(&own).map_err(OpenError::invalid)?;
                Some(own)
            }
            _ => None,
        };
        let root_cert = tls.authority.as_deref().map(read_certificates).transpose()?;
        Ok(TlsCertificates { client_tls, root_cert })
    }

    /// A file without a certificate, as while it is being written, is an error.
    fn read_certificates(path: &Path) -> Result<Vec<u8>, OpenError> {
        let content = read(path)?;
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&content).collect();
        match found {
            Ok(all) if !all.is_empty() => Ok(content),
            Ok(_) => Err(unreadable(path, &"it has no certificate (PEM)")),
            Err(error) => Err(unreadable(path, &error)),
        }
    }

    fn read(path: &Path) -> Result<Vec<u8>, OpenError> {
        read_file(path).map_err(|error| unreadable(path, &error).with_source(error))
    }

    fn unreadable(path: &Path, why: &dyn std::fmt::Display) -> OpenError {
        OpenError::invalid(format!("{} can't be read: {why}", path.display()))
    }
}

/// Addresses with TLS are refused when they are parsed, so there is no value of this type.
#[cfg(not(feature = "tls"))]
mod without_tls {
    use std::convert::Infallible;

    use leasehold_store::OpenError;
    use redis::{ConnectionInfo, RedisResult};

    use crate::url::Tls;

    #[derive(Clone)]
    pub(super) struct TlsFiles(Infallible);

    impl TlsFiles {
        pub(super) fn read(_: &Tls) -> Result<Self, OpenError> {
            Err(OpenError::needs_feature("TLS", "tls"))
        }

        pub(super) async fn renew(&self) {
            match self.0 {}
        }

        pub(super) fn apply(&self, _: ConnectionInfo) -> RedisResult<ConnectionInfo> {
            match self.0 {}
        }
    }
}
