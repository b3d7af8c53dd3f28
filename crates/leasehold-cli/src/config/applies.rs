//! Which options of the file apply to a command line. What is typed, or set in the environment, wins.

use std::collections::BTreeSet;
use std::time::Duration;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, Id};

use super::option::FileOption;
use crate::duration;
use crate::store::Store;

/// The options of `run` that only a single lock can have.
const OF_ONE_LOCK: [&str; 7] =
    ["shared", "exclusive", "semaphore", "owner", "once-per", "at-least-once", "bridge"];

/// Those that a bridged lock can't have.
const NOT_BRIDGED: [&str; 4] = ["semaphore", "owner", "once-per", "min-hold"];

/// Those of a read-write lock, which has a bridge of its own.
const READ_WRITE: [&str; 2] = ["shared", "exclusive"];
const READ_WRITE_BRIDGE: &str = "redisson-rw:";

/// Options with the option without which they mean nothing.
const NEEDS: [(&str, &str); 1] = [("at-least-once", "once-per")];

/// What is set already for a command.
pub(super) struct Set<'a> {
    command: &'a Command,
    matches: &'a ArgMatches,
    /// Those of the command itself.
    ids: BTreeSet<&'a Id>,
}

impl<'a> Set<'a> {
    pub(super) fn new(command: &'a Command, matches: &'a ArgMatches) -> Self {
        let ids = command.get_arguments().map(Arg::get_id).filter(|id| is_set(matches, id)).collect();
        Self { command, matches, ids }
    }

    /// Leaves those options of the file that can be used together with what is set.
    pub(super) fn retain_applicable(&self, defaults: &mut Vec<FileOption<'_>>) {
        let has_several_names = self.names() > 1;
        defaults.retain(|default| {
            self.is_free(default)
                && !(has_several_names && OF_ONE_LOCK.contains(&default.key))
                && self.fits(default)
                && self.fits_bridge(default)
        });
        let left: BTreeSet<&str> = defaults.iter().map(|default| default.key).collect();
        let has = |key: &str| left.contains(key) || self.has(key);
        let is_useless = |key: &str| NEEDS.iter().any(|(needing, needed)| *needing == key && !has(needed));
        let useless: Vec<bool> = defaults.iter().map(|default| is_useless(default.key)).collect();
        let mut useless = useless.into_iter();
        defaults.retain(|_| useless.next() == Some(false));
    }

    fn is_free(&self, default: &FileOption<'_>) -> bool {
        let id = default.arg.get_id();
        if is_set(self.matches, id) {
            return self.adds_password(default);
        }
        !self.ids.iter().any(|set| excludes(self.command, set, id))
    }

    /// Whether the environment names the store of the file, without its password. `run` sets such an address for its command, which
    /// may be another `leasehold`.
    fn adds_password(&self, default: &FileOption<'_>) -> bool {
        let is_of_environment = self.matches.value_source("store") == Some(ValueSource::EnvVariable);
        default.key == "store"
            && is_of_environment
            && self
                .matches
                .get_one::<String>("store")
                .is_some_and(|set| default.values.iter().any(|url| Store::is_for_command(set, url)))
    }

    /// How many locks are named.
    fn names(&self) -> usize {
        let count = |id| self.matches.try_get_raw(id).ok().flatten().map_or(0, Iterator::count);
        count("dashed") + count("typed")
    }

    /// Whether a grace of the file fits into the ttl that is set. A ttl of the file is kept in any case: without it, the command
    /// would run with a ttl that no user chose.
    fn fits(&self, default: &FileOption<'_>) -> bool {
        let own = default.values.first().and_then(|text| duration::parse(text).ok());
        match (default.key, own) {
            ("grace", Some(grace)) => self.duration("ttl").is_none_or(|ttl| grace <= ttl / 2),
            // Without a store the one of the file counts, if it has one.
            ("auth-command", _) => {
                let store = self.matches.try_get_one::<String>("store").ok().flatten();
                store.is_none_or(|url| Store::may_want_credentials(url))
            }
            _ => true,
        }
    }

    /// Whether a lock can be bridged that has an option of the file and what is set, and in the way that is set.
    fn fits_bridge(&self, default: &FileOption<'_>) -> bool {
        // A minimum hold of zero is how that of the file is set aside.
        let is_set = |key: &&str| self.has(key) && !self.duration(key).is_some_and(|set| set.is_zero());
        let is_for_read_write = |bridge: &str| bridge.starts_with(READ_WRITE_BRIDGE);
        let key = default.key;
        if key == "bridge" {
            let is_read_write = default.values.first().is_some_and(|bridge| is_for_read_write(bridge));
            !NOT_BRIDGED.iter().any(is_set) && (is_read_write || !READ_WRITE.iter().any(is_set))
        } else if let Some(bridge) =
            self.matches.try_get_raw("bridge").ok().flatten().and_then(|mut all| all.next())
        {
            let is_read_write = is_for_read_write(&bridge.to_string_lossy());
            !NOT_BRIDGED.contains(&key) && (is_read_write || !READ_WRITE.contains(&key))
        } else {
            true
        }
    }

    /// Whether the option with this long name is set.
    pub(super) fn has(&self, key: &str) -> bool {
        self.arg(key).is_some_and(|id| self.ids.contains(id))
    }

    /// The duration that the option with this long name is set to.
    fn duration(&self, key: &str) -> Option<Duration> {
        let id = self.arg(key).filter(|id| self.ids.contains(id))?;
        self.matches.try_get_one(id.as_str()).ok().flatten().copied()
    }

    /// The option with this long name.
    fn arg(&self, key: &str) -> Option<&'a Id> {
        self.command.get_arguments().find(|arg| arg.get_long() == Some(key)).map(Arg::get_id)
    }
}

fn is_set(matches: &ArgMatches, id: &Id) -> bool {
    matches.value_source(id.as_str()).is_some_and(|source| source != ValueSource::DefaultValue)
}

/// Whether two options of a command can't be used together.
fn excludes(command: &Command, one: &Id, other: &Id) -> bool {
    let declares = |one: &Id, other: &Id| {
        let arg = command.get_arguments().find(|arg| arg.get_id() == one && !arg.is_global_set());
        arg.is_some_and(|arg| command.get_arg_conflicts_with(arg).iter().any(|arg| arg.get_id() == other))
    };
    let is_in_one_group = command.get_groups().any(|group| {
        let has = |id: &Id| group.get_args().any(|member| member == id);
        !group.clone().is_multiple() && has(one) && has(other)
    });
    is_in_one_group || declares(one, other) || declares(other, one)
}
