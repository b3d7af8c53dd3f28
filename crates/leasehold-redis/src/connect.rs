//! Builds the redis crate's connection settings from an address.

use std::time::Duration;

use leasehold_store::OpenError;
use leasehold_store::password::PasswordFile;
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, ConnectionAddr, ConnectionInfo, ErrorKind as RedisErrorKind,
    IntoConnectionInfo as _, ProtocolVersion, RedisConnectionInfo, RedisError,
};
use tokio::task::spawn_blocking;

use super::error::OWN;
use super::limits::{ANSWER_TIMEOUT, CONNECT_TIMEOUT};
use crate::url::{Host, Login, Tls};

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
    /// Without the certificates of `files`.
    info: ConnectionInfo,
    files: Option<TlsFiles>,
    password: Option<PasswordFile>,
}

impl From<ConnectionInfo> for Dial {
    /// The settings of a client of the program.
    fn from(info: ConnectionInfo) -> Self {
        Self { info, files: None, password: None }
    }
}

impl Dial {
    /// Where it leads to.
    pub(super) fn addr(&self) -> &ConnectionAddr {
        self.info.addr()
    }

    /// The settings with the password and the certificates that were read last.
    pub(super) fn latest(&self) -> Result<ConnectionInfo, OpenError> {
        let info = self.info.clone();
        let info = match &self.password {
            None => info,
            Some(file) => with_password(info, &file.latest()),
        };
        let Some(files) = &self.files else { return Ok(info) };
        files.apply(info).map_err(|error| OpenError::invalid(error.to_string()))
    }

    pub(super) fn user(&self) -> Option<&str> {
        self.info.redis_settings().username()
    }

    /// The settings of a new connection. The files of the password and the certificates are read again, because they may have been
    /// replaced: off the runtime's thread, which may have to renew leases meanwhile.
    pub(super) async fn info(&self) -> Result<ConnectionInfo, RedisError> {
        let info = self.info.clone();
        let info = match &self.password {
            None => info,
            Some(file) => {
                if let Err(error) = file.renew().await {
                    tracing::warn!(%error, "the last password is used");
                }
                with_password(info, &file.latest())
            }
        };
        let Some(files) = self.files.clone() else { return Ok(info) };
        let renewed = spawn_blocking(move || files.renew(&info).or_else(|_| files.apply(info))).await;
        renewed
            .unwrap_or_else(|_| Err((RedisErrorKind::Client, OWN, "the runtime has ended".to_owned()).into()))
    }

    /// A client for a new connection with this protocol version.
    pub(super) async fn client(&self, is_resp2: bool) -> Result<redis::Client, RedisError> {
        let protocol = if is_resp2 { ProtocolVersion::RESP2 } else { ProtocolVersion::RESP3 };
        let info = self.info().await?;
        let settings = info.redis_settings().clone().set_protocol(protocol);
        redis::Client::open(info.set_redis_settings(settings))
    }

    /// Connects with this protocol version.
    pub(super) async fn open(
        &self,
        is_resp2: bool,
        config: &AsyncConnectionConfig,
    ) -> Result<MultiplexedConnection, RedisError> {
        self.client(is_resp2).await?.get_multiplexed_async_connection_with_config(config).await
    }
}

fn with_password(info: ConnectionInfo, password: &str) -> ConnectionInfo {
    let settings = info.redis_settings().clone().set_password(password);
    info.set_redis_settings(settings)
}

/// Login, database and TLS settings for every node of a store.
#[derive(Clone)]
pub(super) struct Credentials {
    login: Login,
    password: Option<PasswordFile>,
    database: i64,
    tls: Option<TlsFiles>,
}

impl Credentials {
    /// Reads the files of the password and the certificates that the address names.
    pub(super) fn new(login: &Login, database: i64, tls: Option<&Tls>) -> Result<Self, OpenError> {
        let password = login.password_file.clone().map(PasswordFile::open).transpose()?;
        Ok(Self { login: login.clone(), password, database, tls: tls.map(TlsFiles::read).transpose()? })
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
        let mut settings =
            RedisConnectionInfo::default().set_db(self.database).set_lib_name("leasehold", VERSION);
        if let Some(user) = &self.login.user {
            settings = settings.set_username(user);
        }
        if let Some(password) = &self.login.password {
            settings = settings.set_password(password);
        }
        let info = address.into_connection_info().map_err(invalid)?;
        let info = info.set_tcp_settings(tcp).set_redis_settings(settings);
        if let Some(files) = &self.tls {
            files.apply(info.clone()).map_err(invalid)?;
        }
        Ok(Dial { info, files: self.tls.clone(), password: self.password.clone() })
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
    use std::sync::{Arc, Mutex, PoisonError};

    use leasehold_store::OpenError;
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
        content: Arc<Mutex<TlsCertificates>>,
    }

    impl TlsFiles {
        pub(super) fn read(tls: &Tls) -> Result<Self, OpenError> {
            if rustls::crypto::CryptoProvider::get_default().is_none() {
                // Only if the program has chosen none. Fails only if another thread was faster.
                let _ = rustls::crypto::ring::default_provider().install_default();
            }
            let content = Arc::new(Mutex::new(read_all(tls)?));
            Ok(Self { paths: Arc::new(tls.clone()), content })
        }

        /// Reads the files again. An error, and no change, while they can't be read, or do not fit each other because they are being
        /// replaced.
        pub(super) fn renew(&self, info: &ConnectionInfo) -> Result<ConnectionInfo, ()> {
            let renewed = read_all(&self.paths).map_err(|error| error.to_string());
            let built = renewed.and_then(|content| {
                content.client_tls.as_ref().map_or(Ok(()), check_key)?;
                let info = with(info.clone(), content.clone()).map_err(|error| error.to_string())?;
                *self.content.lock().unwrap_or_else(PoisonError::into_inner) = content;
                Ok(info)
            });
            built
                .map_err(|error| tracing::warn!(error, "certificates not read again: the last ones are used"))
        }

        /// With what was read last.
        pub(super) fn apply(&self, info: ConnectionInfo) -> RedisResult<ConnectionInfo> {
            with(info, self.content.lock().unwrap_or_else(PoisonError::into_inner).clone())
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
                Some(ClientTlsConfig { client_cert: read(certificate)?, client_key: read(key)? })
            }
            _ => None,
        };
        let root_cert = tls.authority.as_deref().map(read).transpose()?;
        Ok(TlsCertificates { client_tls, root_cert })
    }

    fn read(path: &Path) -> Result<Vec<u8>, OpenError> {
        std::fs::read(path).map_err(|error| {
            OpenError::invalid(format!("{} can't be read: {error}", path.display())).with_source(error)
        })
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

        pub(super) fn renew(&self, _: &ConnectionInfo) -> Result<ConnectionInfo, ()> {
            match self.0 {}
        }

        pub(super) fn apply(&self, _: ConnectionInfo) -> RedisResult<ConnectionInfo> {
            match self.0 {}
        }
    }
}
