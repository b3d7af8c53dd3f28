//! Roles that lack a right, and roles from which a policy hides rows.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use leasehold::{Client, Error, Guard, Kind, Severity};
use leasehold_testkit::{Postgres, unless_paused, until};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{LONG, client_of, lock, refusal};

const TABLES: [&str; 6] = ["layout", "resource", "lease", "waiter", "tombstone", "mail"];
const RIGHTS: [&str; 4] = ["SELECT", "INSERT", "UPDATE", "DELETE"];

/// Rights that no command uses.
const UNUSED: [&str; 4] = ["layout INSERT", "layout UPDATE", "layout DELETE", "mail UPDATE"];

/// A server with tables, and a role `app` with the documented rights.
async fn with_role() -> (Postgres, Client, String) {
    let server = Postgres::on_port();
    let healthy = client_of(&server).await;
    lock(&healthy, "first").await.release().await.unwrap();
    server.run(
        "CREATE ROLE app LOGIN; GRANT USAGE ON SCHEMA leasehold TO app;
        GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA leasehold TO app",
    );
    let url = server.url().replace("postgres@", "app@");
    (server, healthy, url)
}

/// Uses locks of one name with a client that lacks a right. Returns its errors.
async fn use_locks(healthy: &Client, lacking: &Client, name: &str) -> Vec<Error> {
    let mut errors = Vec::new();
    let ttl = Duration::from_secs(2);
    let of = |client: &Client, part: &str| client.mutex(format!("{name} {part}")).ttl(ttl);
    match of(lacking, "free").try_lock().await {
        Ok(Some(guard)) => {
            assert!(
                of(healthy, "free").try_lock().await.unwrap().is_none() || !guard.is_held(),
                "{name}: two holders"
            );
            errors.extend(guard.release().await.err());
        }
        Ok(None) => panic!("{name}: a free lock is busy"),
        Err(error) => errors.push(error),
    }
    // It waits, and the holder releases.
    let held = lock(healthy, &format!("{name} held")).await;
    let waiting = tokio::spawn({
        let mutex = of(lacking, "held");
        async move { mutex.lock_timeout(LONG).await }
    });
    let inspected = healthy.mutex(format!("{name} held"));
    until(async || {
        waiting.is_finished() || inspected.inspect().await.is_ok_and(|view| view.waiters.len() == 1)
    })
    .await;
    held.release().await.unwrap();
    let waited = timeout(LONG, waiting).await.expect("it waits in silence").unwrap();
    match waited {
        Ok(Some(guard)) => {
            assert!(inspected.try_lock().await.unwrap().is_none() || !guard.is_held(), "{name}: two holders");
            errors.extend(guard.release().await.err());
        }
        Ok(None) => panic!("{name}: a free lock is busy for {LONG:?}"),
        Err(error) => errors.push(error),
    }
    let shared = |client: &Client| client.semaphore(format!("{name} shared"), 2).ttl(ttl);
    let permit = shared(healthy).acquire(1).await.unwrap();
    match shared(lacking).try_acquire(1).await {
        Ok(permit) => {
            let permit = permit.expect("one is left");
            assert!(
                shared(healthy).try_acquire(1).await.unwrap().is_none() || !permit.is_held(),
                "{name}: three holders"
            );
            errors.extend(permit.release().await.err());
        }
        Err(error) => errors.push(error),
    }
    permit.release().await.unwrap();
    let held = lock(healthy, &format!("{name} forced")).await;
    match of(lacking, "forced").inspect().await {
        Ok(view) => assert_eq!(view.holders.len(), 1, "{name}: a held lock looks free"),
        Err(error) => errors.push(error),
    }
    match lacking.list().await {
        Ok(list) => {
            assert!(list.iter().any(|lock| lock.name == format!("{name} forced")), "{name}: {list:?}");
        }
        Err(error) => errors.push(error),
    }
    errors.extend(lacking.force_release(Kind::Mutex, &format!("{name} forced")).await.err());
    drop(held.release().await);
    for part in ["free", "held", "forced"] {
        lock(healthy, &format!("{name} {part}")).await.release().await.unwrap();
    }
    errors
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_without_one_right_is_told_which_and_no_lock_gets_two_holders() {
    let (server, healthy, url) = with_role().await;
    let mut silent = BTreeSet::new();
    for table in TABLES {
        for right in RIGHTS {
            let lacking = Client::connect(&url).await.unwrap();
            server.run(&format!("REVOKE {right} ON leasehold.{table} FROM app"));
            let remedy = format!("GRANT {right} ON leasehold.{table} TO app");
            let name = format!("{table} {right}");
            let mut errors = use_locks(&healthy, &lacking, &name).await;
            errors.extend(Client::connect(&url).await.err());
            if errors.is_empty() {
                silent.insert(name.clone());
            }
            for error in errors {
                assert!(error.to_string().contains(&remedy), "{name}: {error}");
            }
            let diagnosis = lacking.diagnose().await.unwrap();
            let mut findings = diagnosis.components.iter().flat_map(|component| &component.findings);
            let found = findings.any(|finding| {
                finding.id == "rights" && finding.remedy.as_ref().is_some_and(|text| text.contains(&remedy))
            });
            assert_eq!(found, !UNUSED.contains(&name.as_str()), "{name}: {diagnosis:?}");
            drop(lacking);
            server.run(&format!("GRANT {right} ON leasehold.{table} TO app"));
        }
    }
    // Each other right is used by a command of this test: those that are not are used in cases that it does not make.
    assert!(UNUSED.iter().all(|name| silent.contains(*name)), "{silent:?}");
    let rare = [
        "resource DELETE",
        "waiter DELETE",
        "tombstone SELECT",
        "tombstone INSERT",
        "tombstone UPDATE",
        "tombstone DELETE",
        "mail SELECT",
        "mail INSERT",
        "mail DELETE",
        "lease UPDATE",
        "lease SELECT",
    ];
    let unexpected: Vec<_> = silent
        .iter()
        .filter(|name| !UNUSED.contains(&name.as_str()) && !rare.contains(&name.as_str()))
        .collect();
    assert!(unexpected.is_empty(), "{unexpected:?}");
}

/// How long a waiter may keep the one behind it from a free lock: a claim window, and a busy machine.
const SOON: Duration = Duration::from_secs(10);

/// A waiter of a role that lacks a right to the table of waiters, and one behind it of a role that does not.
struct Pair {
    refused: JoinHandle<Result<Option<Guard>, Error>>,
    next: JoinHandle<Result<Option<Guard>, Error>>,
}

impl Pair {
    /// The waiter that is refused waits already, unless it is refused at once.
    async fn wait(other: &Client, lacking: &Client, name: &str, is_queued: bool) -> Self {
        let waiting = |client: &Client| {
            let mutex = client.mutex(name);
            tokio::spawn(async move { mutex.lock_timeout(LONG).await })
        };
        let until_waiting = async |count: usize| {
            let mutex = other.mutex(name);
            until(async || mutex.inspect().await.is_ok_and(|view| view.waiters.len() == count)).await;
        };
        let refused = waiting(lacking);
        if is_queued {
            until_waiting(1).await;
        }
        let next = waiting(other);
        until_waiting(1 + usize::from(is_queued)).await;
        Self { refused, next }
    }

    /// One ends with the server's word and what would lift it, and the other gets the lock that `free` frees.
    async fn end(self, right: &str, free: impl AsyncFnOnce()) {
        let refused = timeout(SOON, self.refused).await.expect("it ends").unwrap();
        let error = refused.map(|guard| guard.is_some()).unwrap_err();
        let text = error.to_string();
        let remedy = format!("GRANT {right} ON leasehold.waiter TO app");
        assert!(
            error.is_refused() && text.contains("permission denied") && text.contains(&remedy),
            "{right}: {text}"
        );
        free().await;
        let locked = timeout(SOON, self.next).await.expect("it is not delayed").unwrap();
        locked.unwrap().expect("it is free").release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_that_is_refused_for_good_ends_with_the_servers_word_and_delays_no_other() {
    unless_paused(Duration::from_secs(1), async || {
        let (server, healthy, url) = with_role().await;
        let (lacking, other) = (Client::connect(&url).await.unwrap(), client_of(&server).await);
        // Without INSERT it cannot queue.
        let held = lock(&healthy, "a").await;
        server.run("REVOKE INSERT ON leasehold.waiter FROM app");
        let pair = Pair::wait(&other, &lacking, "a", false).await;
        pair.end("INSERT", async || held.release().await.unwrap()).await;
        server.run("GRANT INSERT ON leasehold.waiter TO app");

        // Without UPDATE it cannot ask again, as it does after its connection was lost.
        let held = lock(&healthy, "a").await;
        let pair = Pair::wait(&other, &lacking, "a", true).await;
        server.run("REVOKE UPDATE ON leasehold.waiter FROM app");
        server.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'");
        pair.end("UPDATE", async || held.release().await.unwrap()).await;
        server.run("GRANT UPDATE ON leasehold.waiter TO app");

        // Without DELETE it cannot leave the queue when it finds that the lease has expired.
        let held = healthy.mutex("a").ttl(Duration::from_secs(3)).lock().await.unwrap();
        held.detach().await.unwrap();
        let pair = Pair::wait(&other, &lacking, "a", true).await;
        server.run("REVOKE DELETE ON leasehold.waiter FROM app");
        pair.end("DELETE", async || ()).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_that_is_refused_says_the_servers_word_at_once() {
    unless_paused(Duration::from_secs(1), async || {
        let (server, healthy, url) = with_role().await;
        let client = Client::connect(&url).await.unwrap();
        let guard = client.mutex("a").lock().await.unwrap();
        server.run("REVOKE UPDATE ON leasehold.resource FROM app");
        let began = Instant::now();
        let error = guard.release().await.unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        let text = error.to_string();
        assert!(error.is_refused() && text.contains("permission denied"), "{text}");
        assert!(text.contains("GRANT UPDATE ON leasehold.resource TO app"), "{text}");
        assert!(healthy.mutex("a").try_lock().await.unwrap().is_none());
        // It is repeated, and done as soon as the right is back.
        server.run("GRANT UPDATE ON leasehold.resource TO app");
        lock(&healthy, "a").await.release().await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_whose_rows_a_policy_hides_is_an_error_that_names_the_policy_and_never_free() {
    let (server, _, url) = with_role().await;
    server.run(
        "ALTER TABLE leasehold.layout ENABLE ROW LEVEL SECURITY; CREATE POLICY nothing ON leasehold.layout USING (false)",
    );
    assert!(refusal(&url).await.to_string().contains("its policies: nothing"));
    for table in ["resource", "lease", "waiter"] {
        let (server, healthy, url) = with_role().await;
        let held = lock(&healthy, "a").await;
        let permits = healthy.semaphore("s", 3);
        let _permits = [permits.acquire(1).await.unwrap(), permits.acquire(1).await.unwrap()];
        let before = Client::connect(&url).await.unwrap();
        server.run(&format!(
            "ALTER TABLE leasehold.{table} ENABLE ROW LEVEL SECURITY; CREATE POLICY nothing ON leasehold.{table} USING (false)"
        ));
        for client in [before, Client::connect(&url).await.unwrap()] {
            let shown = client.semaphore("s", 3).inspect().await.map(drop);
            let listed = client.list().await.map(drop);
            let tried = match table {
                "lease" => client.semaphore("s", 3).try_acquire(1).await.map(drop),
                _ => client.mutex("a").lock_timeout(Duration::from_millis(200)).await.map(drop),
            };
            for refused in [shown, listed, tried] {
                let error = refused.unwrap_err().to_string();
                let remedy = format!(
                    "ALTER TABLE leasehold.{table} DISABLE ROW LEVEL SECURITY (its policies: nothing)"
                );
                assert!(error.contains(&remedy), "{table}: {error}");
            }
            let diagnosis = client.diagnose().await.unwrap();
            assert!(
                diagnosis.is_dangerous() && format!("{diagnosis:?}").contains("its policies: nothing"),
                "{diagnosis:?}"
            );
        }
        // A role that bypasses policies sees all rows.
        server.run("ALTER ROLE app BYPASSRLS");
        let client = Client::connect(&url).await.unwrap();
        assert!(client.mutex("a").inspect().await.unwrap().holders.len() == 1, "{table}");
        drop(held);
    }
}

#[tokio::test]
async fn role_that_may_not_create_the_tables_is_told_the_command_in_a_few_lines() {
    let server = Postgres::on_port();
    server.run("CREATE ROLE app LOGIN");
    let url = server.url().replace("postgres@", "app@");
    let error = refusal(&url).await.to_string();
    assert!(error.contains("leasehold migrate") && error.lines().count() == 1, "{error}");
    let error = leasehold::postgres::migrate(&url).await.unwrap_err().to_string();
    assert!(error.contains("leasehold migrate") && error.lines().count() == 1, "{error}");
    client_of(&server).await;
    let error = refusal(&url).await.to_string();
    assert!(error.contains("GRANT USAGE ON SCHEMA leasehold TO app"), "{error}");
    // The tables are there, and only their owner may renew the views.
    let error = leasehold::postgres::migrate(&url).await.unwrap_err().to_string();
    assert!(error.contains("GRANT USAGE") && error.lines().count() == 1, "{error}");
    server.run("GRANT USAGE ON SCHEMA leasehold TO app; GRANT SELECT ON leasehold.layout TO app");
    let error = leasehold::postgres::migrate(&url).await.unwrap_err().to_string();
    assert!(error.contains("owner") && error.lines().count() == 1, "{error}");
}

/// A view keeps what its operators meant when it was created.
#[tokio::test]
async fn views_that_run_another_roles_code_are_reported_and_made_anew_by_migrate() {
    let server = Postgres::on_port();
    let client = client_of(&server).await;
    let _held = lock(&client, "a").await;
    let is_reported = async || {
        let diagnosis = client.diagnose().await.unwrap();
        let mut findings = diagnosis.components.iter().flat_map(|component| &component.findings);
        findings.any(|finding| finding.id == "integrity" && finding.severity == Severity::Danger)
    };
    assert!(!is_reported().await);
    // As an earlier version has created it where another role may create operators.
    server.run(
        "CREATE FUNCTION steal(int8, numeric) RETURNS numeric LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'stolen'; END $$;
        CREATE OPERATOR public./ (leftarg = int8, rightarg = numeric, function = steal);
        CREATE OR REPLACE VIEW leasehold.holders AS
            SELECT kind, name, convert_from(owner, 'UTF8') AS owner, token, to_timestamp(granted_at / 1e6) AS granted_at,
                to_timestamp(expires_at / 1e6) AS expires_at, convert_from(metadata, 'UTF8') AS metadata
            FROM leasehold.resource WHERE client IS NOT NULL;
        ALTER FUNCTION leasehold.check_fence SET lock_timeout = '2s'",
    );
    assert!(server.try_run("SELECT * FROM leasehold.holders").unwrap_err().contains("stolen"));
    assert!(is_reported().await);
    leasehold::postgres::migrate(&server.url()).await.unwrap();
    assert!(server.run("SELECT name FROM leasehold.holders") == "a" && !is_reported().await);
    // The lock is still held, and the function still has the administrator's setting.
    assert!(client_of(&server).await.mutex("a").try_lock().await.unwrap().is_none());
    let settings = server.run("SELECT proconfig FROM pg_proc WHERE proname = 'check_fence'");
    assert!(settings.contains("lock_timeout=2s"), "{settings}");
}
