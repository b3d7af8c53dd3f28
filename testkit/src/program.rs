//! The server programs and their paths.

use std::env;
use std::path::{Path, PathBuf};

/// A server program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Flavor {
    /// The `redis-server` on the PATH: Redis 7.0 on Debian 12, or the system's version. The variable `LEASEHOLD_REDIS` names another program, for
    /// `scripts/test servers`.
    #[default]
    Redis7,
    /// Redis 6.2, the oldest supported version: it has no sharded pub/sub.
    Redis62,
    /// Valkey 9.
    Valkey9,
    /// Redis 8.6: it has DELEX, and further commands for values and keys. Only tests of such differences need it.
    Redis86,
}

impl Flavor {
    /// The usual ones: the oldest supported version, the usual one, and the other line of descent.
    pub const ALL: [Self; 3] = [Self::Redis7, Self::Redis62, Self::Valkey9];

    /// All of them, for tests of rights and of deletes by value.
    pub const WITH_NEWEST: [Self; 4] = [Self::Redis7, Self::Redis62, Self::Valkey9, Self::Redis86];

    /// The path of its program.
    pub(crate) fn program(self) -> PathBuf {
        self.program_in(&installed()).unwrap_or_else(|missing| panic!("{missing}"))
    }

    /// Checks that its program is installed.
    ///
    /// # Errors
    ///
    /// The missing program, and the command that installs it.
    pub fn check(self) -> Result<(), String> {
        let program = self.program_in(&installed())?;
        let folders = env::var_os("PATH").unwrap_or_default();
        // A bare name is looked up in the PATH, and a path stands for itself.
        let is_there = env::split_paths(&folders).any(|folder| folder.join(&program).exists());
        if is_there { Ok(()) } else { Err(missing(&program)) }
    }

    fn program_in(self, installed: &Path) -> Result<PathBuf, String> {
        let program = match self {
            Self::Redis7 => {
                return Ok(
                    env::var_os("LEASEHOLD_REDIS").map_or_else(|| "redis-server".into(), PathBuf::from)
                );
            }
            Self::Redis62 => installed.join("redis-6.2/redis-server"),
            Self::Valkey9 => installed.join("valkey-9/valkey-server"),
            Self::Redis86 => installed.join("redis-8.6/redis-server"),
        };
        if program.exists() { Ok(program) } else { Err(missing(&program)) }
    }
}

fn missing(program: &Path) -> String {
    format!("{} is missing: scripts/test install", program.display())
}

/// The folder of `scripts/test install`: the absolute path in `LEASEHOLD_SERVERS`, or `target/servers`.
fn installed() -> PathBuf {
    env::var_os("LEASEHOLD_SERVERS").map_or_else(|| target().join("servers"), PathBuf::from)
}

/// The folder for what tests keep for the next ones.
pub(crate) fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_a_missing_program_names_the_command_that_installs_it() {
        let folder = tempfile::tempdir().unwrap();
        let error = Flavor::Redis62.program_in(folder.path()).unwrap_err();
        assert!(error.ends_with("redis-6.2/redis-server is missing: scripts/test install"), "{error}");
    }

    #[test]
    fn every_program_that_the_tests_start_is_found() {
        assert_eq!(Flavor::WITH_NEWEST.map(Flavor::check), [const { Ok(()) }; 4]);
    }
}
