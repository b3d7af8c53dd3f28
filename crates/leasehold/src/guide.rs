//! The documents of the repository's `docs/` folder that users of the library need.
//!
//! | | |
//! |---|---|
//! | [`guarantees`] | what leasehold guarantees, and what it can't: every promise with the tests that show it |
//! | [`operations`] | for operators: addresses, server settings, users, limits, monitoring, backups |
//! | [`metrics`] | the metrics, their labels, and alerts |
//! | [`redlock`] | a quorum of independent servers: how it votes, and what it can't do |
//! | [`choosing`] | which kind and which store fit which job |
//! | [`postgres`] | locks in PostgreSQL: addresses, tables, poolers, and locks inside a transaction |
//! | [`testing`] | how to test code that uses locks |

// The files in `guide/` are symbolic links into `docs/`, so that each document exists once: GitHub shows it in `docs/`,
// rustdoc shows it here, and `cargo package` puts a copy of it in place of the link.
//
// A document links to another one by a reference, which its last lines define as a path for GitHub. The definitions here come
// first, so rustdoc takes them: the links lead to modules, and rustdoc checks them. A document that has no module leads to GitHub.

#[doc = "[redlock]: crate::guide::redlock"]
#[doc = "[postgres]: crate::guide::postgres"]
#[doc = "[servers]: https://github.com/leasehold/leasehold/blob/main/docs/servers.md"]
#[doc = ""]
#[doc = include_str!("../guide/guarantees.md")]
pub mod guarantees {}

#[doc = "[redlock]: crate::guide::redlock"]
#[doc = "[guarantees]: crate::guide::guarantees"]
#[doc = "[metrics]: crate::guide::metrics"]
#[doc = "[recipes-under-load]: https://github.com/leasehold/leasehold/blob/main/docs/recipes-under-load.md"]
#[doc = "[bridges]: https://github.com/leasehold/leasehold/blob/main/docs/bridges.md"]
#[doc = "[rights]: https://github.com/leasehold/leasehold/blob/main/docs/rights.md"]
#[doc = "[postgres]: crate::guide::postgres"]
#[doc = "[postgres-addresses]: crate::guide::postgres#addresses"]
#[doc = "[servers]: https://github.com/leasehold/leasehold/blob/main/docs/servers.md"]
#[doc = "[two-versions]: crate::guide::operations#two-versions-at-one-server"]
#[doc = ""]
#[doc = include_str!("../guide/operations.md")]
pub mod operations {}

#[doc = "[guarantees]: crate::guide::guarantees"]
#[doc = ""]
#[doc = include_str!("../guide/redlock.md")]
pub mod redlock {}

#[doc = "[guarantees]: crate::guide::guarantees"]
#[doc = "[rights]: https://github.com/leasehold/leasehold/blob/main/docs/rights.md"]
#[doc = "[credentials]: crate::guide::operations#credentials-that-change"]
#[doc = ""]
#[doc = include_str!("../guide/postgres.md")]
pub mod postgres {}

#[doc = "[kinds-limits]: crate::guide::guarantees#what-the-kinds-cant-do"]
#[doc = "[server-settings]: crate::guide::operations#what-to-set-on-a-redis-server-and-why"]
#[doc = "[redlock]: crate::guide::redlock"]
#[doc = "[postgres]: crate::guide::postgres"]
#[doc = "[benchmarks]: https://github.com/leasehold/leasehold/blob/main/docs/benchmarks.md"]
#[doc = "[lease-limits]: crate::guide::guarantees#what-a-lease-cant-do"]
#[doc = "[recipes]: https://github.com/leasehold/leasehold/blob/main/docs/recipes.md"]
#[doc = "[zh-cn-recipes]: https://github.com/leasehold/leasehold/blob/main/docs/zh-CN/recipes.md"]
#[doc = "[recipes-under-load]: https://github.com/leasehold/leasehold/blob/main/docs/recipes-under-load.md"]
#[doc = ""]
#[doc = include_str!("../guide/choosing-a-lock.md")]
pub mod choosing {}

#[doc = "[redis-faults]: crate::guide::guarantees#redis"]
#[doc = "[axum-service]: https://github.com/leasehold/leasehold/blob/main/examples/axum-service"]
#[doc = ""]
#[doc = include_str!("../guide/testing.md")]
pub mod testing {}

#[doc = "[axum-service]: https://github.com/leasehold/leasehold/blob/main/examples/axum-service"]
#[doc = "[rules]: https://github.com/leasehold/leasehold/blob/main/examples/serve/prometheus/leasehold.rules.yaml"]
#[doc = "[grafana]: https://github.com/leasehold/leasehold/blob/main/examples/grafana/leasehold-library.json"]
#[doc = ""]
#[doc = include_str!("../guide/metrics.md")]
pub mod metrics {}
