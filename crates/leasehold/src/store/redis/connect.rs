//! Builds the redis crate's connection settings from an address.

use std::time::Duration;

use redis::{
    ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _, RedisConnectionInfo, io::tcp::TcpSettings,
};

use crate::error::{Error, ErrorKind};
use crate::url::{Host, Login, Tls};

/// Max time that written data may stay unacknowledged. An idle waiter sends nothing, so the kernel sends keepalives: after [`KEEPALIVE_IDLE`] of silence, and then every [`KEEPALIVE_INTERVAL`].
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(3);

/// Login, database and TLS settings for every node of a store.
#[derive(Clone)]
pub(super) struct Credentials {
    login: Login,
    database: i64,
    tls: Option<TlsFiles>,
}

impl Credentials {
    /// Reads the certificate files that the address names.
    pub(super) fn new(login: &Login, database: i64, tls: Option<&Tls>) -> Result<Self, Error> {
        Ok(Self { login: login.clone(), database, tls: tls.map(TlsFiles::read).transpose()? })
    }

    pub(super) fn at(&self, host: &Host) -> Result<ConnectionInfo, Error> {
        let (name, port) = (host.name.clone(), host.port);
        let address = match self.tls {
            None => ConnectionAddr::Tcp(name, port),
            Some(_) => ConnectionAddr::TcpTls { host: name, port, insecure: false, tls_params: None },
        };
        self.info_for_addr(address)
    }

    pub(super) fn info_for_addr(&self, address: ConnectionAddr) -> Result<ConnectionInfo, Error> {
        let invalid = |error: redis::RedisError| Error::new(ErrorKind::Invalid, error.to_string());
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
        match &self.tls {
            None => Ok(info),
            Some(files) => files.apply(info).map_err(invalid),
        }
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

    use redis::{Client, ClientTlsConfig, ConnectionInfo, RedisResult, TlsCertificates};

    use crate::error::{Error, ErrorKind};
    use crate::url::Tls;

    /// The content of the certificate files.
    #[derive(Clone)]
    pub(super) struct TlsFiles(TlsCertificates);

    impl TlsFiles {
        pub(super) fn read(tls: &Tls) -> Result<Self, Error> {
            if rustls::crypto::CryptoProvider::get_default().is_none() {
                // Only if the program has chosen none. Fails only if another thread was faster.
                let _ = rustls::crypto::ring::default_provider().install_default();
            }
            let client_tls = match (&tls.certificate, &tls.key) {
                (Some(certificate), Some(key)) => {
                    Some(ClientTlsConfig { client_cert: read(certificate)?, client_key: read(key)? })
                }
                _ => None,
            };
            let root_cert = tls.authority.as_deref().map(read).transpose()?;
            Ok(Self(TlsCertificates { client_tls, root_cert }))
        }

        pub(super) fn apply(&self, info: ConnectionInfo) -> RedisResult<ConnectionInfo> {
            Ok(Client::build_with_tls(info, self.0.clone())?.get_connection_info().clone())
        }
    }

    fn read(path: &Path) -> Result<Vec<u8>, Error> {
        std::fs::read(path).map_err(|error| {
            Error::new(ErrorKind::Invalid, format!("{} can't be read: {error}", path.display()))
                .with_source(error)
        })
    }
}

/// Addresses with TLS are refused when they are parsed, so there is no value of this type.
#[cfg(not(feature = "tls"))]
mod without_tls {
    use std::convert::Infallible;

    use redis::{ConnectionInfo, RedisResult};

    use crate::error::Error;
    use crate::error::needs_feature;
    use crate::url::Tls;

    #[derive(Clone)]
    pub(super) struct TlsFiles(Infallible);

    impl TlsFiles {
        pub(super) fn read(_: &Tls) -> Result<Self, Error> {
            Err(needs_feature("TLS", "tls"))
        }

        pub(super) fn apply(&self, _: ConnectionInfo) -> RedisResult<ConnectionInfo> {
            match self.0 {}
        }
    }
}
