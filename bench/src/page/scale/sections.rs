//! The tables of the page on scale: their lines, with what is promised, and their sentences.

use crate::page::columns::Unit;

/// What is promised of a figure: at most this.
pub(super) type Bar = Option<f64>;

/// A line of a table.
#[derive(Clone, Copy)]
pub(super) struct Line {
    pub(super) figure: &'static str,
    pub(super) title: &'static str,
    pub(super) unit: Unit,
    pub(super) bar: Bar,
}

const fn line(figure: &'static str, title: &'static str, unit: Unit) -> Line {
    Line { figure, title, unit, bar: None }
}

const fn at_most(line: Line, bar: f64) -> Line {
    Line { bar: Some(bar), ..line }
}

/// A scenario of the page: the cells whose names begin with `key`.
pub(super) struct Section {
    pub(super) key: &'static str,
    pub(super) title: &'static str,
    pub(super) about: &'static str,
    pub(super) lines: &'static [Line],
}

const COUNT: Unit = Unit::Number(0);
/// The last line of most tables.
const OTHERS: Line = line("others", "other programs' CPU meanwhile, cores", Unit::Number(2));

pub(super) const SECTIONS: [Section; 6] = [
    Section {
        key: "held",
        title: "1. A million held leases",
        about: "Processes with one client each hold leases on one Redis, which renew at a third of the ttl. The peers hold theirs in one client, at growing \
                sizes, until they give up.",
        lines: &[
            at_most(line("lost", "leases lost", COUNT), 0.0),
            at_most(line("server_share", "server's CPU, cores", Unit::Number(3)), 0.35),
            line("client_share", "clients' CPU, cores", Unit::Number(3)),
            line("renewals", "renewals/s", Unit::Rate),
            line("server_us", "server's CPU per renewal", Unit::Time),
            line("client_us", "clients' CPU per renewal", Unit::Time),
            line("server_bytes", "bytes per lease at the server", COUNT),
            line("client_bytes", "bytes per lease in its client", COUNT),
            line("network_bytes", "bytes/s on the connections", COUNT),
            line("taking", "time to acquire all", Unit::Seconds),
            OTHERS,
        ],
    },
    Section {
        key: "restart",
        title: "2. A server restarts",
        about: "Each client has a lease, and wants a second lock as soon as the server is killed; after a failure it tries again in 500 ms. It is healthy when it has acquired and released that one. The \
                server has an append-only file, and `maxclients` and `tcp-backlog` for all connections. Times count from the server's start.",
        lines: &[
            at_most(line("lost", "leases lost", COUNT), 0.0),
            at_most(line("unhealthy", "clients not healthy after 60 s", COUNT), 0.0),
            line("connections", "connections", COUNT),
            line("loading", "until the server answers", Unit::Seconds),
            line("half_healthy", "until half of the clients are healthy", Unit::Seconds),
            line("all_healthy", "until all clients are healthy", Unit::Seconds),
            line("peak", "most commands/s, with scripts'", Unit::Rate),
            line("recovery_us", "server's CPU per client", Unit::Time),
            line("failures", "failed attempts", COUNT),
            line("opening", "time to connect all at first", Unit::Seconds),
            OTHERS,
        ],
    },
    Section {
        key: "killed",
        title: "3. A process with many leases is killed",
        about: "Another process has four clients, each of which acquires a lock of its own, holds it for 1 ms, releases it, and starts again. *Before* is the time \
                until the kill, *after* until all leases have expired. *Worst second* is the highest p99 of any second.",
        lines: &[
            line("leases", "leases of the killed process", COUNT),
            line("expired", "leases that expired", COUNT),
            line("lock_p99_before", "lock p99 before", Unit::Time),
            line("lock_p99_after", "lock p99 after", Unit::Time),
            line("lock_worst_before", "lock, worst second before", Unit::Time),
            line("lock_worst_after", "lock, worst second after", Unit::Time),
            line("lock_max_after", "lock max after", Unit::Time),
            line("release_p99_before", "release p99 before", Unit::Time),
            line("release_p99_after", "release p99 after", Unit::Time),
            line("release_worst_before", "release, worst second before", Unit::Time),
            line("release_worst_after", "release, worst second after", Unit::Time),
            line("release_max_after", "release max after", Unit::Time),
            line("pairs_before", "pairs/s before", Unit::Rate),
            line("pairs", "pairs/s after", Unit::Rate),
            at_most(line("failures", "failed attempts", COUNT), 0.0),
            OTHERS,
        ],
    },
    Section {
        key: "waiting",
        title: "4. Many waiting clients",
        about: "All clients want the same lock all the time. The bare chain is the least that such a hand-over can be: a release is a script that \
                publishes to the next client, an acquisition is an empty script, over as many connections. An acquisition is *overtaken* if one entered \
                before it that had asked more than a second later. Commands are relative to 2.0 + waiting time / 27 s.",
        lines: &[
            at_most(
                line("growth_ratio", "growth of the server's CPU against the chain's", Unit::Number(2)),
                1.3,
            ),
            at_most(
                line("commands_of_limit", "commands per acquisition, of the limit", Unit::Number(2)),
                1.0,
            ),
            at_most(line("overtaken", "acquisitions overtaken", COUNT), 0.0),
            at_most(line("overlaps", "two holders at once", COUNT), 0.0),
            line("connections", "connections", COUNT),
            line("rate", "acquisitions/s", Unit::Rate),
            line("waited", "mean wait", Unit::Seconds),
            line("commands", "commands per acquisition", Unit::Number(2)),
            line("server_us", "server's CPU per acquisition", Unit::Time),
            line("server_share", "server's CPU, cores", Unit::Number(2)),
            line("failures", "failed attempts", COUNT),
            OTHERS,
        ],
    },
    Section {
        key: "cluster",
        title: "5. Clusters",
        about: "First, leases are held while slots of the first master move to the second, and then while the third master is killed and its replica takes \
                over. Then tasks with a lock of their own load clusters of growing size: the server's CPU per lock and release, added up over all masters \
                and without what idle masters spend, must not grow by more than a tenth, so that each further master adds as much.",
        lines: &[
            at_most(line("lost", "leases lost while held", COUNT), 0.0),
            at_most(line("lost_moving", "leases lost while slots moved", COUNT), 0.0),
            at_most(line("lost_failover", "leases lost in the failover", COUNT), 0.0),
            line("slots", "slots moved", COUNT),
            line("moving", "time to move them", Unit::Seconds),
            line("failover", "time until the replica serves", Unit::Seconds),
            line("renewals", "renewals/s", Unit::Rate),
            line("server_share", "masters' CPU, cores", Unit::Number(3)),
            at_most(line("flat", "dearest against cheapest", Unit::Number(2)), 1.1),
            line("server_us", "servers' CPU per renewal, or per pair", Unit::Time),
            line("server_bytes", "bytes per lease at the masters", COUNT),
            line("rate", "pairs/s", Unit::Rate),
            line("rate_per_master", "pairs/s per master", Unit::Rate),
            line("idle_share", "CPU of an idle master, cores", Unit::Number(4)),
            line("failures", "failed attempts", COUNT),
            OTHERS,
        ],
    },
    Section {
        key: "model",
        title: "6. Cost model",
        about: "Unit costs from runs of seconds at small sizes. They predict the measurements above, and from them follows what other deployments can do.",
        lines: &[
            line("pair_us", "lock and release, every command by itself", Unit::Time),
            line(
                "busy_pair_us",
                "lock and release by 64 tasks of two clients, which share calls",
                Unit::Time,
            ),
            line("renewal_us", "renewal", Unit::Time),
            line("renewals_per_ttl", "renewals per lease and ttl", Unit::Number(2)),
            line("client_renewal_us", "renewal, in the client", Unit::Time),
            line("expiry_us", "expiry of a lease", Unit::Time),
            line("lease_bytes", "bytes per lease", COUNT),
            line("client_lease_bytes", "bytes per lease, in the client", COUNT),
            line("recovery_us", "recovery of a client after a restart", Unit::Time),
            line("few_waiting_us", "acquisition with 100 waiting clients", Unit::Time),
            line("many_waiting_us", "acquisition with 1,000 waiting clients", Unit::Time),
            line("cluster_pair_us", "lock and release in a cluster, every command by itself", Unit::Time),
            line("busy_cluster_pair_us", "the same in a cluster, for each master", Unit::Time),
            line("cluster_renewal_us", "renewal in a cluster", Unit::Time),
            line("cluster_renewals_per_ttl", "renewals per lease and ttl in a cluster", Unit::Number(2)),
            line("cluster_lease_bytes", "bytes per lease in a cluster", COUNT),
        ],
    },
];
