//! The server programs that a measurement can run on.

use clap::ValueEnum;
use leasehold_testkit::{Builder, Flavor, Server};

/// The server program of a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Program {
    /// The system's Redis
    #[default]
    #[value(name = "redis-7")]
    Redis7,
    /// Valkey 9, installed by scripts/test
    #[value(name = "valkey-9")]
    Valkey9,
    /// Redis 6.2, installed by scripts/test
    #[value(name = "redis-6.2")]
    Redis62,
}

impl Program {
    fn flavor(self) -> Flavor {
        match self {
            Self::Redis7 => Flavor::Redis7,
            Self::Valkey9 => Flavor::Valkey9,
            Self::Redis62 => Flavor::Redis62,
        }
    }

    /// Checks that the program is installed.
    ///
    /// # Errors
    ///
    /// The missing program, and the command that installs it.
    pub fn check(self) -> Result<(), String> {
        self.flavor().check()
    }

    /// The options of a server.
    pub(crate) fn builder(self) -> Builder {
        Server::builder().flavor(self.flavor())
    }

    /// Starts a server on a free port.
    #[must_use]
    pub fn start(self) -> Server {
        self.builder().start()
    }

    /// The program and its version, as the server reports them: `Valkey 9.0.1`.
    #[must_use]
    pub fn version(self) -> String {
        let server = Server::builder().flavor(self.flavor()).on_socket().start();
        let info: String = server.query(&["INFO", "server"]).unwrap_or_default();
        let (name, field) = match self {
            Self::Valkey9 => ("Valkey", "valkey_version:"),
            Self::Redis7 | Self::Redis62 => ("Redis", "redis_version:"),
        };
        let version = info.lines().find_map(|line| line.trim_end().strip_prefix(field));
        format!("{name} {}", version.unwrap_or("of unknown version"))
    }

    /// The limit for this server: a server with a conditional delete runs less Lua.
    pub(crate) fn limit(self, redis: f64, valkey: f64) -> f64 {
        if self == Self::Valkey9 { valkey } else { redis }
    }
}
