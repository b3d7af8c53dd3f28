//! Servers that refuse, and servers with other settings.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use leasehold::tokio_postgres::{NoTls, connect};
use leasehold::{Client, Severity};
use leasehold_testkit::{Certificates, NoCertificate, Pair, PgBouncer, Postgres, unless_paused};

use super::{LONG, client_of, lock, refusal, until_waiting};

#[tokio::test]
async fn wrong_password_is_an_error_that_says_so() {
    let server = Postgres::builder().password("right").start();
    let guard = lock(&client_of(&server).await, "a").await;
    guard.release().await.unwrap();
    let error = refusal(&server.url().replace("right", "wrong")).await;
    assert!(error.is_unavailable() && error.to_string().contains("pg_hba.conf"), "{error}");
    assert!(!error.to_string().contains("wrong"), "{error}");
}

#[tokio::test]
async fn password_of_a_file_is_read_for_each_connection() {
    let server = Postgres::builder().password("first").start();
    let folder = tempfile::tempdir().unwrap();
    let (plain, libpq) = (folder.path().join("plain"), folder.path().join("libpq"));
    let write = |password: &str| {
        fs::write(&plain, password).unwrap();
        fs::write(&libpq, format!("*:*:*:*:{password}\n")).unwrap();
        fs::set_permissions(&libpq, fs::Permissions::from_mode(0o600)).unwrap();
    };
    write("first");
    let bare = server.url().replace(":first@", "@");
    let of =
        |name: &str, file: &Path| format!("{bare}?{name}={}", file.display().to_string().replace('/', "%2F"));
    let addresses = [of("password_file", &plain), of("passfile", &libpq)];
    let mut clients = Vec::new();
    for (url, name) in addresses.iter().zip(["a", "b"]) {
        let client = Client::connect(url).await.unwrap();
        let guard = lock(&client, name).await;
        clients.push((client, guard, name));
    }
    for password in ["second", "third"] {
        write(password);
        server.run(&format!("ALTER ROLE postgres PASSWORD '{password}'"));
        server.run(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid()",
        );
        for (client, guard, name) in &clients {
            leasehold_testkit::until(async || guard.renew().await.is_ok()).await;
            assert!(client.mutex(name).try_lock().await.unwrap().is_none(), "{name}: it is still held");
        }
    }
    let error = refusal(&of("password_file", &folder.path().join("none"))).await;
    assert!(error.is_invalid() && error.to_string().contains("none"), "{error}");
    let both = addresses[0].replace("postgres@", "postgres:hunter2@");
    let error = refusal(&both).await;
    assert!(error.is_invalid() && error.to_string().contains("not in both"), "{error}");
    assert!(!error.to_string().contains("hunter2"), "{error}");
}

#[tokio::test]
async fn server_that_requires_tls_is_used_with_it_and_checked_as_sslmode_says() {
    let files = Certificates::new();
    let server = Postgres::builder().tls(&files.server).start();
    let with = |parameters: &str| format!("{}?{parameters}", server.url());
    let authority = files.authority.display();
    for parameters in [
        "sslmode=prefer".to_owned(),
        "sslmode=require".to_owned(),
        format!("sslmode=verify-full&sslrootcert={authority}"),
    ] {
        let client = Client::connect(&with(&parameters)).await.unwrap();
        lock(&client, "a").await.release().await.unwrap();
    }
    let error = refusal(&with("sslmode=disable")).await;
    assert!(error.to_string().contains("pg_hba.conf"), "{error}");
    // The system's authorities did not sign it.
    assert!(refusal(&with("sslmode=verify-ca")).await.to_string().contains("certificate"));

    let other = Postgres::builder().tls(&files.wrong_name).start();
    let with = |mode: &str| format!("{}?sslmode={mode}&sslrootcert={authority}", other.url());
    Client::connect(&with("verify-ca")).await.unwrap();
    assert!(refusal(&with("verify-full")).await.to_string().contains("certificate"));
}

#[tokio::test]
async fn standby_refuses_locks_and_says_what_to_name() {
    let primary = Postgres::on_port();
    lock(&client_of(&primary).await, "a").await.release().await.unwrap();
    let standby = primary.standby();
    leasehold_testkit::wait_until("the tables are replicated", || {
        standby.try_run("SELECT count(*) FROM leasehold.resource").is_ok_and(|count| count == "1")
    });
    let error = refusal(&standby.url()).await;
    assert!(error.is_unavailable() && error.to_string().contains("target_session_attrs"), "{error}");
    // By default, too. Several connections that are opened at once begin with different hosts.
    for parameter in ["?target_session_attrs=read-write", ""] {
        let [one, other] = [standby.port(), primary.port()];
        let several = format!("postgres://postgres@127.0.0.1:{one},127.0.0.1:{other}/postgres{parameter}");
        let client = Client::connect(&several).await.unwrap();
        let mutex = |number: usize| client.mutex(format!("lock {number}"));
        let attempts = (0..8).map(|number| {
            let mutex = mutex(number);
            async move { mutex.try_lock().await }
        });
        let all = join_all(attempts).await;
        for guard in all {
            guard.unwrap().expect("it is free").release().await.unwrap();
        }
    }
}

/// Without it, a client does not notice that an address leads to another server, and works.
#[tokio::test]
async fn role_that_may_not_ask_when_the_server_was_started_has_locks() {
    let server = Postgres::on_port();
    server.run(
        "CREATE ROLE app LOGIN; GRANT CREATE ON DATABASE postgres TO app;
        REVOKE EXECUTE ON FUNCTION pg_postmaster_start_time() FROM PUBLIC",
    );
    for pooler in ["no", "yes"] {
        let url = format!("{}?pooler={pooler}", server.url().replace("postgres@", "app@"));
        let (client, other) = (Client::connect(&url).await.unwrap(), Client::connect(&url).await.unwrap());
        let held = lock(&client, "a").await;
        let waiting = tokio::spawn(async move { lock(&other, "a").await.release().await });
        until_waiting(&client, 1).await;
        held.release().await.unwrap();
        // Also by mail: it asks again after 10 s only.
        tokio::time::timeout(Duration::from_secs(5), waiting).await.expect("pushed").unwrap().unwrap();
    }
}

#[tokio::test]
async fn server_without_free_connections_is_an_error_that_says_so() {
    let server =
        Postgres::builder().setting("max_connections=8").setting("superuser_reserved_connections=3").start();
    server.run("CREATE ROLE app LOGIN; GRANT CREATE ON DATABASE postgres TO app");
    let url = server.url().replace("postgres@", "app@");
    let first = Client::connect(&url).await.unwrap();
    let _idle: Vec<_> = (0..2).map(|_| server.session("SET ROLE app; SELECT pg_sleep(600)")).collect();
    let _more: Vec<_> = (0..2).map(|_| server.session("SELECT pg_sleep(600)")).collect();
    leasehold_testkit::wait_until("few are left", || {
        server
            .try_run("SELECT count(*) >= 6 FROM pg_stat_activity WHERE backend_type = 'client backend'")
            .is_ok_and(|is_so| is_so == "t")
    });
    let error = refusal(&url).await;
    assert!(error.is_unavailable() && error.to_string().contains("max_connections"), "{error}");
    drop(first);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_whose_transactions_are_serializable_gets_its_locks() {
    let server = Postgres::on_port();
    server.run("ALTER ROLE postgres SET default_transaction_isolation = 'serializable'");
    let pooler = PgBouncer::start(&server);
    for url in [server.url(), pooler.url()] {
        let clients = [Client::connect(&url).await.unwrap(), Client::connect(&url).await.unwrap()];
        let workers = (0..6).map(|number| {
            let client = clients[number % 2].clone();
            tokio::spawn(async move {
                let mut tokens = Vec::new();
                for _ in 0..5 {
                    let guard = client.mutex("a").global_fifo().lock_timeout(LONG).await.unwrap().unwrap();
                    tokens.push(guard.token());
                    guard.release().await.unwrap();
                }
                tokens
            })
        });
        let mut tokens = Vec::new();
        for worker in workers.collect::<Vec<_>>() {
            tokens.extend(worker.await.unwrap());
        }
        tokens.sort();
        tokens.dedup();
        assert_eq!(tokens.len(), 30, "each acquisition has a token of its own");
    }
}

#[tokio::test]
async fn role_without_rights_is_told_the_statements_that_its_owner_runs() {
    let server = Postgres::on_port();
    server.run("CREATE ROLE app LOGIN");
    let url = server.url().replace("postgres@", "app@");
    let error = refusal(&url).await.to_string();
    assert!(
        error.contains("leasehold migrate --store") && error.contains("leasehold migrate --print"),
        "{error}"
    );
    leasehold::postgres::migrate(&server.url()).await.unwrap();
    let error = refusal(&url).await.to_string();
    assert!(error.contains("GRANT USAGE ON SCHEMA leasehold"), "{error}");
    let dangers = async || {
        let diagnosis = Client::connect(&url).await.unwrap().diagnose().await.unwrap();
        let findings = diagnosis.components.into_iter().flat_map(|component| component.findings);
        findings
            // The servers of tests run without fsync.
            .filter(|finding| finding.severity == Severity::Danger && finding.id != "fsync")
            .map(|finding| finding.id)
            .collect::<Vec<_>>()
    };
    server.run("GRANT USAGE ON SCHEMA leasehold TO app");
    server.run("GRANT SELECT ON ALL TABLES IN SCHEMA leasehold TO app");
    assert_eq!(dangers().await, ["rights"]);
    server.run("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA leasehold TO app");
    server.run("CREATE TABLE leasehold.of_another_program (id int)");
    assert!(dangers().await.is_empty());
    server.run("ALTER ROLE app SET default_transaction_read_only = on");
    assert_eq!(dangers().await, ["rights"]);
    server.run("ALTER ROLE app RESET default_transaction_read_only");
    let clients = [Client::connect(&url).await.unwrap(), Client::connect(&url).await.unwrap()];
    let held = lock(&clients[0], "a").await;
    let waiting = tokio::spawn({
        let client = clients[1].clone();
        async move { lock(&client, "a").await }
    });
    until_waiting(&clients[0], 1).await;
    held.release().await.unwrap();
    waiting.await.unwrap().release().await.unwrap();
}

/// A role that may create schemas makes leasehold's before leasehold does, or replaces a table.
#[tokio::test]
async fn schema_that_a_stranger_owns_is_refused() {
    let server = Postgres::on_port();
    server.run("CREATE ROLE stranger LOGIN; CREATE ROLE app LOGIN; GRANT CREATE ON DATABASE postgres TO stranger, app");
    let as_role = |role: &str| server.url().replace("postgres@", &format!("{role}@"));
    leasehold::postgres::migrate(&as_role("stranger")).await.unwrap();
    server.run("GRANT USAGE ON SCHEMA leasehold TO app; GRANT ALL ON ALL TABLES IN SCHEMA leasehold TO app");
    // A superuser is a member of every role, and must not run a stranger's code either.
    for role in ["app", "postgres"] {
        let error = refusal(&as_role(role)).await.to_string();
        assert!(error.contains("the schema leasehold belongs to stranger"), "{error}");
        let error = leasehold::postgres::migrate(&as_role(role)).await.unwrap_err().to_string();
        assert!(error.contains("belongs to stranger"), "{error}");
    }
    server.run("REASSIGN OWNED BY stranger TO postgres");
    lock(&Client::connect(&as_role("app")).await.unwrap(), "a").await.release().await.unwrap();
    for what in ["TABLE leasehold.waiter", "FUNCTION leasehold.check_fence(text, int8)"] {
        server.run(&format!("ALTER {what} OWNER TO stranger"));
        let error = refusal(&as_role("app")).await.to_string();
        assert!(error.contains("belongs to stranger"), "{what}: {error}");
        server.run(&format!("ALTER {what} OWNER TO postgres"));
    }
    // A member was not asked whether it trusts the role. The address says so.
    server.run("ALTER SCHEMA leasehold OWNER TO stranger; GRANT stranger TO app");
    let error = refusal(&as_role("app")).await.to_string();
    assert!(error.contains("belongs to stranger") && error.contains("?owner=ROLE"), "{error}");
    let trusting = format!("{}?owner=stranger", as_role("app"));
    lock(&Client::connect(&trusting).await.unwrap(), "a").await.release().await.unwrap();
    server.run("REVOKE stranger FROM app; ALTER DATABASE postgres OWNER TO stranger");
    lock(&Client::connect(&as_role("app")).await.unwrap(), "a").await.release().await.unwrap();
    // Who has or may get a right beyond the database trusts its owner as little as a superuser does.
    server.run(
        "GRANT ALL ON ALL TABLES IN SCHEMA leasehold TO PUBLIC; GRANT USAGE ON SCHEMA leasehold TO PUBLIC;
         CREATE ROLE dba LOGIN; GRANT postgres TO dba; CREATE ROLE creator LOGIN CREATEROLE;
         CREATE ROLE provider; GRANT pg_execute_server_program TO provider; CREATE ROLE admin LOGIN NOINHERIT; GRANT provider TO admin;
         CREATE ROLE team; GRANT team TO app",
    );
    let as_app = format!("{}?options=-c%20role%3Dapp", server.url());
    for url in [as_role("dba"), as_role("creator"), as_role("admin"), as_app] {
        let error = refusal(&url).await.to_string();
        assert!(error.contains("the schema leasehold belongs to stranger"), "{url}: {error}");
    }
    // The owner has that right himself, and a role of the database gives none.
    server.run("GRANT provider TO stranger");
    for role in ["admin", "app"] {
        lock(&Client::connect(&as_role(role)).await.unwrap(), "a").await.release().await.unwrap();
    }
}

/// The rights to a table may include one to add a trigger, which runs with the rights of each role that changes a row.
#[tokio::test]
async fn triggers_and_rules_on_the_tables_are_refused() {
    let server = Postgres::on_port();
    leasehold::postgres::migrate(&server.url()).await.unwrap();
    server.run(
        "CREATE ROLE stranger LOGIN; GRANT USAGE ON SCHEMA leasehold TO stranger; GRANT ALL ON ALL TABLES IN SCHEMA leasehold TO stranger;
        GRANT CREATE ON SCHEMA public TO stranger; SET ROLE stranger;
        CREATE FUNCTION public.become() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
        CREATE TRIGGER becomes BEFORE INSERT ON leasehold.resource FOR EACH ROW EXECUTE FUNCTION public.become()",
    );
    let error = refusal(&server.url()).await.to_string();
    assert!(error.contains("the trigger becomes on leasehold.resource"), "{error}");
    server.run("DROP TRIGGER becomes ON leasehold.resource; CREATE RULE other AS ON DELETE TO leasehold.mail DO INSTEAD NOTHING");
    let error = refusal(&server.url()).await.to_string();
    assert!(error.contains("the rule other on leasehold.mail"), "{error}");
    // Its name makes no line of its own.
    server.run("DROP RULE other ON leasehold.mail; CREATE RULE \"a\nleasehold: outdated\" AS ON DELETE TO leasehold.mail DO INSTEAD NOTHING");
    let error = refusal(&server.url()).await.to_string();
    assert!(error.contains("outdated") && !error.contains('\n'), "{error}");
    server.run("DROP RULE \"a\nleasehold: outdated\" ON leasehold.mail");
    lock(&Client::connect(&server.url()).await.unwrap(), "a").await.release().await.unwrap();
}

/// Other tables of the schema are not judged: their names may be anything.
#[tokio::test]
async fn tables_of_others_in_the_schema_are_no_finding() {
    let server = Postgres::on_port();
    server.run(
        "CREATE ROLE app LOGIN; CREATE ROLE evil LOGIN; GRANT ALL ON SCHEMA public TO app, evil; CREATE SCHEMA kinds; CREATE TYPE kinds.kind AS ENUM ('a');
        CREATE TABLE public.orders (kind kinds.kind);
        SET ROLE evil; CREATE TABLE public.\"resource OWNER TO postgres; ALTER ROLE evil SUPERUSER; --\" (id int);
        ALTER TABLE public.\"resource OWNER TO postgres; ALTER ROLE evil SUPERUSER; --\" ENABLE ROW LEVEL SECURITY;
        GRANT ALL ON public.\"resource OWNER TO postgres; ALTER ROLE evil SUPERUSER; --\" TO app",
    );
    let url = format!("{}?schema=public", server.url().replace("postgres@", "app@"));
    let diagnosis = Client::connect(&url).await.unwrap().diagnose().await.unwrap();
    let findings = diagnosis.components.into_iter().flat_map(|component| component.findings);
    let rights_findings: Vec<_> =
        findings.filter(|finding| ["rights", "integrity"].contains(&finding.id)).collect();
    assert!(rights_findings.iter().all(|finding| finding.severity == Severity::Fine), "{rights_findings:?}");
}

/// Each is there before leasehold's tables are, and would run the stranger's code when it is used.
#[tokio::test]
async fn code_of_a_stranger_does_not_run_while_a_client_connects() {
    let server = Postgres::on_port();
    server.run(
        "CREATE ROLE stranger LOGIN; CREATE ROLE app LOGIN; GRANT CREATE ON DATABASE postgres TO stranger, app;
        GRANT CREATE ON SCHEMA public TO stranger, app;
        CREATE TABLE public.ran (who text); GRANT ALL ON public.ran TO PUBLIC;
        CREATE FUNCTION public.steal() RETURNS int8 LANGUAGE plpgsql VOLATILE AS
            $$ BEGIN INSERT INTO public.ran VALUES (current_user); RETURN 1; END $$;
        CREATE FUNCTION public.steal_row() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN INSERT INTO public.ran VALUES (current_user); RETURN NEW; END $$;",
    );
    let as_role = |role: &str, schema: &str| {
        format!("{}?schema={schema}", server.url().replace("postgres@", &format!("{role}@")))
    };
    let trap = |schema: &str, name: &str| match name {
        "layout" => format!("CREATE VIEW {schema}.layout AS SELECT public.steal() AS version"),
        "transaction_lock" => format!(
            "CREATE TABLE {schema}.transaction_lock (name text PRIMARY KEY); CREATE TRIGGER t BEFORE INSERT ON
                {schema}.transaction_lock FOR EACH ROW EXECUTE FUNCTION public.steal_row();
                GRANT ALL ON {schema}.transaction_lock TO PUBLIC"
        ),
        _ => format!(
            "CREATE FUNCTION {schema}.check_fence(text, int8) RETURNS void LANGUAGE plpgsql AS
                $$ BEGIN PERFORM public.steal(); END $$"
        ),
    };
    for name in ["layout", "transaction_lock", "check_fence"] {
        for schema in ["leasehold", "public"] {
            let mut setup = format!(
                "SET ROLE stranger; CREATE SCHEMA IF NOT EXISTS {schema}; GRANT ALL ON SCHEMA {schema} TO PUBLIC;"
            );
            if schema == "public" {
                setup = "SET ROLE stranger;".to_owned();
            }
            server.run(&format!(
                "{setup} {}; GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO PUBLIC",
                trap(schema, name)
            ));
            for role in ["app", "postgres"] {
                let url = as_role(role, schema);
                let error = refusal(&url).await.to_string();
                assert!(error.contains("belongs to stranger"), "{name} in {schema} for {role}: {error}");
                let error = leasehold::postgres::migrate(&url).await.unwrap_err().to_string();
                assert!(error.contains("belongs to stranger"), "{name} in {schema} for {role}: {error}");
            }
            if schema == "leasehold" {
                let (database, connection) =
                    connect(&as_role("app", schema).replace("?schema=leasehold", ""), NoTls).await.unwrap();
                tokio::spawn(connection);
                let error = leasehold::fence::postgres::create(&database).await.unwrap_err().to_string();
                assert!(error.contains("belongs to stranger"), "{name}: {error}");
            }
            assert_eq!(server.run("SELECT count(*) FROM public.ran"), "0", "{name} in {schema}");
            server.run("DROP OWNED BY stranger; GRANT CREATE ON DATABASE postgres TO stranger; GRANT CREATE ON SCHEMA public TO stranger");
        }
    }
}

/// Where others may create objects in the schema, as in `public` up to PostgreSQL 14.
#[tokio::test]
async fn overload_of_another_role_is_neither_called_nor_refused() {
    let server = Postgres::on_port();
    server.run(
        "CREATE ROLE stranger LOGIN; CREATE ROLE app LOGIN; GRANT CREATE ON DATABASE postgres TO app;
        CREATE TABLE public.ran (who text); GRANT ALL ON public.ran TO PUBLIC",
    );
    let url = server.url().replace("postgres@", "app@");
    lock(&Client::connect(&url).await.unwrap(), "a").await.release().await.unwrap();
    server.run("GRANT CREATE, USAGE ON SCHEMA leasehold TO stranger");
    for signature in [
        "check_fence(varchar, int8)",
        "check_fence(text, int4)",
        "check_fence(text, numeric)",
        "check_fence(anyelement, int8)",
        "check_fence(text, VARIADIC int8[])",
        "lock_transaction(int4)",
        "lock_transaction(varchar)",
        "lock_transaction(anyelement)",
        "lock_transaction(VARIADIC text[])",
        "try_lock_transaction(varchar)",
        "try_lock_transaction(text, int4)",
    ] {
        server.run(&format!(
            "SET ROLE stranger; CREATE FUNCTION leasehold.{signature} RETURNS bool LANGUAGE plpgsql AS
                $$ BEGIN INSERT INTO public.ran VALUES (current_user || ': {signature}'); RETURN true; END $$"
        ));
    }
    let client = Client::connect(&url).await.unwrap();
    let guard = lock(&client, "a").await;
    let (mut database, connection) = connect(&url, NoTls).await.unwrap();
    tokio::spawn(connection);
    leasehold::fence::postgres::create(&database).await.unwrap();
    let transaction = database.transaction().await.unwrap();
    leasehold::fence::postgres::check(&transaction, &guard).await.unwrap();
    let of_transaction = leasehold::postgres::TransactionLock::new("b").unwrap();
    of_transaction.lock(&transaction).await.unwrap();
    assert!(of_transaction.try_lock(&transaction).await.unwrap());
    // A driver that leaves the types to the server, and what the page of PostgreSQL says for other languages.
    transaction.execute(leasehold::fence::postgres::CHECK_SQL, &[&"c", &1_i64]).await.unwrap();
    let documented =
        "SELECT leasehold.check_fence('d'::text, 1::int8), leasehold.lock_transaction('e'::text),
        leasehold.try_lock_transaction('f'::text)";
    transaction.batch_execute(documented).await.unwrap();
    transaction.commit().await.unwrap();
    guard.release().await.unwrap();
    server.run("ALTER FUNCTION leasehold.check_fence(text, int8) SET lock_timeout = '2s'");
    leasehold::postgres::migrate(&url).await.unwrap();
    // The server does not choose between the two. It says so, and calls neither; leases need none of them.
    server.run(
        "SET ROLE stranger; CREATE FUNCTION leasehold.check_fence(text, int8, bool DEFAULT true) RETURNS bool LANGUAGE sql AS
            $$ INSERT INTO public.ran VALUES ('default') RETURNING true $$",
    );
    let guard = lock(&Client::connect(&url).await.unwrap(), "a").await;
    let transaction = database.transaction().await.unwrap();
    let error = leasehold::fence::postgres::check(&transaction, &guard).await.unwrap_err().to_string();
    assert!(error.contains("not unique"), "{error}");
    guard.release().await.unwrap();
    assert_eq!(server.run("SELECT string_agg(who, ', ') FROM public.ran"), "");
    let kept = "SELECT proconfig::text ~ 'lock_timeout=2s' FROM pg_proc WHERE proargtypes = '25 20'";
    assert_eq!(server.run(kept), "t");
}

/// A stranger exchanges what is checked while a client connects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schema_that_a_stranger_exchanges_meanwhile_runs_none_of_its_code() {
    let server = Postgres::on_port();
    server.run(
        "CREATE ROLE stranger LOGIN; CREATE ROLE app LOGIN; GRANT CREATE ON DATABASE postgres TO stranger, app;
        CREATE TABLE public.ran (who text); GRANT ALL ON public.ran TO PUBLIC;
        CREATE FUNCTION public.steal() RETURNS int8 LANGUAGE plpgsql VOLATILE AS
            $$ BEGIN INSERT INTO public.ran VALUES (current_user); RETURN 1; END $$",
    );
    let url = server.url().replace("postgres@", "app@");
    let is_over = Arc::new(AtomicBool::new(false));
    let (database, connection) =
        connect(&server.url().replace("postgres@", "stranger@"), NoTls).await.unwrap();
    tokio::spawn(connection);
    let exchanging = tokio::spawn({
        let is_over = is_over.clone();
        async move {
            while !is_over.load(Ordering::SeqCst) {
                // Each fails while the client's own tables are there.
                let _ = database
                    .batch_execute(
                        "CREATE SCHEMA leasehold; GRANT USAGE ON SCHEMA leasehold TO PUBLIC;
                        CREATE VIEW leasehold.layout AS SELECT public.steal() AS version;
                        GRANT SELECT ON leasehold.layout TO PUBLIC",
                    )
                    .await;
                let _ = database.batch_execute("DROP SCHEMA leasehold CASCADE").await;
            }
        }
    });
    let mut refused = 0;
    for _ in 0..60 {
        match Client::connect(&url).await {
            Ok(client) => client.close().await.unwrap(),
            Err(error) => refused += usize::from(error.to_string().contains("belongs to stranger")),
        }
        server.run("DROP SCHEMA IF EXISTS leasehold CASCADE");
    }
    is_over.store(true, Ordering::SeqCst);
    exchanging.await.unwrap();
    assert!(refused > 0, "the stranger was there in time");
    assert_eq!(server.run("SELECT count(*) FROM public.ran"), "0");
}

#[tokio::test]
async fn printed_statements_create_the_tables() {
    let server = Postgres::on_port();
    server.run(&leasehold::postgres::schema_sql(&server.url()).unwrap());
    lock(&client_of(&server).await, "a").await.release().await.unwrap();
    server.run("UPDATE leasehold.layout SET version = 99");
    let error = refusal(&server.url()).await.to_string();
    assert!(error.contains("layout 99"), "{error}");
    let missing = format!("{}nowhere", server.url().trim_end_matches("postgres"));
    assert!(refusal(&missing).await.to_string().contains("postgres://host/DATABASE"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_behind_a_pooler_get_the_lock_within_two_seconds_without_a_notification() {
    unless_paused(Duration::from_millis(300), async || {
        let server = Postgres::on_port();
        let pooler = PgBouncer::start(&server);
        let (holder, waiter) = (client_of(&server).await, Client::connect(&pooler.url()).await.unwrap());
        let held = lock(&holder, "a").await;
        let waiting = tokio::spawn(async move {
            let guard = lock(&waiter, "a").await;
            (Instant::now(), guard, waiter)
        });
        until_waiting(&holder, 1).await;
        held.release().await.unwrap();
        let released = Instant::now();
        let (granted, guard, waiter) = waiting.await.unwrap();
        assert!(granted - released < Duration::from_secs(2), "{:?}", granted - released);
        // The other way round the holder's client is behind the pooler, and the waiter is notified.
        let waiting = tokio::spawn(async move { lock(&holder, "a").await });
        until_waiting(&waiter, 1).await;
        guard.release().await.unwrap();
        waiting.await.unwrap().release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn database_administrator_sees_holders_and_waiters_in_views() {
    let server = Postgres::on_port();
    let client = client_of(&server).await;
    let held = lock(&client, "orders:42").await;
    let row = server.run("SELECT kind, name, token, metadata FROM leasehold.holders");
    assert!(row.starts_with(&format!("mutex|orders:42|{}|", held.token())), "{row}");
    let shared = client.semaphore("s", 3);
    let _permits = [shared.acquire(1).await.unwrap(), shared.acquire(2).await.unwrap()];
    assert_eq!(server.run("SELECT count(*) FROM leasehold.holders WHERE name = 's'"), "2");
    assert_eq!(server.run("SELECT count(*) FROM leasehold.waiters"), "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pooler_is_detected_by_clients_that_connect_at_the_same_time() {
    let server = Postgres::on_port();
    let pooler = PgBouncer::start(&server);
    client_of(&server).await;
    for url in [pooler.url(), server.url()] {
        let opening = (0..12).map(|_| {
            let url = url.clone();
            tokio::spawn(async move { Client::connect(&url).await.unwrap().diagnose().await.unwrap() })
        });
        for opened in opening.collect::<Vec<_>>() {
            let diagnosis = opened.await.unwrap();
            let mut findings = diagnosis.components.iter().flat_map(|component| &component.findings);
            assert_eq!(findings.any(|finding| finding.id == "pooler"), url == pooler.url(), "{url}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn time_of_a_grant_is_read_after_the_wait_for_the_row() {
    let server = Postgres::on_port();
    let (one, two) = (client_of(&server).await, client_of(&server).await);
    server.run("CREATE TABLE freed (name text, at int8)");
    for path in ["statement", "transaction"] {
        let held = lock(&one, path).await;
        if path == "transaction" {
            // From now on its client expects others there.
            assert!(two.mutex(path).try_lock().await.unwrap().is_none());
        }
        held.release().await.unwrap();
        let row = format!("SELECT id FROM leasehold.resource WHERE name = '{path}' FOR UPDATE");
        let _session = server.session(&format!(
            "BEGIN; {row};
            DO $$ BEGIN
                WHILE NOT EXISTS (SELECT FROM pg_locks WHERE NOT granted) LOOP PERFORM pg_sleep(0.01); END LOOP;
            END $$;
            INSERT INTO freed SELECT '{path}', extract(epoch FROM clock_timestamp()) * 1000000;
            COMMIT"
        ));
        leasehold_testkit::wait_until("it has the row", || server.try_run(&format!("{row} NOWAIT")).is_err());
        let guard = two.mutex(path).try_lock().await.unwrap().expect("it is free");
        let is_later = format!(
            "SELECT granted_at > at FROM leasehold.resource JOIN freed USING (name) WHERE name = '{path}'"
        );
        assert_eq!(server.run(&is_later), "t", "{path}");
        guard.release().await.unwrap();
    }
}

/// Behind it a command would be done in part, and its lock be held for as long as the lease lasts.
#[tokio::test]
async fn pooler_in_statement_mode_is_refused_and_leaves_no_lock() {
    let server = Postgres::on_port();
    let healthy = client_of(&server).await;
    let pooler = PgBouncer::in_mode(&server, "statement");
    for parameter in ["", "?pooler=yes", "?pooler=no"] {
        let error = refusal(&format!("{}{parameter}", pooler.url())).await;
        assert!(error.to_string().contains("pool_mode = transaction"), "{parameter}: {error}");
    }
    assert!(healthy.list().await.unwrap().is_empty());
}

#[tokio::test]
async fn doctor_names_the_mode_of_a_pooler_and_its_remedy() {
    let server = Postgres::on_port();
    for (mode, parameter, remedy) in [
        ("session", "", Some("?pooler=no")),
        ("session", "?pooler=no", None),
        ("transaction", "", Some("?listen=ADDRESS-WITHOUT-THE-POOLER")),
        ("transaction", "?pooler=no", Some("?pooler=yes")),
    ] {
        let pooler = PgBouncer::in_mode(&server, mode);
        let client = Client::connect(&format!("{}{parameter}", pooler.url())).await.unwrap();
        let diagnosis = client.diagnose().await.unwrap();
        let mut findings = diagnosis.components.iter().flat_map(|component| &component.findings);
        let found = findings.find(|finding| finding.id == "pooler");
        assert_eq!(
            found.and_then(|finding| finding.remedy.as_deref()),
            remedy,
            "{mode}{parameter}: {diagnosis:?}"
        );
        assert!(found.is_none_or(|finding| finding.what.contains(&format!("in {mode} mode"))), "{found:?}");
    }
}

/// An address with a client certificate of this pair.
fn with_certificate(server: &Postgres, authority: &Path, pair: &Pair) -> String {
    let (authority, certificate, key) = (authority.display(), pair.certificate.display(), pair.key.display());
    format!("{}?sslmode=verify-full&sslrootcert={authority}&sslcert={certificate}&sslkey={key}", server.url())
}

#[tokio::test]
async fn refused_client_certificate_is_not_called_the_servers() {
    let (files, others) = (Certificates::new(), Certificates::new());
    let server = Postgres::builder().tls(&files.server).client_authority(&files.authority).start();
    let client = Client::connect(&with_certificate(&server, &files.authority, &files.client)).await.unwrap();
    lock(&client, "a").await.release().await.unwrap();
    for (authority, pair, expected) in [
        (
            &files.authority,
            &others.client,
            "does not know the authority of the client certificate (sslcert=PATH)",
        ),
        (
            &others.authority,
            &files.client,
            "the server's certificate is from an authority that is not known here",
        ),
    ] {
        let error = refusal(&with_certificate(&server, authority, pair)).await;
        assert!(error.is_unavailable() && error.to_string().contains(expected), "{error}");
    }
}

/// A process that starts now would find the new files.
#[tokio::test]
async fn certificates_that_were_replaced_are_used_by_the_next_connection() {
    let (old, new) = (Certificates::new(), Certificates::new());
    let server = Postgres::builder().tls(&old.server).client_authority(&old.authority).start();
    let folder = tempfile::tempdir().unwrap();
    let own = Pair { certificate: folder.path().join("client.pem"), key: folder.path().join("client.key") };
    let use_pair = |pair: &Pair| {
        fs::copy(&pair.certificate, &own.certificate).unwrap();
        fs::copy(&pair.key, &own.key).unwrap();
    };
    use_pair(&old.client);
    let client = Client::connect(&with_certificate(&server, &old.authority, &own)).await.unwrap();
    let guard = lock(&client, "a").await;
    server.set_client_authority(&new.authority);
    server.run("SELECT pg_reload_conf()");
    leasehold_testkit::until(async || {
        Client::connect(&with_certificate(&server, &old.authority, &old.client)).await.is_err()
    })
    .await;
    let end_all = || {
        server.run(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid()",
        )
    };
    use_pair(&new.client);
    end_all();
    leasehold_testkit::until(async || client.mutex("b").try_lock().await.is_ok()).await;
    assert!(guard.is_held());
    // While they are being replaced, the last ones count.
    fs::write(&own.key, "").unwrap();
    end_all();
    leasehold_testkit::until(async || client.mutex("c").try_lock().await.is_ok()).await;
    guard.release().await.unwrap();
}

/// Whatever stands in the place of a certificate: nothing waits for it, least of all the leases of other clients, which one thread renews.
#[tokio::test]
async fn certificate_that_is_no_file_any_more_holds_nothing_up() {
    let files = Certificates::new();
    let server = Postgres::builder().tls(&files.server).start();
    let folder = tempfile::tempdir().unwrap();
    let authority = folder.path().join("ca.pem");
    fs::copy(&files.authority, &authority).unwrap();
    let url = format!("{}?sslmode=verify-full&sslrootcert={}", server.url(), authority.display());
    let client = Client::connect(&url).await.unwrap();
    let redis = leasehold_testkit::Server::on_port();
    let other = Client::connect(&redis.url()).await.unwrap();
    let ttl = Duration::from_secs(5);
    let (guard, others) = (lock(&client, "a").await, other.mutex("a").ttl(ttl).lock().await.unwrap());
    for what in NoCertificate::ALL {
        what.replace(&authority);
        server.run(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid()",
        );
        // With the last certificates.
        leasehold_testkit::until(async || client.mutex("b").try_lock().await.is_ok()).await;
        let before = others.remaining();
        leasehold_testkit::until(async || others.remaining() > before).await;
        assert!(others.is_held(), "{what:?}");
        let error = tokio::time::timeout(Duration::from_secs(30), Client::connect(&url))
            .await
            .unwrap_or_else(|_| panic!("{what:?}"))
            .unwrap_err();
        assert!(error.to_string().contains("ca.pem"), "{what:?}: {error}");
    }
    guard.release().await.unwrap();
    others.release().await.unwrap();
}
