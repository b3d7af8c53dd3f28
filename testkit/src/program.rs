//! The server programs and their paths.

use std::env;
use std::path::{Path, PathBuf};

/// A server program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Flavor {
    /// The `redis-server` on the PATH: Redis 7.0 on Debian 12, or the system's version.
    #[default]
    Redis7,
    /// Redis 6.2, the oldest supported version: it has no sharded pub/sub.
    Redis62,
    /// Valkey 9.
    Valkey9,
}

impl Flavor {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Redis7, Self::Redis62, Self::Valkey9];

    /// The path of its program.
    pub(crate) fn program(self) -> PathBuf {
        self.program_in(&installed())
    }

    fn program_in(self, installed: &Path) -> PathBuf {
        let program = match self {
            Self::Redis7 => return PathBuf::from("redis-server"),
            Self::Redis62 => installed.join("redis-6.2/redis-server"),
            Self::Valkey9 => installed.join("valkey-9/valkey-server"),
        };
        assert!(program.exists(), "{} is missing: scripts/test install", program.display());
        program
    }
}

/// The folder of `scripts/test install`: the absolute path in `LEASEHOLD_SERVERS`, or `target/servers`.
fn installed() -> PathBuf {
    env::var_os("LEASEHOLD_SERVERS").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target").join("servers"),
        PathBuf::from,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "redis-6.2/redis-server is missing: scripts/test install")]
    fn a_missing_program_panics_with_the_command_that_installs_it() {
        let folder = tempfile::tempdir().unwrap();
        Flavor::Redis62.program_in(folder.path());
    }
}
