//! Distributed locks over HTTP, for languages without a client, with a dashboard.
//!
//! A [`Server`] answers requests with the locks of one [`Client`](leasehold::Client): acquire (waiting in the lock's FIFO
//! queue), renew, release, the state of locks, a dashboard, and metrics for Prometheus. It listens on a Unix
//! socket, or on TCP with tokens and TLS. `leasehold serve` is this server as a program; `docs/http-api.md` explains the API.
//!
//! The server has no rules of its own: they are in the library and its store. The callers of several servers on one store use the
//! same locks.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use leasehold_serve::{Config, Listen, Server};
//!
//! let client = leasehold::Client::connect("redis://127.0.0.1").await?;
//! let config = Config::new([Listen::Unix("/run/leasehold.sock".into())]);
//! let server = Server::bind(config, client).await?;
//! server.run(std::future::pending()).await; // or until a signal
//! # Ok(()) }
//! ```

#![forbid(unsafe_code)]

mod api;
mod app;
mod audit;
mod caller;
mod config;
mod connection;
mod delivery;
mod description;
#[cfg(feature = "_fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod listener;
mod metrics;
mod observer;
mod places;
mod presence;
mod problem;
mod random;
mod requests;
mod rights;
mod server;
mod shares;
mod stamp;
mod time;
mod tls;
mod tokens;

pub use self::metrics::install_recorder;
pub use config::{Config, Limits, Listen, Notices, Tls};
pub use server::{Control, Server, StartError, raise_open_files};
pub use stamp::FileStamp;
pub use tokens::{MIN_TOKEN_BYTES, Tokens};

/// The README's example is a test too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
