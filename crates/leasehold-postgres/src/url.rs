//! Addresses of PostgreSQL: the URLs and the environment that libpq's users know.
//!
//! tokio-postgres reads the parameters that it knows. This file reads those that it does not: the files of TLS, and leasehold's
//! own. What an address leaves out comes from the environment (`PGHOST`, `PGUSER`, …), as with libpq.

mod passfile;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr as _;
use std::time::Duration;

use leasehold_store::OpenError;
use leasehold_store::credentials::CredentialCache;
use leasehold_store::login::PasswordSource;
use leasehold_store::password::PasswordFile;
use percent_encoding::percent_decode_str;
use tokio_postgres::Config;
use tokio_postgres::config::{ChannelBinding, SslMode as ConfigSslMode, SslNegotiation};

pub(crate) use passfile::DEFAULT_PORT;
use passfile::SOCKETS;

/// The schema of the tables unless the address names another.
const DEFAULT_SCHEMA: &str = "leasehold";

/// The connections for commands unless the address says otherwise. A notification needs one more.
const DEFAULT_CONNECTIONS: usize = 4;

/// PostgreSQL truncates longer names.
const MAX_IDENTIFIER: usize = 63;

/// The server, and the settings of the store.
#[derive(Clone, PartialEq, Eq)]
pub struct PostgresUrl {
    pub(crate) config: Config,
    pub(crate) ssl_mode: SslMode,
    pub(crate) ssl_files: SslFiles,
    /// Where notifications come from, if the address itself leads through a pooler.
    pub(crate) listen: Option<Box<PostgresUrl>>,
    pub(crate) pooler: Pooler,
    /// A plain lower-case identifier, which needs no quotes.
    pub(crate) schema: String,
    /// A role that may own the schema and what is in it.
    pub(crate) owner: Option<String>,
    /// A value of the setting of this name; the server's own if there is none.
    pub(crate) synchronous_commit: Option<&'static str>,
    pub(crate) connections: usize,
    /// libpq's file of passwords, if the address names another than the usual one.
    passfile: Option<PathBuf>,
    pub(crate) password: PasswordSource,
    /// The address has a password, or names a file of its own that has it.
    has_password: bool,
    shown: String,
}

/// As libpq names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SslMode {
    Disable,
    Prefer,
    /// With TLS, without verification of the server.
    Require,
    /// The certificate is of an authority that is trusted.
    VerifyCa,
    /// It also has the host's name.
    VerifyFull,
}

/// PEM files. Without an authority, the system's certificate authorities count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SslFiles {
    pub(crate) authority: Option<PathBuf>,
    pub(crate) certificate: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
}

/// Whether a pooler gives each transaction another connection to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pooler {
    Detect,
    Yes,
    No,
}

impl PostgresUrl {
    /// Parses what follows `postgres:` in an address, and the environment.
    ///
    /// # Errors
    ///
    /// What is wrong with it, and what to write.
    pub fn parse(rest: &str) -> Result<Self, OpenError> {
        Self::parse_with(rest, &|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// Of a whole address.
    #[cfg(test)]
    pub(crate) fn of(url: &str) -> Self {
        let rest = url.strip_prefix("postgres:").expect("an address of PostgreSQL");
        Self::parse(rest).unwrap()
    }

    /// Whether it leaves out a password, so that credentials of the program's are used. They take precedence over the environment.
    #[must_use]
    pub fn takes_credentials(&self) -> bool {
        !self.has_password || self.listen.as_ref().is_some_and(|listen| listen.takes_credentials())
    }

    /// The same address with credentials of the program's, where it leaves out a password.
    #[must_use]
    pub fn with_credentials(&self, cache: &CredentialCache) -> Self {
        let mut url = self.clone();
        url.listen = url.listen.map(|listen| Box::new(listen.with_credentials(cache)));
        if !url.has_password {
            url.password = PasswordSource::Provider(cache.clone());
        }
        url
    }

    /// The schema of the tables.
    #[must_use]
    pub fn schema(&self) -> &str {
        &self.schema
    }

    fn parse_with(rest: &str, environment: &dyn Fn(&str) -> Option<String>) -> Result<Self, OpenError> {
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let mut url = Self {
            config: Config::new(),
            ssl_mode: SslMode::Prefer,
            ssl_files: SslFiles::default(),
            listen: None,
            pooler: Pooler::Detect,
            schema: DEFAULT_SCHEMA.to_owned(),
            owner: None,
            synchronous_commit: None,
            connections: DEFAULT_CONNECTIONS,
            passfile: None,
            password: PasswordSource::default(),
            has_password: false,
            shown: shown(rest),
        };
        url.set_ssl_from(environment)?;
        let mut drivers = Vec::new();
        for parameter in query.split('&').filter(|text| !text.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            if !url.set(name, &decoded(value)?, environment)? {
                drivers.push(parameter);
            }
        }
        let place = place.strip_prefix("//").unwrap_or(place);
        if is_connection_string(place) {
            return Err(OpenError::invalid(
                "write the address as postgres://user:password@host:port/database, and not in the form host=… password=…",
            ));
        }
        let address = format!("postgres://{place}?{}", drivers.join("&"));
        // The text may have the password, and the driver's error may have the text.
        url.config = Config::from_str(&address).map_err(|_| {
            OpenError::invalid(
                "the address is not as postgres://user:password@host:port/database?parameter=value, or has an unknown \
                 parameter (docs/postgres.md lists them); in a password, write / as %2F, ? as %3F and @ as %40",
            )
        })?;
        url.fill_from(environment)?;
        url.checked()
    }

    /// Takes a parameter that the driver does not know. Returns false for all others.
    fn set(
        &mut self,
        name: &str,
        value: &str,
        environment: &dyn Fn(&str) -> Option<String>,
    ) -> Result<bool, OpenError> {
        match name {
            "sslmode" => self.ssl_mode = ssl_mode(value)?,
            "sslrootcert" => self.ssl_files.authority = Some(PathBuf::from(value)),
            "sslcert" => self.ssl_files.certificate = Some(PathBuf::from(value)),
            "sslkey" => self.ssl_files.key = Some(PathBuf::from(value)),
            "passfile" => self.passfile = Some(PathBuf::from(value)),
            "password_file" => {
                let file = PasswordFile::new(PathBuf::from(value));
                file.open()?;
                self.password = PasswordSource::File(file);
            }
            "schema" => self.schema = identifier(value)?,
            "synchronous_commit" => self.synchronous_commit = Some(synchronous_commit(value)?),
            "owner" => self.owner = Some(role(value)?),
            "pooler" => {
                self.pooler = match value {
                    "auto" => Pooler::Detect,
                    "yes" | "true" => Pooler::Yes,
                    "no" | "false" => Pooler::No,
                    _ => return Err(OpenError::invalid("pooler is auto, yes or no")),
                };
            }
            "connections" => {
                self.connections = value
                    .parse()
                    .ok()
                    .filter(|count| (1..=64).contains(count))
                    .ok_or_else(|| OpenError::invalid("connections is a number from 1 to 64"))?;
            }
            "listen" => {
                let rest = value.strip_prefix("postgresql:").or_else(|| value.strip_prefix("postgres:"));
                let rest = rest.ok_or_else(|| {
                    OpenError::invalid(
                        "listen is the address of the same database without a pooler, with % encoded",
                    )
                })?;
                self.listen = Some(Box::new(Self::parse_with(rest, environment)?));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn set_ssl_from(&mut self, environment: &dyn Fn(&str) -> Option<String>) -> Result<(), OpenError> {
        if let Some(mode) = environment("PGSSLMODE") {
            self.ssl_mode = ssl_mode(&mode)?;
        }
        self.ssl_files = SslFiles {
            authority: environment("PGSSLROOTCERT").map(PathBuf::from),
            certificate: environment("PGSSLCERT").map(PathBuf::from),
            key: environment("PGSSLKEY").map(PathBuf::from),
        };
        Ok(())
    }

    /// What the address leaves out, as libpq does it.
    fn fill_from(&mut self, environment: &dyn Fn(&str) -> Option<String>) -> Result<(), OpenError> {
        let config = &mut self.config;
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            let hosts = environment("PGHOST").unwrap_or_else(|| {
                let is_there = std::path::Path::new(SOCKETS).exists();
                if is_there { SOCKETS } else { "localhost" }.to_owned()
            });
            for host in hosts.split(',') {
                config.host(host);
            }
        }
        if config.get_ports().is_empty()
            && let Some(ports) = environment("PGPORT")
        {
            for port in ports.split(',') {
                config.port(port.trim().parse().map_err(|_| OpenError::invalid("PGPORT is not a port"))?);
            }
        }
        if config.get_user().is_none()
            && let Some(user) = environment("PGUSER")
        {
            config.user(user);
        }
        if let PasswordSource::File(file) = &self.password {
            if config.get_password().is_some() {
                return Err(OpenError::invalid("the password is in the address or in a file, not in both"));
            }
            file.latest().map(|password| config.password(password));
        }
        self.has_password = config.get_password().is_some() || self.passfile.is_some();
        if config.get_password().is_none()
            && let Some(password) = environment("PGPASSWORD")
        {
            config.password(password);
        }
        if config.get_dbname().is_none()
            && let Some(name) = environment("PGDATABASE")
        {
            config.dbname(name);
        }
        if config.get_password().is_none()
            && let Some(file) = self.passfile.clone().or_else(|| passfile::path(environment))
            // The driver's default is the name of the process's user, which is this one.
            && let Some(user) = config.get_user().map(ToOwned::to_owned).or_else(|| environment("USER"))
        {
            let of = config.clone();
            let file = PasswordFile::with(file, move |path| passfile::find(path, &of, &user));
            file.open()?;
            if let Some(password) = file.latest() {
                config.password(password);
                self.password = PasswordSource::File(file);
            }
        }
        if config.get_application_name().is_none() {
            config.application_name(environment("PGAPPNAME").unwrap_or_else(|| "leasehold".to_owned()));
        }
        if config.get_connect_timeout().is_none()
            && let Some(seconds) = environment("PGCONNECT_TIMEOUT")
        {
            let seconds: i32 = seconds
                .trim()
                .parse()
                .map_err(|_| OpenError::invalid("PGCONNECT_TIMEOUT is not a number"))?;
            // As in an address, any other number means the default.
            if let Ok(seconds @ 1..) = u64::try_from(seconds) {
                config.connect_timeout(Duration::from_secs(seconds));
            }
        }
        Ok(())
    }

    fn checked(mut self) -> Result<Self, OpenError> {
        if self.ssl_mode >= SslMode::Require && !cfg!(feature = "tls") {
            return Err(OpenError::needs_feature("sslmode with TLS", "tls"));
        }
        if self.ssl_files.certificate.is_some() != self.ssl_files.key.is_some() {
            return Err(OpenError::invalid("a client certificate needs both sslcert and sslkey"));
        }
        if self.config.get_channel_binding() == ChannelBinding::Require {
            return Err(OpenError::invalid(
                "channel_binding=require is not supported: sslmode=verify-full also proves who the server is",
            ));
        }
        if self.config.get_ssl_negotiation() == SslNegotiation::Direct {
            return Err(OpenError::invalid(
                "sslnegotiation=direct is not supported: leave it out, which costs one round trip for each connection",
            ));
        }
        self.config.ssl_mode(match self.ssl_mode {
            SslMode::Disable => ConfigSslMode::Disable,
            SslMode::Prefer if !cfg!(feature = "tls") => ConfigSslMode::Disable,
            SslMode::Prefer => ConfigSslMode::Prefer,
            _ => ConfigSslMode::Require,
        });
        Ok(self)
    }
}

/// The address without the login and the parameters.
fn shown(rest: &str) -> String {
    let place = rest.strip_prefix("//").unwrap_or(rest);
    // Everything up to the last @ may be a part of a password.
    let place = place.rsplit_once('@').map_or(place, |(_, place)| place);
    if is_connection_string(place) {
        return "postgres:".to_owned();
    }
    format!("postgres://{}", place.split_once('?').map_or(place, |(place, _)| place))
}

/// Whether this is libpq's other form, `host=… password=…`, and no list of hosts.
fn is_connection_string(place: &str) -> bool {
    let place = place.rsplit_once('@').map_or(place, |(_, place)| place);
    let hosts = place.split(['/', '?']).next().unwrap_or_default();
    hosts.contains(|c: char| c == '=' || c.is_whitespace())
}

/// The name of a role, which stands between quotes in a statement.
fn role(name: &str) -> Result<String, OpenError> {
    let is_plain = |c: char| !c.is_control() && !matches!(c, '\'' | '\\');
    if name.is_empty() || !name.chars().all(is_plain) {
        return Err(OpenError::invalid("owner is the name of a role, without quotes and backslashes"));
    }
    Ok(name.to_owned())
}

fn decoded(text: &str) -> Result<String, OpenError> {
    let text =
        percent_decode_str(text).decode_utf8().map_err(|_| OpenError::invalid("the address is not UTF-8"))?;
    Ok(text.into_owned())
}

fn ssl_mode(value: &str) -> Result<SslMode, OpenError> {
    Ok(match value {
        "disable" => SslMode::Disable,
        "allow" | "prefer" => SslMode::Prefer,
        "require" => SslMode::Require,
        "verify-ca" => SslMode::VerifyCa,
        "verify-full" => SslMode::VerifyFull,
        _ => return Err(OpenError::invalid("sslmode is disable, prefer, require, verify-ca or verify-full")),
    })
}

fn synchronous_commit(value: &str) -> Result<&'static str, OpenError> {
    let known = ["on", "off", "local", "remote_write", "remote_apply"];
    let found = known.into_iter().find(|known| *known == value);
    found.ok_or_else(|| {
        OpenError::invalid("synchronous_commit is on, off, local, remote_write or remote_apply")
    })
}

/// A name that needs no quotes in SQL.
fn identifier(name: &str) -> Result<String, OpenError> {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if name.len() <= MAX_IDENTIFIER
        && name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && name.chars().all(is_part)
        && !name.starts_with("pg_")
    {
        return Ok(name.to_owned());
    }
    Err(OpenError::invalid(
        "a schema's name has lower-case letters, digits and _, and does not begin with pg_",
    ))
}

impl fmt::Debug for PostgresUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Display for PostgresUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

#[cfg(test)]
mod tests {
    use tokio_postgres::config::Host;

    use super::*;

    fn parse(rest: &str) -> Result<PostgresUrl, OpenError> {
        PostgresUrl::parse_with(rest, &|_| None)
    }

    #[test]
    fn address_and_parameters_are_parsed() {
        let url = parse(
            "//me:s%40@db:7000/app?connect_timeout=3&schema=my_locks&synchronous_commit=off&connections=9&pooler=yes",
        )
        .unwrap();
        assert_eq!(url.config.get_hosts(), [Host::Tcp("db".to_owned())]);
        assert_eq!((url.config.get_user(), url.config.get_password()), (Some("me"), Some(&b"s@"[..])));
        assert_eq!((url.config.get_dbname(), url.config.get_ports()), (Some("app"), &[7_000][..]));
        assert_eq!(url.config.get_connect_timeout(), Some(&Duration::from_secs(3)));
        assert_eq!((url.schema.as_str(), url.connections), ("my_locks", 9));
        assert_eq!((url.synchronous_commit, url.pooler), (Some("off"), Pooler::Yes));
        assert_eq!(url.to_string(), "postgres://db:7000/app");
        let listen = parse("//pool/app?listen=postgres://db:5432/app").unwrap().listen.unwrap();
        assert_eq!(listen.config.get_hosts(), [Host::Tcp("db".to_owned())]);
    }

    #[test]
    fn time_to_connect_of_the_environment_is_positive() {
        let limit = |seconds: &str, rest| {
            let environment = |name: &str| (name == "PGCONNECT_TIMEOUT").then(|| seconds.to_owned());
            PostgresUrl::parse_with(rest, &environment).map(|url| url.config.get_connect_timeout().copied())
        };
        assert_eq!(limit(" 7 ", "//db/app").unwrap(), Some(Duration::from_secs(7)));
        assert_eq!(limit("7", "//db/app?connect_timeout=3").unwrap(), Some(Duration::from_secs(3)));
        for seconds in ["0", "-1"] {
            assert_eq!(limit(seconds, "//db/app").unwrap(), None);
        }
        assert!(limit("soon", "//db/app").unwrap_err().is_invalid());
    }

    #[test]
    fn what_the_driver_cannot_do_is_refused() {
        for parameter in ["channel_binding=require", "sslnegotiation=direct"] {
            let error = parse(&format!("//db/app?{parameter}")).unwrap_err();
            assert!(error.is_invalid() && error.to_string().contains(parameter), "{error}");
        }
        assert!(parse("//db/app?channel_binding=prefer&sslnegotiation=postgres").is_ok());
    }

    #[test]
    fn environment_fills_what_the_address_leaves_out() {
        let environment = |name: &str| {
            let value = match name {
                "PGHOST" => "elsewhere",
                "PGPORT" => "1234",
                "PGUSER" => "user",
                "PGPASSWORD" => "password",
                "PGDATABASE" => "database",
                "PGSSLMODE" => "disable",
                _ => return None,
            };
            Some(value.to_owned())
        };
        let url = PostgresUrl::parse_with("//", &environment).unwrap();
        assert_eq!(url.config.get_hosts(), [Host::Tcp("elsewhere".to_owned())]);
        assert_eq!((url.config.get_user(), url.config.get_dbname()), (Some("user"), Some("database")));
        assert_eq!((url.config.get_ports(), url.ssl_mode), (&[1_234][..], SslMode::Disable));
        assert_eq!(url.config.get_password(), Some(&b"password"[..]));
        let own = PostgresUrl::parse_with("//me:mine@here/my?sslmode=prefer", &environment).unwrap();
        assert_eq!(own.config.get_hosts(), [Host::Tcp("here".to_owned())]);
        assert_eq!((own.config.get_user(), own.config.get_dbname()), (Some("me"), Some("my")));
        assert_eq!((own.config.get_password(), own.ssl_mode), (Some(&b"mine"[..]), SslMode::Prefer));
    }

    #[cfg(unix)]
    #[test]
    fn password_file_counts_after_address_and_environment() {
        use std::io::Write as _;

        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"host:*:*:me:filed\n").unwrap();
        let path = file.path().display().to_string();
        let password = |rest: &str, environment: &dyn Fn(&str) -> Option<String>| {
            let url = PostgresUrl::parse_with(rest, environment).unwrap();
            url.config.get_password().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
        };
        let usual = |name: &str| (name == "PGPASSFILE").then(|| path.clone());
        assert_eq!(password("//me@host", &usual).as_deref(), Some("filed"));
        assert_eq!(password("//me:own@host", &usual).as_deref(), Some("own"));
        assert_eq!(password("//you@host", &usual), None);
        assert_eq!(password(&format!("//me@host?passfile={path}"), &|_| None).as_deref(), Some("filed"));
        let both = |name: &str| if name == "PGPASSWORD" { Some("set".to_owned()) } else { usual(name) };
        assert_eq!(password("//me@host", &both).as_deref(), Some("set"));
    }

    #[test]
    fn invalid_parameter_is_refused() {
        for rest in [
            "//h?nonsense=1",
            "//h:port",
            "//h?schema=My",
            "//h?schema=pg_catalog",
            "//h?schema=a%22;drop",
            "//h?connections=0",
            "//h?synchronous_commit=maybe",
            "//h?pooler=perhaps",
            "//h?listen=elsewhere",
            "//h?owner=",
            "//h?owner=a'b",
            "//h?owner=a%5Cb",
            "//h?sslmode=sometimes",
            "//h?sslcert=a",
        ] {
            assert!(parse(rest).unwrap_err().is_invalid(), "{rest}");
        }
    }

    #[test]
    fn password_is_never_printed() {
        for rest in [
            "//me:hunter2@host/db",
            "//me:hun@hunter2@host",
            "//me:hun/hunter2@host",
            "//me:a?hunter2@host",
            "//host/db?password=hunter2",
            "//host?hunter2",
            "//host:hunter2",
            "host=127.0.0.1 password=hunter2",
            "password=hunter2",
            "//host=h password=hunter2/db",
            "//h?listen=postgres://a:hunter2@h",
        ] {
            match parse(rest) {
                Ok(url) => assert!(!url.to_string().contains("hunter2"), "{url}"),
                Err(error) => {
                    assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
                }
            }
        }
    }
}
