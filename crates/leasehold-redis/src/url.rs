//! Addresses of Redis servers: one, one behind Sentinels, or the nodes of a cluster.

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;

use leasehold_store::OpenError;
use leasehold_store::credentials::CredentialCache;
use leasehold_store::login::PasswordSource;
use leasehold_store::password::PasswordFile;
use percent_encoding::percent_decode_str;

const REDIS_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

/// The address of Redis, the login and the options of the connection.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl {
    pub(crate) place: Place,
    pub(crate) login: Login,
    pub(crate) database: i64,
    pub(crate) tls: Option<Tls>,
    /// RESP2, with a separate connection for pushes.
    pub(crate) is_resp2: bool,
    /// Whether a proxy restricts what scripts may do; unless the address says so, the first connection finds out.
    pub(crate) is_proxy: Option<bool>,
    shown: String,
}

/// The servers that an address names.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Place {
    Server(Host),
    Socket(PathBuf),
    /// The master of this service, as the sentinels report it.
    Sentinels {
        hosts: Vec<Host>,
        service: String,
        /// The login of the sentinels themselves.
        login: Login,
    },
    Cluster(Vec<Host>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Host {
    pub(crate) name: String,
    pub(crate) port: u16,
}

#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Login {
    pub(crate) user: Option<String>,
    pub(crate) password: PasswordSource,
}

impl Login {
    /// Sets where the password is, unless the address names another place.
    fn set(&mut self, source: PasswordSource) -> Result<(), OpenError> {
        if !self.password.is_none()
            && std::mem::discriminant(&self.password) != std::mem::discriminant(&source)
        {
            return Err(OpenError::invalid("the password is in the address or in a file, not in both"));
        }
        self.password = source;
        Ok(())
    }
}

fn fixed(text: &str) -> PasswordSource {
    PasswordSource::Fixed(some(text))
}

fn file(path: &str) -> PasswordSource {
    PasswordSource::File(PasswordFile::new(PathBuf::from(path)))
}

/// PEM files. Without an authority, the system's certificate authorities count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tls {
    pub(crate) authority: Option<PathBuf>,
    pub(crate) certificate: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
}

impl RedisUrl {
    /// The address of one server, or of one behind Sentinels.
    ///
    /// # Errors
    ///
    /// It is no such address.
    pub fn of_node(url: &str) -> Result<Self, OpenError> {
        match url.split_once(':') {
            Some((
                scheme @ ("redis" | "rediss" | "redis+unix" | "redis-sentinel" | "redis-cluster"),
                rest,
            )) => Self::parse(scheme, rest),
            // The text may be a password, so the message does not contain it.
            _ => Err(OpenError::invalid(
                "a node's address begins with redis:, rediss:, redis+unix: or redis-sentinel:",
            )),
        }
    }

    /// Whether both lead to the same keys, however they are written.
    #[must_use]
    pub fn is_same_server(&self, other: &Self) -> bool {
        self.place == other.place && self.database == other.database
    }

    /// Whether it names files that must be read to connect.
    pub(crate) fn has_files(&self) -> bool {
        self.tls.is_some() || self.logins().any(|login| matches!(login.password, PasswordSource::File(_)))
    }

    /// Those of the servers and of the sentinels.
    fn logins(&self) -> impl Iterator<Item = &Login> {
        let of_sentinels = match &self.place {
            Place::Sentinels { login, .. } => Some(login),
            _ => None,
        };
        [Some(&self.login), of_sentinels].into_iter().flatten()
    }

    /// Whether it leaves out a password, so that credentials of the program's are used.
    #[must_use]
    pub fn takes_credentials(&self) -> bool {
        self.logins().any(|login| login.password.is_none())
    }

    /// The same address with credentials of the program's, where it leaves out a password.
    #[must_use]
    pub fn with_credentials(&self, cache: &CredentialCache) -> Self {
        let mut url = self.clone();
        let take = |login: &mut Login| {
            if login.password.is_none() {
                login.password = PasswordSource::Provider(cache.clone());
            }
        };
        take(&mut url.login);
        if let Place::Sentinels { login, .. } = &mut url.place {
            take(login);
        }
        url
    }

    /// The credentials of the program's, if they are used.
    pub(crate) fn credentials(&self) -> Option<&CredentialCache> {
        self.logins().find_map(|login| match &login.password {
            PasswordSource::Provider(cache) => Some(cache),
            _ => None,
        })
    }

    /// Whether this is the address of a cluster.
    #[must_use]
    pub fn is_cluster(&self) -> bool {
        matches!(self.place, Place::Cluster(_))
    }

    /// Whether this is the address of one server, which is always the same.
    #[must_use]
    pub fn is_one_server(&self) -> bool {
        matches!(self.place, Place::Server(_) | Place::Socket(_))
    }

    /// Parses what follows the scheme and its colon.
    ///
    /// # Errors
    ///
    /// It is no address. The message contains no password.
    pub fn parse(scheme: &str, rest: &str) -> Result<Self, OpenError> {
        let shown = without_secrets(scheme, rest);
        let url = Self {
            place: Place::Socket(PathBuf::new()),
            login: Login::default(),
            database: 0,
            tls: (scheme == "rediss").then(Tls::default),
            is_resp2: false,
            is_proxy: None,
            shown,
        };
        let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
        let rest = rest.strip_prefix("//").unwrap_or(rest);
        let mut url = match scheme {
            "redis+unix" => url.with_socket(rest)?,
            _ => url.with_hosts(scheme, rest)?,
        };
        for parameter in query.into_iter().flat_map(|query| query.split('&')).filter(|text| !text.is_empty())
        {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            url.set(name, &decoded(value)?)?;
        }
        url.checked()
    }

    fn with_socket(mut self, path: &str) -> Result<Self, OpenError> {
        let path = decoded(path)?;
        if !path.starts_with('/') {
            return Err(OpenError::invalid("write redis+unix:///PATH/OF/THE/SOCKET, with the whole path"));
        }
        self.place = Place::Socket(PathBuf::from(path.into_owned()));
        Ok(self)
    }

    fn with_hosts(mut self, scheme: &str, rest: &str) -> Result<Self, OpenError> {
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let hosts = match authority.rsplit_once('@') {
            None => authority,
            Some((login, hosts)) => {
                let (user, password) = login.split_once(':').unwrap_or((login, ""));
                self.login.user = some(&decoded(user)?);
                self.login.password = fixed(&decoded(password)?);
                hosts
            }
        };
        let port = if scheme == "redis-sentinel" { SENTINEL_PORT } else { REDIS_PORT };
        let mut hosts =
            hosts.split(',').map(|host| Host::parse(host, port)).collect::<Result<Vec<_>, _>>()?;
        self.place = match scheme {
            "redis-cluster" => {
                if !path.is_empty() {
                    return Err(OpenError::invalid(
                        "a cluster has one database: write redis-cluster://host[:port],…",
                    ));
                }
                Place::Cluster(hosts)
            }
            "redis-sentinel" => {
                let (service, database) = path.split_once('/').unwrap_or((path, ""));
                if service.is_empty() {
                    return Err(OpenError::invalid(
                        "name the service: redis-sentinel://host[:port],…/service, as it is called in sentinel.conf",
                    ));
                }
                self.database = number(database)?;
                Place::Sentinels { hosts, service: decoded(service)?.into_owned(), login: Login::default() }
            }
            _ => {
                if hosts.len() > 1 {
                    return Err(OpenError::invalid(
                        "one server has one address; several are redis-sentinel: or redis-cluster:",
                    ));
                }
                self.database = number(path)?;
                Place::Server(hosts.remove(0))
            }
        };
        Ok(self)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), OpenError> {
        let is_login = matches!(self.place, Place::Socket(_));
        match (name, &mut self.place) {
            ("user", _) if is_login => self.login.user = some(value),
            ("pass" | "password", _) if is_login => self.login.set(fixed(value))?,
            ("db", _) if is_login => self.database = number(value)?,
            ("password_file", _) => self.login.set(file(value))?,
            ("sentinel_user", Place::Sentinels { login, .. }) => login.user = some(value),
            ("sentinel_password", Place::Sentinels { login, .. }) => login.set(fixed(value))?,
            ("sentinel_password_file", Place::Sentinels { login, .. }) => login.set(file(value))?,
            ("tls", Place::Sentinels { .. } | Place::Cluster(_)) => {
                self.tls = is_true(value)?.then(Tls::default);
            }
            ("ca", _) => self.tls_files(name)?.authority = Some(PathBuf::from(value)),
            ("cert", _) => self.tls_files(name)?.certificate = Some(PathBuf::from(value)),
            ("key", _) => self.tls_files(name)?.key = Some(PathBuf::from(value)),
            ("protocol", _) => {
                self.is_resp2 = match value {
                    "2" | "resp2" => true,
                    "3" | "resp3" => false,
                    _ => return Err(OpenError::invalid("protocol is 2 or 3")),
                };
            }
            ("proxy", Place::Server(_) | Place::Socket(_)) => {
                let wrong = |_| OpenError::invalid("proxy is yes or no");
                self.is_proxy = Some(is_true(value).map_err(wrong)?);
            }
            // The parameter's name may be a part of a password, so the message does not contain it.
            _ => {
                return Err(OpenError::invalid(
                    "the address has an unknown parameter (docs/operations.md lists them); in a password, write \
                     / as %2F, ? as %3F and @ as %40",
                ));
            }
        }
        Ok(())
    }

    fn tls_files(&mut self, name: &str) -> Result<&mut Tls, OpenError> {
        self.tls.as_mut().ok_or_else(|| {
            OpenError::invalid(format!(
                "{name}= is for TLS: write rediss://…, or tls=true before it in a list of hosts"
            ))
        })
    }

    fn checked(self) -> Result<Self, OpenError> {
        if self.tls.is_some() && !cfg!(feature = "tls") {
            let what = if self.shown.starts_with("rediss:") { "rediss:…" } else { "tls=true" };
            return Err(OpenError::needs_feature(what, "tls"));
        }
        if let Some(tls) = &self.tls
            && tls.certificate.is_some() != tls.key.is_some()
        {
            return Err(OpenError::invalid("a client certificate is two files: cert=PATH and key=PATH"));
        }
        if self.is_resp2 && matches!(self.place, Place::Cluster(_)) {
            return Err(OpenError::invalid("clusters speak protocol 3, which every Redis since 6.0 has"));
        }
        Ok(self)
    }
}

/// What a node of a cluster that names nodes by their host names calls one without a host name.
pub(crate) const NO_HOST_NAME: &str = "?";

impl Host {
    /// `name`, `name:port`, `[v6]` or `[v6]:port`.
    pub(crate) fn parse(text: &str, port: u16) -> Result<Self, OpenError> {
        let wrong = || OpenError::invalid("a host is NAME, NAME:PORT, or [IPv6]:PORT");
        let (name, given) = match text.strip_prefix('[').map(|rest| rest.split_once(']')) {
            None => text.split_once(':').map_or((text, None), |(name, port)| (name, Some(port))),
            Some(Some((name, ""))) => (name, None),
            Some(Some((name, rest))) => (name, Some(rest.strip_prefix(':').ok_or_else(wrong)?)),
            Some(None) => return Err(wrong()),
        };
        let port = match given {
            None => port,
            Some(port) => port.parse().ok().filter(|port| *port != 0).ok_or_else(wrong)?,
        };
        if name.is_empty() || name.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err(wrong());
        }
        Ok(Self { name: name.to_owned(), port })
    }

    /// As a server names a node in a redirect: `name:port`, also for an IPv6 address. `None` for a node without a name.
    pub(crate) fn of_redirect(text: &str) -> Option<Self> {
        let (name, port) = text.rsplit_once(':').filter(|(name, _)| *name != NO_HOST_NAME)?;
        let is_bare = name.contains(':') && !name.starts_with('[');
        let text = if is_bare { format!("[{name}]:{port}") } else { text.to_owned() };
        Self::parse(&text, 6379).ok()
    }
}

fn decoded(text: &str) -> Result<Cow<'_, str>, OpenError> {
    // The text may be a password, so the message does not contain it.
    percent_decode_str(text).decode_utf8().map_err(|_| {
        OpenError::invalid(
            "a % in an address must be followed by two hex digits, and the bytes must be UTF-8",
        )
    })
}

fn some(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

fn number(text: &str) -> Result<i64, OpenError> {
    if text.is_empty() {
        return Ok(0);
    }
    let number = text.parse().ok().filter(|number| *number >= 0);
    // The text may be part of a password with a / in it, so the message does not contain it.
    number.ok_or_else(|| {
        OpenError::invalid("a database is a number; in a password, write / as %2F, ? as %3F and @ as %40")
    })
}

fn is_true(text: &str) -> Result<bool, OpenError> {
    match text {
        "" | "true" | "1" | "yes" => Ok(true),
        "false" | "0" | "no" => Ok(false),
        _ => Err(OpenError::invalid("tls is true or false")),
    }
}

/// The address without the part before an `@` and without parameters: both may contain a password.
fn without_secrets(scheme: &str, rest: &str) -> String {
    let rest = rest.trim_start_matches('/');
    let rest = rest.split('?').next().unwrap_or_default();
    let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
    let slashes = if scheme == "redis+unix" { "///" } else { "//" };
    format!("{scheme}:{slashes}{place}")
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_of_a_redirect_may_have_a_bare_ipv6_address() {
        for (text, name) in [
            ("10.0.0.7:6380", "10.0.0.7"),
            ("2001:db8::1:6380", "2001:db8::1"),
            ("[2001:db8::1]:6380", "2001:db8::1"),
            ("node-7.example:6380", "node-7.example"),
        ] {
            let host = Host::of_redirect(text).unwrap();
            assert_eq!((&*host.name, host.port), (name, 6380));
        }
        for text in ["", ":6380", "?:6380", "node", "node:x", "2001:db8::1:"] {
            assert!(Host::of_redirect(text).is_none(), "{text}");
        }
    }
}
