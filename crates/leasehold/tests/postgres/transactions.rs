//! Locks and fences in transactions of the program.

use std::time::Duration;

use futures_util::future::join_all;
use leasehold::fence::postgres::{CHECK_SQL, check, check_token, create};
use leasehold::postgres::TransactionLock;
use leasehold::tokio_postgres::{Client as Database, IsolationLevel, NoTls, connect};
use leasehold::{Client, Token};
use leasehold_testkit::Postgres;

use super::{client_of, lock};

async fn database(server: &Postgres) -> Database {
    let (database, connection) = connect(&server.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    database
}

#[tokio::test]
async fn transaction_lock_is_held_until_the_transaction_ends() {
    let server = Postgres::on_port();
    let (mut one, mut two) = (database(&server).await, database(&server).await);
    create(&one).await.unwrap();
    let balance = TransactionLock::new("balance:42").unwrap();
    for commits in [true, false] {
        let first = one.transaction().await.unwrap();
        balance.lock(&first).await.unwrap();
        assert!(balance.try_lock(&first).await.unwrap(), "its own");
        let second = two.transaction().await.unwrap();
        assert!(!balance.try_lock(&second).await.unwrap());
        assert!(TransactionLock::new("balance:43").unwrap().try_lock(&second).await.unwrap());
        let waiting = async {
            balance.lock(&second).await.unwrap();
            second.rollback().await.unwrap();
        };
        let ending = async {
            leasehold_testkit::until(async || {
                server.run("SELECT count(*) FROM pg_locks WHERE NOT granted") == "1"
            })
            .await;
            if commits { first.commit().await.unwrap() } else { first.rollback().await.unwrap() }
        };
        tokio::join!(waiting, ending);
    }
    let first = one.transaction().await.unwrap();
    balance.lock(&first).await.unwrap();
    let second = two.transaction().await.unwrap();
    second.batch_execute("SET LOCAL lock_timeout = '50ms'").await.unwrap();
    let error = balance.lock(&second).await.unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("balance:42"), "{error}");
}

#[tokio::test]
async fn transaction_lock_excludes_no_mutex_of_the_same_name() {
    let server = Postgres::on_port();
    let mut database = database(&server).await;
    let transaction = database.transaction().await.unwrap();
    let lacking = TransactionLock::new("a").unwrap().lock(&transaction).await.unwrap_err();
    assert!(lacking.is_unavailable() && lacking.to_string().contains("leasehold migrate"), "{lacking}");
    drop(transaction);
    create(&database).await.unwrap();
    let transaction = database.transaction().await.unwrap();
    TransactionLock::new("a").unwrap().lock(&transaction).await.unwrap();
    lock(&client_of(&server).await, "a").await.release().await.unwrap();
}

#[tokio::test]
async fn fence_refuses_a_stale_token_and_the_commit_of_its_transaction() {
    let server = Postgres::on_port();
    let mut database = database(&server).await;
    create(&database).await.unwrap();
    create(&database).await.unwrap();
    server.run("CREATE TABLE report (body text)");
    // The lock may be anywhere.
    let client = Client::connect("memory:").await.unwrap();
    let stale = client.mutex("report").lock().await.unwrap();
    let stale_token = stale.token();
    stale.release().await.unwrap();
    let fresh = client.mutex("report").lock().await.unwrap();

    for _ in 0..2 {
        let transaction = database.transaction().await.unwrap();
        check(&transaction, &fresh).await.unwrap();
        transaction.execute("INSERT INTO report VALUES ('fresh')", &[]).await.unwrap();
        transaction.commit().await.unwrap();
    }
    let transaction = database.transaction().await.unwrap();
    let error = check_token(&transaction, "report", stale_token).await.unwrap_err();
    assert!(error.is_stale() && error.to_string().contains(&fresh.token().to_string()), "{error}");
    // Who does not look at the error can't write either.
    assert!(transaction.execute("INSERT INTO report VALUES ('stale')", &[]).await.is_err());
    let _ = transaction.commit().await;
    assert_eq!(server.run("SELECT string_agg(body, ',') FROM report"), "fresh,fresh");
    // Other resources have tokens of their own.
    let transaction = database.transaction().await.unwrap();
    check_token(&transaction, "another", stale_token).await.unwrap();
    let other_languages = format!("PREPARE fence AS {CHECK_SQL}; EXECUTE fence('report', 1)");
    assert!(server.try_run(&other_languages).unwrap_err().contains("its lease has ended"));
}

#[tokio::test]
async fn fence_keeps_newer_holders_out_until_the_transaction_ends_and_names_who_is_in_the_way() {
    let server = Postgres::on_port();
    let (mut old, mut new) = (database(&server).await, database(&server).await);
    create(&old).await.unwrap();
    server.run("ALTER FUNCTION leasehold.check_fence SET lock_timeout = '200ms'");
    server.run("SELECT leasehold.check_fence('report', 1)");
    let token = |number| Token::new(number).unwrap();
    let first = old.transaction().await.unwrap();
    check_token(&first, "report", token(5)).await.unwrap();
    let second = new.transaction().await.unwrap();
    let error = check_token(&second, "report", token(6)).await.unwrap_err();
    let pid: i32 = first.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    assert!(
        error.is_timeout() && error.to_string().contains(&format!("process {pid} of postgres")),
        "{error}"
    );
    drop(second);
    server.run("ALTER FUNCTION leasehold.check_fence SET lock_timeout = '10s'");
    let second = new.transaction().await.unwrap();
    let (checked, ()) = tokio::join!(check_token(&second, "report", token(6)), async {
        leasehold_testkit::until(async || {
            server.run("SELECT count(*) FROM pg_locks WHERE NOT granted") != "0"
        })
        .await;
        first.commit().await.unwrap();
    });
    checked.unwrap();
    second.commit().await.unwrap();
    let late = old.transaction().await.unwrap();
    assert!(check_token(&late, "report", token(5)).await.unwrap_err().is_stale());
}

#[tokio::test]
async fn check_that_waited_in_a_repeatable_read_transaction_asks_for_a_repeat() {
    let server = Postgres::on_port();
    let (mut old, mut new) = (database(&server).await, database(&server).await);
    create(&old).await.unwrap();
    server.run("SELECT leasehold.check_fence('report', 1)");
    let token = |number| Token::new(number).unwrap();
    let first = old.transaction().await.unwrap();
    check_token(&first, "report", token(5)).await.unwrap();
    let strict = new.build_transaction().isolation_level(IsolationLevel::RepeatableRead);
    let second = strict.start().await.unwrap();
    let (checked, ()) = tokio::join!(check_token(&second, "report", token(6)), async {
        leasehold_testkit::until(async || {
            server.run("SELECT count(*) FROM pg_locks WHERE NOT granted") != "0"
        })
        .await;
        first.commit().await.unwrap();
    });
    let error = checked.unwrap_err();
    assert!(!error.is_stale() && error.to_string().contains("could not serialize"), "{error}");
    second.rollback().await.unwrap();
    let strict = new.build_transaction().isolation_level(IsolationLevel::RepeatableRead);
    let again = strict.start().await.unwrap();
    check_token(&again, "report", token(6)).await.unwrap();
    again.commit().await.unwrap();
}

#[tokio::test]
async fn transaction_lock_is_refused_where_the_transaction_would_not_see_what_the_holder_wrote() {
    let server = Postgres::on_port();
    let mut database = database(&server).await;
    create(&database).await.unwrap();
    let balance = TransactionLock::new("balance:42").unwrap();
    for level in [IsolationLevel::RepeatableRead, IsolationLevel::Serializable] {
        for tries in [false, true] {
            let strict = database.build_transaction().isolation_level(level).start().await.unwrap();
            let refused =
                if tries { balance.try_lock(&strict).await.map(drop) } else { balance.lock(&strict).await };
            let error = refused.unwrap_err();
            assert!(error.is_invalid() && error.to_string().contains("READ COMMITTED"), "{error}");
        }
        assert_eq!(server.run("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"), "0");
    }
    let plain = database.build_transaction().isolation_level(IsolationLevel::ReadCommitted);
    let plain = plain.start().await.unwrap();
    assert!(balance.try_lock(&plain).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fence_is_created_by_several_programs_at_once_and_keeps_what_was_changed() {
    let server = Postgres::on_port();
    let databases = join_all((0..6).map(|_| database(&server))).await;
    for created in join_all(databases.iter().map(create)).await {
        created.unwrap();
    }
    server.run("ALTER FUNCTION leasehold.check_fence SET lock_timeout = '2s'");
    server.run(
        "CREATE ROLE app LOGIN; GRANT USAGE ON SCHEMA leasehold TO app;
        GRANT SELECT, INSERT, UPDATE ON leasehold.fence TO app",
    );
    let (app, connection) = connect(&server.url().replace("postgres@", "app@"), NoTls).await.unwrap();
    tokio::spawn(connection);
    create(&app).await.unwrap();
    let changed =
        "SELECT proconfig::text LIKE '%lock_timeout=2s%' FROM pg_proc WHERE proname = 'check_fence'";
    assert_eq!(server.run(changed), "t");
}

/// Documented: a check in a savepoint protects what is in it, and not the transaction.
#[tokio::test]
async fn check_in_a_savepoint_that_is_rolled_back_does_not_stop_the_transaction() {
    let server = Postgres::on_port();
    let mut database = database(&server).await;
    create(&database).await.unwrap();
    server.run("SELECT leasehold.check_fence('report', 6); CREATE TABLE report (body text)");
    let token = Token::new(5).unwrap();
    let mut late = database.transaction().await.unwrap();
    let savepoint = late.transaction().await.unwrap();
    assert!(check_token(&savepoint, "report", token).await.unwrap_err().is_stale());
    savepoint.rollback().await.unwrap();
    late.execute("INSERT INTO report VALUES ('late')", &[]).await.unwrap();
    late.commit().await.unwrap();
    assert_eq!(server.run("SELECT count(*) FROM report"), "1");
    // In the transaction itself it does.
    let late = database.transaction().await.unwrap();
    assert!(check_token(&late, "report", token).await.unwrap_err().is_stale());
    late.execute("INSERT INTO report VALUES ('late')", &[]).await.unwrap_err();
    late.commit().await.unwrap();
    assert_eq!(server.run("SELECT count(*) FROM report"), "1");
}

/// A holder whose lease ended before it wrote: with the fence its writes are refused, and without it some are not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_writes_are_refused_by_the_fence_and_only_by_it() {
    let server = Postgres::on_port();
    let client = client_of(&server).await;
    let setup = database(&server).await;
    create(&setup).await.unwrap();
    server.run("CREATE TABLE register (token int8); INSERT INTO register VALUES (0)");
    for is_fenced in [true, false] {
        let mut late_writes = 0;
        let mut database = database(&server).await;
        for _ in 0..5 {
            let short = client.mutex("register").ttl(Duration::from_millis(500));
            let stale = short.lock().await.unwrap();
            let stale_token = stale.token();
            // As after a pause of the process that outlasted the lease.
            client.force_release(leasehold::Kind::Mutex, "register").await.unwrap();
            let fresh = lock(&client, "register").await;
            for token in [fresh.token(), stale_token] {
                let transaction = database.transaction().await.unwrap();
                if is_fenced && check_token(&transaction, "register", token).await.is_err() {
                    continue;
                }
                let write = "UPDATE register SET token = $1 RETURNING (SELECT token FROM register)";
                let before: i64 = transaction.query_one(write, &[&i64::from(token)]).await.unwrap().get(0);
                late_writes += u32::from(before > i64::from(token));
                transaction.commit().await.unwrap();
            }
            fresh.release().await.unwrap();
            drop(stale);
        }
        assert_eq!(late_writes, if is_fenced { 0 } else { 5 });
        server.run("UPDATE register SET token = 0");
    }
}

#[tokio::test]
async fn tables_that_are_created_after_the_fence_leave_its_function_as_it_is() {
    let server = Postgres::on_port();
    create(&database(&server).await).await.unwrap();
    server.run("ALTER FUNCTION leasehold.check_fence SET lock_timeout = '2s'");
    lock(&client_of(&server).await, "a").await.release().await.unwrap();
    let settings =
        server.run("SELECT array_to_string(proconfig, ' ') FROM pg_proc WHERE proname = 'check_fence'");
    assert!(settings.contains("lock_timeout=2s"), "{settings}");
}

/// An advisory lock takes no right, so nothing waits for one.
#[tokio::test]
async fn role_without_rights_keeps_no_transaction_from_its_fence_or_its_lock() {
    let server = Postgres::on_port();
    let mut program = database(&server).await;
    create(&program).await.unwrap();
    server.run("CREATE ROLE stranger LOGIN");
    let balance = TransactionLock::new("balance:42").unwrap();
    let transaction = program.transaction().await.unwrap();
    check_token(&transaction, "report", Token::new(5).unwrap()).await.unwrap();
    balance.lock(&transaction).await.unwrap();
    // Everything that the stranger can see, and what names led to before.
    let seen = server.run(
        "SELECT string_agg(((classid::int8 << 32) | objid::int8)::text, ' ') FROM pg_locks WHERE locktype = 'advisory'",
    );
    transaction.commit().await.unwrap();
    let (stranger, connection) =
        connect(&server.url().replace("postgres@", "stranger@"), NoTls).await.unwrap();
    tokio::spawn(connection);
    let named = [
        "hashtextextended('leasehold fence:report', 0)",
        "hashtextextended('leasehold:balance:42', 5497853469226813764)",
    ];
    for key in seen.split_whitespace().chain(named) {
        stranger.batch_execute(&format!("SELECT pg_advisory_lock({key})")).await.unwrap();
    }
    assert!(stranger.batch_execute("BEGIN; SELECT leasehold.check_fence('report', 9)").await.is_err());
    stranger.batch_execute("ROLLBACK").await.unwrap();
    let transaction = program.transaction().await.unwrap();
    transaction.batch_execute("SET LOCAL statement_timeout = '5s'").await.unwrap();
    check_token(&transaction, "report", Token::new(6).unwrap()).await.unwrap();
    assert!(balance.try_lock(&transaction).await.unwrap());
    balance.lock(&transaction).await.unwrap();
    transaction.commit().await.unwrap();
}

#[tokio::test]
async fn rows_of_transaction_locks_may_be_deleted_at_any_time() {
    let server = Postgres::on_port();
    let (mut one, mut two) = (database(&server).await, database(&server).await);
    create(&one).await.unwrap();
    let lock = TransactionLock::new("a").unwrap();
    let first = one.transaction().await.unwrap();
    lock.lock(&first).await.unwrap();
    first.commit().await.unwrap();
    let first = one.transaction().await.unwrap();
    lock.lock(&first).await.unwrap();
    // It waits for the holder, and the next holder waits for it.
    let deletion = server.session("DELETE FROM leasehold.transaction_lock");
    let waiting = async |count: &str| {
        leasehold_testkit::until(async || {
            server.run("SELECT count(*) FROM pg_locks WHERE NOT granted") == count
        })
        .await;
    };
    waiting("1").await;
    let second = two.transaction().await.unwrap();
    assert!(!lock.try_lock(&second).await.unwrap());
    let (locked, ()) = tokio::join!(lock.lock(&second), async {
        waiting("2").await;
        first.commit().await.unwrap();
    });
    locked.unwrap();
    drop(deletion);
    let third = one.transaction().await.unwrap();
    assert!(!lock.try_lock(&third).await.unwrap());
    second.commit().await.unwrap();
    assert!(lock.try_lock(&third).await.unwrap());
}
