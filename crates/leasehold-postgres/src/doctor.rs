//! Checks the server that locks depend on.

use leasehold_core::{Command, Failure};
use leasehold_store::{Call, CallResult, Check, Component, Diagnosis, StoreError, trial};

use super::conn::Conn;
use super::dialer::Dialer;
use super::error::explain;
use super::exec::Executor;
use super::limits::in_time;
use super::params::of_resource;
use super::pinned::Pinned;
use super::pool::Class;
use super::transaction::Progress;
use super::{ddl, pooler, rights};
use crate::url::{PostgresUrl, SslMode};

pub(super) async fn diagnose(url: &PostgresUrl, executor: &Executor) -> Result<Diagnosis, StoreError> {
    let invalid = |error: leasehold_store::OpenError| StoreError::new(Failure::NotSent, error.to_string());
    let dialer = Dialer::open(url).await.map_err(invalid)?;
    let conn = dialer.connect(None).await?;
    let mut seen = in_time(look(&conn, url, executor.session.mailbox.polls())).await?;
    if in_time(pooler::is_between(&conn)).await? {
        // All of its sessions may be in use.
        seen.pooler = in_time(pooler::mode(&dialer)).await.ok();
    }
    let mut component = judge(&seen, url);
    // It would be refused for the reason that was found.
    if seen.lacking.is_empty() && !seen.is_read_only && !seen.is_standby {
        trial::judge(&executor.try_lock().await, &mut component);
    }
    Ok(Diagnosis::new(vec![component]))
}

impl Executor {
    /// Acquires and releases a test lock, and removes its row.
    async fn try_lock(&self) -> Vec<CallResult> {
        let mut results = Vec::new();
        for Call { resource, command } in trial::commands(true) {
            results.push(self.call(&resource, &command).await);
            if matches!(command, Command::Release(_)) {
                let forget = async |progress: &Progress| {
                    self.run_statement(progress, &self.sql().forget, of_resource(&resource)).await
                };
                // Otherwise it is removed as any unused row.
                let _ = self.in_time(Class::Command, forget).await;
            }
        }
        results
    }
}

/// A snapshot of a server.
#[derive(Clone, Debug)]
struct Seen {
    version: String,
    is_standby: bool,
    /// Whether this role's transactions may only read.
    is_read_only: bool,
    /// The statements that grant what this role lacks.
    lacking: String,
    /// Objects of the schema that call something which another role may have created.
    strange: String,
    /// Other roles that may read the rows of waiters, and not change them.
    readers: String,
    /// What a pooler in between gives a client.
    pooler: Option<pooler::Mode>,
    fsync: String,
    synchronous_commit: String,
    synchronous_standbys: String,
    standbys: u32,
    connections: u32,
    max_connections: u32,
    table_bytes: String,
    is_local: bool,
    polls: bool,
}

async fn look(conn: &Conn, url: &PostgresUrl, polls: bool) -> Result<Seen, StoreError> {
    let sql = format!(
        "SELECT current_setting('server_version'), pg_is_in_recovery(), current_setting('fsync'),
            current_setting('synchronous_commit'), current_setting('synchronous_standby_names'),
            (SELECT count(*) FROM pg_catalog.pg_stat_replication), (SELECT count(*) FROM pg_catalog.pg_stat_activity),
            current_setting('max_connections'), pg_size_pretty(pg_total_relation_size('{0}.resource')),
            coalesce(inet_server_addr() <<= '127.0.0.0/8'::inet OR inet_server_addr() = '::1'::inet, true),
            current_setting('transaction_read_only')",
        url.schema
    );
    let failed = |error| explain(error, false);
    let lacking = conn.line(&rights::query(&url.schema)).await.map_err(failed)?;
    let strange = conn.line(&ddl::strange(&url.schema)).await.map_err(failed)?;
    let readers = conn.line(&rights::readers(&url.schema)).await.map_err(failed)?;
    let row = conn.row(&Pinned::new(&sql)).await.map_err(failed)?;
    let text = |at: usize| row.get(at).cloned().flatten().unwrap_or_default();
    let number = |at| text(at).parse().unwrap_or(0);
    Ok(Seen {
        version: text(0),
        is_standby: text(1) == "t",
        is_read_only: text(10) == "on",
        lacking,
        strange,
        readers,
        pooler: None,
        fsync: text(2),
        synchronous_commit: url.synchronous_commit.map_or_else(|| text(3), ToOwned::to_owned),
        synchronous_standbys: text(4),
        standbys: number(5),
        connections: number(6),
        max_connections: number(7),
        table_bytes: text(8),
        is_local: text(9) == "t",
        polls,
    })
}

fn judge(seen: &Seen, url: &PostgresUrl) -> Component {
    let mut component = Component::new(format!("server {url}"));
    component.fact("version", &seen.version);
    component.fact("synchronous_commit", &seen.synchronous_commit);
    component.fact("standbys", seen.standbys);
    component.fact("connections", format!("{} of {}", seen.connections, seen.max_connections));
    component.fact("table of locks", &seen.table_bytes);
    if seen.is_standby {
        let why = "no lock can be acquired, renewed or released there";
        component.danger(Check::Replica, "this server is a standby", why, None);
    }
    if seen.is_read_only && !seen.is_standby {
        let why = "no lock can be acquired, renewed or released";
        let remedy = "ALTER ROLE … SET default_transaction_read_only = off;".to_owned();
        component.danger(Check::Rights, "transactions of this role may only read", why, Some(remedy));
    }
    if !seen.lacking.is_empty() {
        let why = "commands for locks fail; rows that a policy hides would make a held lock look free";
        let what = "this role lacks rights to the tables of locks, or may not see all of their rows";
        component.danger(Check::Rights, what, why, Some(format!("{};", seen.lacking)));
    }
    if !seen.strange.is_empty() {
        let what = format!("another role's code runs when these are used: {}", seen.strange);
        let why = "they were created while it stood before the server's own in the search_path";
        component.danger(Check::Integrity, what, why, Some("leasehold migrate".to_owned()));
    }
    if !seen.readers.is_empty() {
        let what = format!("these roles may read the tables of locks, and not change them: {}", seen.readers);
        let why = "who reads the row of a waiter can have it believe a grant for up to 3 s: let them read the views alone";
        let remedy = format!(
            "REVOKE SELECT ON {0}.waiter FROM …; GRANT SELECT ON {0}.holders, {0}.waiters TO …;",
            url.schema
        );
        component.advice(Check::Rights, what, why, Some(remedy));
    }
    if seen.fsync == "off" {
        let why = "a crash of the machine may damage the database, and forget leases that are held";
        let remedy = "ALTER SYSTEM SET fsync = on; SELECT pg_reload_conf();".to_owned();
        component.danger(Check::Fsync, "fsync is off", why, Some(remedy));
    }
    judge_durability(&mut component, seen);
    if seen.max_connections > 0 && seen.connections * 10 > seen.max_connections * 9 {
        let why = "a client that cannot connect gets no lock, and cannot renew after a reconnect";
        let what = format!("{} of {} connections are in use", seen.connections, seen.max_connections);
        component.advice(Check::MaxClients, what, why, None);
    }
    if url.ssl_mode < SslMode::Require && !seen.is_local {
        let why = "who reads the connection reads the password's proof and the names of locks";
        component.advice(
            Check::Encryption,
            "TLS is not required",
            why,
            Some("?sslmode=verify-full".to_owned()),
        );
    }
    judge_pooler(&mut component, seen, url);
    component
}

fn judge_pooler(component: &mut Component, seen: &Seen, url: &PostgresUrl) {
    let mode = match seen.pooler {
        Some(pooler::Mode::Session) => "a pooler in session mode is in between",
        Some(pooler::Mode::Transaction) => "a pooler in transaction mode is in between",
        None => "a pooler is in between",
    };
    if seen.polls {
        let why = "a client learns of a grant when it looks for mail, up to a quarter of a second later";
        let remedy = match seen.pooler {
            Some(pooler::Mode::Session) => "?pooler=no",
            _ => "?listen=ADDRESS-WITHOUT-THE-POOLER",
        };
        component.advice(Check::Pooler, mode, why, Some(remedy.to_owned()));
    } else if seen.pooler == Some(pooler::Mode::Transaction) && url.listen.is_none() {
        let why = "with pooler=no the client listens in a session that others use too, and looks for mail once it notices";
        component.advice(Check::Pooler, mode, why, Some("?pooler=yes".to_owned()));
    }
}

fn judge_durability(component: &mut Component, seen: &Seen) {
    if seen.synchronous_commit == "off" {
        let why = "a crash may forget the last second of grants: a lock that is held can be granted again; tokens still rise";
        component.advice(Check::Durability, "commits do not wait for the disk", why, None);
    } else if seen.fsync != "off" {
        component.fine(
            Check::Durability,
            "a crash costs no lease",
            "each change is on disk before it counts",
        );
    }
    if seen.standbys > 0 && (seen.synchronous_standbys.is_empty() || seen.synchronous_commit == "local") {
        let why = "a failover may forget the last grants: a lock that is held can be granted again; tokens tell them apart";
        let remedy = "ALTER SYSTEM SET synchronous_standby_names = '*'; SELECT pg_reload_conf();".to_owned();
        component.advice(Check::Persistence, "standbys replicate asynchronously", why, Some(remedy));
    }
}

#[cfg(test)]
mod tests {
    use leasehold_store::{Finding, Severity};

    use super::*;
    use crate::url::PostgresUrl;

    fn sound() -> Seen {
        Seen {
            version: "15".to_owned(),
            is_standby: false,
            is_read_only: false,
            lacking: String::new(),
            strange: String::new(),
            readers: String::new(),
            pooler: None,
            fsync: "on".to_owned(),
            synchronous_commit: "on".to_owned(),
            synchronous_standbys: String::new(),
            standbys: 0,
            connections: 10,
            max_connections: 100,
            table_bytes: "8 kB".to_owned(),
            is_local: true,
            polls: false,
        }
    }

    fn judge_of(seen: &Seen) -> Vec<Finding> {
        let url = PostgresUrl::of("postgres://host/db?sslmode=disable");
        judge(seen, &url).findings
    }

    fn problems(seen: &Seen) -> Vec<(Severity, &'static str)> {
        let findings = judge_of(seen).into_iter();
        let problems = findings.filter(|finding| finding.severity != Severity::Fine);
        problems.map(|finding| (finding.severity, finding.id)).collect()
    }

    #[test]
    fn each_problem_of_a_server_is_reported() {
        use Severity::{Advice, Danger};
        assert_eq!(problems(&sound()), []);
        assert_eq!(problems(&Seen { is_standby: true, ..sound() }), [(Danger, "replica")]);
        assert_eq!(problems(&Seen { fsync: "off".to_owned(), ..sound() }), [(Danger, "fsync")]);
        let hasty = Seen { synchronous_commit: "off".to_owned(), ..sound() };
        assert_eq!(problems(&hasty), [(Advice, "durability")]);
        let fine = judge_of(&Seen { fsync: "off".to_owned(), ..sound() });
        assert!(fine.iter().all(|finding| finding.id != "durability"), "a crash may cost all");
        assert_eq!(problems(&Seen { is_read_only: true, ..sound() }), [(Danger, "rights")]);
        let lacking = "GRANT INSERT ON leasehold.mail TO app".to_owned();
        assert_eq!(problems(&Seen { lacking, ..sound() }), [(Danger, "rights")]);
        let strange = "view leasehold.holders: operator".to_owned();
        assert_eq!(problems(&Seen { strange, ..sound() }), [(Danger, "integrity")]);
        assert_eq!(problems(&Seen { readers: "dashboard".to_owned(), ..sound() }), [(Advice, "rights")]);
        assert_eq!(problems(&Seen { standbys: 1, ..sound() }), [(Advice, "persistence")]);
        assert_eq!(problems(&Seen { connections: 95, ..sound() }), [(Advice, "max-clients")]);
        assert_eq!(problems(&Seen { is_local: false, ..sound() }), [(Advice, "encryption")]);
        assert_eq!(problems(&Seen { polls: true, ..sound() }), [(Advice, "pooler")]);
        let remedy =
            |polls, mode| judge_of(&Seen { polls, pooler: Some(mode), ..sound() }).pop().unwrap().remedy;
        assert_eq!(remedy(true, pooler::Mode::Session).as_deref(), Some("?pooler=no"));
        assert_eq!(remedy(false, pooler::Mode::Transaction).as_deref(), Some("?pooler=yes"));
        assert_eq!(problems(&Seen { pooler: Some(pooler::Mode::Session), ..sound() }), []);
    }
}
