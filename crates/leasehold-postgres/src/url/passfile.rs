//! libpq's password file: `host:port:database:user:password` in each line, with `*` for any value and `\` before `:` and `\`.
//!
//! As with libpq, the first line that fits counts, and a file that others may read is ignored.

use std::path::{Path, PathBuf};

use leasehold_store::OpenError;
use tokio_postgres::Config;
use tokio_postgres::config::Host;

/// Where Debian's servers have their socket, and its libpq looks for it.
pub(super) const SOCKETS: &str = "/var/run/postgresql";

pub(crate) const DEFAULT_PORT: u16 = 5432;

/// The login that a line must fit.
#[derive(Clone, Copy, Debug)]
struct Login<'l> {
    host: &'l str,
    port: u16,
    database: &'l str,
    user: &'l str,
}

/// The file that libpq would read.
pub(super) fn path(environment: &dyn Fn(&str) -> Option<String>) -> Option<PathBuf> {
    environment("PGPASSFILE")
        .map(PathBuf::from)
        .or_else(|| environment("HOME").map(|home| Path::new(&home).join(".pgpass")))
}

/// The password of these servers. `None` if the file has none, or is not there.
pub(super) fn find(path: &Path, config: &Config, user: &str) -> Result<Option<String>, OpenError> {
    let Some(text) = read(path) else { return Ok(None) };
    let database = config.get_dbname().unwrap_or(user);
    let ports = config.get_ports();
    let mut found: Option<String> = None;
    let (hosts, addresses) = (config.get_hosts(), config.get_hostaddrs());
    for at in 0..hosts.len().max(addresses.len()) {
        let port = ports.get(at).or(ports.first()).copied().unwrap_or(DEFAULT_PORT);
        // As with libpq, a host without a name is looked up by its address.
        let address = addresses.get(at).map(ToString::to_string);
        let host = hosts.get(at).map(name_of).or(address.as_deref()).unwrap_or_default();
        let login = Login { host, port, database, user };
        let Some(password) = password(&text, login) else { continue };
        if found.as_ref().is_some_and(|other| *other != password) {
            return Err(OpenError::invalid(format!(
                "{} has different passwords for the hosts of one address: name the password in the address",
                path.display()
            )));
        }
        found = Some(password);
    }
    Ok(found)
}

fn read(path: &Path) -> Option<String> {
    let found = std::fs::metadata(path).ok()?;
    if !found.is_file() {
        return None;
    }
    #[cfg(unix)]
    if std::os::unix::fs::PermissionsExt::mode(&found.permissions()) & 0o077 != 0 {
        tracing::warn!("{} is ignored, because others may read it: chmod 600", path.display());
        return None;
    }
    std::fs::read_to_string(path).ok()
}

/// The host as the file names it: the usual socket is `localhost` there.
fn name_of(host: &Host) -> &str {
    match host {
        Host::Tcp(name) => name,
        #[cfg(unix)]
        Host::Unix(folder) if [SOCKETS, "/tmp"].iter().any(|usual| folder == Path::new(usual)) => "localhost",
        #[cfg(unix)]
        Host::Unix(folder) => folder.to_str().unwrap_or_default(),
    }
}

fn password(text: &str, login: Login<'_>) -> Option<String> {
    text.lines().filter(|line| !line.starts_with('#')).find_map(|line| password_of(line, login))
}

/// The password of a line that fits.
fn password_of(line: &str, login: Login<'_>) -> Option<String> {
    let port = login.port.to_string();
    let mut rest = line;
    for expected in [login.host, &port, login.database, login.user] {
        let (field, after) = split_field(rest)?;
        if field != "*" && unescaped(field) != expected {
            return None;
        }
        rest = after;
    }
    Some(unescaped(rest))
}

/// Splits at the first `:` that has no `\` before it.
fn split_field(text: &str) -> Option<(&str, &str)> {
    let mut is_escaped = false;
    let end = text.char_indices().find(|(_, c)| {
        let is_end = *c == ':' && !is_escaped;
        is_escaped = *c == '\\' && !is_escaped;
        is_end
    });
    end.map(|(at, _)| (&text[..at], &text[at + 1..]))
}

fn unescaped(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        plain.extend(if c == '\\' { chars.next() } else { Some(c) });
    }
    plain
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    const LOGIN: Login<'_> = Login { host: "db", port: 5432, database: "app", user: "me" };

    #[test]
    fn first_line_that_fits_has_the_password() {
        for (text, expected) in [
            ("db:5432:app:me:secret", Some("secret")),
            ("#db:5432:app:me:no\ndb:5432:app:me:secret\r\n", Some("secret")),
            ("db:5432:app:you:no\n*:*:*:*:any\ndb:5432:app:me:late", Some("any")),
            (r"db:5432:app:me:a\:b\\c:d", Some(r"a:b\c:d")),
            ("db:5433:app:me:no\nother:*:*:*:no\ndb:*:app2:me:no", None),
            ("db:5432:app\n\n:", None),
        ] {
            assert_eq!(password(text, LOGIN).as_deref(), expected, "{text:?}");
        }
        let odd = Login { host: "::1", user: r"a\b", ..LOGIN };
        assert_eq!(password(r"\:\:1:5432:app:a\\b:x", odd).as_deref(), Some("x"));
    }

    fn config(hosts: &[&str], ports: &[u16]) -> Config {
        let mut config = Config::new();
        config.dbname("app");
        for host in hosts {
            config.host(*host);
        }
        for port in ports {
            config.port(*port);
        }
        config
    }

    #[cfg(unix)]
    #[test]
    fn file_is_read_for_all_hosts_unless_others_may_read_it() {
        use std::os::unix::fs::PermissionsExt as _;

        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"one:1:app:me:1\ntwo:2:*:me:2\nthree:*:*:*:1\nlocalhost:*:*:*:socket\n10.0.0.1:5432:app:me:address\n").unwrap();
        let of = |hosts: &[&str], ports: &[u16]| find(file.path(), &config(hosts, ports), "me");
        assert_eq!(of(&["one"], &[1]).unwrap().as_deref(), Some("1"));
        assert_eq!(of(&["one", "three", "four"], &[1, 9, 9]).unwrap().as_deref(), Some("1"));
        assert_eq!(of(&[SOCKETS], &[]).unwrap().as_deref(), Some("socket"));
        assert_eq!(of(&["one"], &[]).unwrap(), None);
        let mut unnamed = config(&[], &[]);
        unnamed.hostaddr("10.0.0.1".parse().unwrap());
        assert_eq!(find(file.path(), &unnamed, "me").unwrap().as_deref(), Some("address"));
        let error = of(&["one", "two"], &[1, 2]).unwrap_err();
        assert!(error.is_invalid() && error.to_string().contains("different passwords"), "{error}");
        assert_eq!(find(Path::new("/nowhere"), &config(&["one"], &[1]), "me").unwrap(), None);
        file.as_file().set_permissions(std::fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!(of(&["one"], &[1]).unwrap(), None);
    }
}
