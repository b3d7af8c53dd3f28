//! The store: the one that was named, or the user's own file.

use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use etcetera::BaseStrategy as _;
use leasehold::{Client, ClientBuilder};
use leasehold_store::address::without_passwords;
use leasehold_store::identity::Identity;

use crate::auth::AuthCommand;
use crate::duration;
use crate::exit::Stop;
use crate::output::{Level, message};

/// The variable that names the store, here and for the command.
pub(crate) const VARIABLE: &str = "LEASEHOLD_STORE";

/// The pause before a store that was busy is connected to again.
const BUSY_PAUSE: Duration = Duration::from_millis(100);

/// How long a command without a limit of its own waits for a store that takes no writes: longer than most failovers.
const PATIENCE: Duration = Duration::from_secs(10);

/// A store's address.
pub(crate) struct Store {
    url: String,
    auth: Option<AuthCommand>,
}

impl Store {
    /// The store that was named, or the file in the user's state directory.
    pub(crate) fn find(named: Option<String>, auth: Option<&str>) -> Result<Self, Stop> {
        // An empty one sets that of the configuration file aside.
        let auth = auth.filter(|auth| !auth.is_empty()).map(AuthCommand::parse).transpose()?;
        let url = match named {
            Some(url) if url.is_empty() => {
                let is_variable = std::env::var_os(VARIABLE).is_some_and(|value| value.is_empty());
                let where_from = if is_variable { VARIABLE } else { "--store" };
                let advice = "name a store, or leave it out for the user's own file";
                return Err(Stop::usage(format!("{where_from} is empty: {advice}")));
            }
            Some(url) => url,
            None => users_own()?,
        };
        Ok(Self { url, auth })
    }

    /// Whether a program gives its credentials.
    pub(crate) fn has_auth_command(&self) -> bool {
        self.auth.is_some()
    }

    /// The options that name another one.
    pub(crate) fn changed_options<'a>(&self, other: &Self) -> impl Iterator<Item = &'a str> {
        let changed = [("--store", self.url != other.url), ("--auth-command", self.auth != other.auth)];
        changed.into_iter().filter_map(|(option, has_changed)| has_changed.then_some(option))
    }

    /// The settings of its clients.
    pub(crate) fn builder(&self) -> ClientBuilder {
        let builder = Client::builder().store(&*self.url);
        let Some(auth) = self.auth.clone() else { return builder };
        builder.credentials(move |request| {
            let auth = auth.clone();
            // It runs on a thread of its own.
            async move { auth.credentials(&request) }
        })
    }

    /// Connects, also to a store that takes no writes for some seconds, and prints the store's warnings.
    pub(crate) async fn connect(&self) -> Result<Client, Stop> {
        let client = self.connect_when_ready(PATIENCE).await?;
        print_warnings(&client);
        Ok(client)
    }

    /// Connects without printing warnings: for `doctor`, whose report includes them.
    pub(crate) async fn connect_quietly(&self) -> Result<Client, Stop> {
        Ok(self.builder().connect().await?)
    }

    /// Connects, also to a store that takes no writes yet, which is told once. It fails with the store's word if the store takes none
    /// within the limit.
    async fn connect_when_ready(&self, limit: Duration) -> Result<Client, Stop> {
        let began = Instant::now();
        let mut has_warned = false;
        loop {
            match self.builder().connect().await {
                Err(error) if error.is_busy() && began.elapsed() < limit => {
                    if !std::mem::replace(&mut has_warned, true) {
                        message(Level::Warn, "store_busy", format_args!("{error:#}; retrying"));
                    }
                    tokio::time::sleep(BUSY_PAUSE).await;
                }
                connected => return Ok(connected?),
            }
        }
    }

    /// Connects within a limit, for a command that runs under a lock.
    pub(crate) async fn connect_within(&self, limit: Duration) -> Result<Client, Stop> {
        let client = tokio::time::timeout(limit, self.connect_when_ready(limit)).await.map_err(|_| {
            let waited = duration::show(limit);
            Stop::failure(format!(
                "{}: no connection within {waited}: check the store, or wait longer (-w)",
                self.public_url()
            ))
        })??;
        print_warnings(&client);
        if self.is_memory() {
            message(
                Level::Warn,
                "store_warning",
                "warning: memory: is the memory of this process: no other process sees its locks, so it excludes none",
            );
        }
        Ok(client)
    }

    /// The address, with its secrets.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Whether the locks end with this process.
    pub(crate) fn is_memory(&self) -> bool {
        self.url.starts_with("memory:")
    }

    /// The address without secrets.
    pub(crate) fn public_url(&self) -> String {
        without_passwords(&self.url)
    }

    /// The address for a command that may run in another directory: without secrets, and with an absolute path.
    pub(crate) fn for_command(&self) -> String {
        match self.relative_path() {
            Some(path) => match std::env::current_dir() {
                Ok(folder) => address_of(&folder.join(path)),
                Err(_) => self.url.clone(),
            },
            None => self.public_url(),
        }
    }

    /// That of a file below the working directory, with its parameter.
    fn relative_path(&self) -> Option<&str> {
        self.url.strip_prefix("sqlite:").filter(|path| !path.starts_with('/'))
    }

    /// Refuses a store whose address a command could not use.
    pub(crate) fn usable_by_commands(self) -> Result<Self, Stop> {
        let folder = self.relative_path().and_then(|_| std::env::current_dir().ok());
        if folder.is_none_or(|folder| folder.to_str().is_some()) {
            return Ok(self);
        }
        let what = "the path of the working directory is not UTF-8, so the command could not use this store: name a file by an absolute path";
        Err(Stop::usage(format!("{}: {what}", self.public_url())))
    }
}

impl Store {
    /// Whether an address is that of another one with passwords, as a command gets it.
    pub(crate) fn is_for_command(public: &str, url: &str) -> bool {
        public != url && Self { url: url.to_owned(), auth: None }.for_command() == public
    }

    /// Whether an address has a password in it.
    pub(crate) fn has_password(url: &str) -> bool {
        without_passwords(url) != url
    }

    /// Whether the store at an address has logins, and the address has no password.
    pub(crate) fn may_want_credentials(url: &str) -> bool {
        let has_logins = !["memory:", "sqlite:"].iter().any(|scheme| url.starts_with(scheme));
        let (address, parameters) = url.split_once('?').unwrap_or((url, ""));
        let login = address.rsplit_once('@').map_or("", |(login, _)| login);
        let names_password = login.split_once("//").is_some_and(|(_, login)| login.contains(':'));
        let is_password =
            |word: &str| ["pass=", "password=", "password_file="].iter().any(|name| word.starts_with(name));
        has_logins && !names_password && !parameters.split('&').any(is_password)
    }

    /// An address as it may be shown.
    pub(crate) fn without_passwords(url: &str) -> String {
        without_passwords(url)
    }
}

fn print_warnings(client: &Client) {
    for warning in client.warnings() {
        message(Level::Warn, "store_warning", format_args!("warning: {warning}; see leasehold doctor"));
    }
}

/// `$XDG_STATE_HOME/leasehold/locks.db`.
fn users_own() -> Result<String, Stop> {
    let path = own_folder()?.join("locks.db");
    if path.to_str().is_none() {
        return Err(Stop::failure("the home directory's path is not UTF-8: set LEASEHOLD_STORE"));
    }
    Ok(address_of(&path))
}

/// The address of a file with an absolute path, which may end in a parameter.
fn address_of(path: &Path) -> String {
    let path = path.display().to_string();
    // Two slashes would begin a host.
    let path = path.trim_start_matches('/');
    // What looks like a parameter in the name of a directory is none.
    let is_in_folder =
        path.rsplit_once('?').is_some_and(|(_, last)| last.contains('=') && last.contains('/'));
    format!("sqlite:/{path}{}", if is_in_folder { "?synchronous=normal" } else { "" })
}

/// `$XDG_STATE_HOME/leasehold`. It is created on first use, with access for the user only.
pub(crate) fn own_folder() -> Result<PathBuf, Stop> {
    let nowhere =
        || Stop::failure("there is no home directory for the default store: set LEASEHOLD_STORE or --store");
    let strategy = etcetera::base_strategy::Xdg::new().map_err(|_| nowhere())?;
    let folder = strategy.state_dir().ok_or_else(nowhere)?.join("leasehold");
    if folder.is_relative() {
        // Each directory would have a store of its own.
        let what = "is not an absolute path: set HOME to one, or set LEASEHOLD_STORE or --store";
        return Err(Stop::failure(format!("the folder of the default store, {}, {what}", folder.display())));
    }
    let failed = |error: std::io::Error| {
        let shown = folder.display();
        Stop::failure(format!("{shown}: it can't be created: {error}; set LEASEHOLD_STORE or --store"))
    };
    // Root may have another user's home.
    let identity = Identity::for_folder_of(&folder.join("locks.db")).map_err(failed)?;
    let make = || DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    identity.run(make).flatten().map_err(failed)?;
    if let Some(link) = link_of_another_user(&folder) {
        let shown = link.display();
        return Err(Stop::failure(format!(
            "{shown}: this link of another user is on the way to the default store: set LEASEHOLD_STORE or --store"
        )));
    }
    Ok(folder)
}

/// The first link of another user among the folder and those that it is in: it may lead to a folder of this one.
fn link_of_another_user(folder: &Path) -> Option<&Path> {
    let is_foreign = |path: &&Path| {
        let found = std::fs::symlink_metadata(path);
        let own = [0, rustix::process::geteuid().as_raw()];
        found.is_ok_and(|found| found.is_symlink() && !own.contains(&found.uid()))
    };
    folder.ancestors().find(is_foreign)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_of_any_directory_is_an_address() {
        let of = |path: &str| address_of(Path::new(path));
        let folder = tempfile::tempdir().unwrap();
        for name in ["a.db", "what?.db", "sub?x=y/a.db", "a=b/a.db"] {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            let address = address_of(&path);
            let opened = leasehold::blocking::Client::connect(&address);
            opened.unwrap_or_else(|error| panic!("{address}: {error}"));
            assert!(path.exists(), "{address}");
        }
        assert_eq!(of("/a.db?synchronous=full"), "sqlite:/a.db?synchronous=full");
        assert_eq!(of("/x?x=y/a.db?synchronous=full"), "sqlite:/x?x=y/a.db?synchronous=full");
        assert_eq!(of("//tmp/a.db"), "sqlite:/tmp/a.db");
    }

    #[test]
    fn command_gets_an_absolute_store_path() {
        let folder = std::env::current_dir().unwrap();
        let of = |url: &str| Store { url: url.to_owned(), auth: None }.for_command();
        assert_eq!(
            of("sqlite:a.db?synchronous=full"),
            format!("sqlite:{}/a.db?synchronous=full", folder.display())
        );
        assert_eq!(of("sqlite:///a.db"), "sqlite:///a.db");
        assert_eq!(of("redis://:hunter2@host"), "redis://host");
    }
}
