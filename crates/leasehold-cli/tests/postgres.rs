//! The program on PostgreSQL: run, wait, look, take away; and the tables.

#![allow(missing_docs, reason = "a test")]

mod common;

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

use common::Place;
use leasehold_testkit::{PgBouncer, Postgres};

fn token(line: &str) -> u64 {
    line.parse().unwrap_or_else(|_| panic!("{line:?} is no token"))
}

/// One runs a command, another waits for it; who looks sees both; and who has to, takes it away.
fn is_used_as_any_other(url: &str) {
    let place = Place::on(url);
    let gone = place.path("gone");
    let script = format!("echo $LEASEHOLD_TOKEN; until [ -e {} ]; do sleep 0.05; done", gone.display());
    let mut holder = place.start(&["run", "nightly", "--", "sh", "-c", &script]);
    let first = token(&holder.line());
    assert_eq!(place.code(&["run", "-n", "nightly", "--", "true"]).0, 1, "it is held");
    let mut waiter = place.start(&["run", "nightly", "--", "sh", "-c", "echo $LEASEHOLD_TOKEN"]);
    place.until_waiting("nightly", 1);
    assert_eq!(place.locks().as_array().map(Vec::len), Some(1));
    std::fs::write(&gone, "").expect("the folder is there");
    let second = token(&waiter.line());
    assert!(holder.end() == 0 && waiter.end() == 0 && first < second);

    let mut stuck = place.start(&["run", "nightly", "--", "sleep", "600"]);
    place.until_held("nightly");
    assert_eq!(place.code(&["release", "--force", "nightly"]).0, 0);
    assert_eq!(stuck.end(), 124, "its command is stopped when the lease is taken away");
}

#[test]
fn database_is_used_as_any_other_store_directly_and_through_a_pooler() {
    let server = Postgres::on_port();
    is_used_as_any_other(&server.url());
    is_used_as_any_other(&server.socket_url());
    let pooler = PgBouncer::start(&server);
    is_used_as_any_other(&pooler.url());
    is_used_as_any_other(&format!("{}?listen={}", pooler.url(), server.url()));
}

#[test]
fn migrate_prints_or_creates_the_tables_and_doctor_looks_at_the_server() {
    let server = Postgres::on_port();
    let place = Place::on(&server.url());
    let printed = place.output(&["migrate", "--print"]);
    let printed = String::from_utf8(printed.stdout).expect("text");
    assert!(printed.contains("CREATE TABLE leasehold.resource"), "{printed}");
    assert!(server.try_run("SELECT * FROM leasehold.layout").is_err(), "it was only printed");
    assert_eq!(place.code(&["migrate"]).0, 0);
    assert_eq!(server.run("SELECT version FROM leasehold.layout"), "2");
    assert_eq!(place.code(&["migrate"]).0, 0);
    // The tests' servers do not wait for the disk.
    let report = place.output(&["doctor"]);
    let report = String::from_utf8(report.stdout).expect("text");
    assert!(report.contains("fsync is off") && report.contains("ALTER SYSTEM SET fsync = on"), "{report}");
    let elsewhere = Place::new();
    assert_ne!(elsewhere.code(&["migrate"]).0, 0, "a file has no tables to create");
}

#[test]
fn doctor_names_roles_that_may_only_read_the_tables() {
    let server = Postgres::on_port();
    let place = Place::on(&server.url());
    assert_eq!(place.code(&["migrate"]).0, 0);
    server.run(
        "CREATE ROLE app LOGIN; GRANT USAGE ON SCHEMA leasehold TO app;
         GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA leasehold TO app;
         CREATE ROLE idle LOGIN; CREATE ROLE boss LOGIN SUPERUSER; CREATE ROLE apps; GRANT app TO apps;
         CREATE ROLE member LOGIN NOINHERIT; GRANT apps TO member;
         CREATE ROLE viewer LOGIN; GRANT SELECT ON leasehold.holders, leasehold.waiters TO viewer",
    );
    let said = || {
        let report = place.output(&["doctor"]);
        String::from_utf8(report.stdout).expect("text")
    };
    let quiet = said();
    assert!(!quiet.contains("may read the tables"), "{quiet}");
    server.run(
        "CREATE ROLE readers; GRANT SELECT ON leasehold.waiter TO readers;
         CREATE ROLE \"dash Board\" LOGIN NOINHERIT; GRANT readers TO \"dash Board\";
         CREATE ROLE backup LOGIN; GRANT pg_read_all_data TO backup; GRANT readers TO member",
    );
    let report = said();
    let line = report.lines().find(|line| line.contains("may read the tables")).expect("a finding");
    assert!(line.contains("\"dash Board\"") && line.contains("backup"), "{report}");
    for other in ["app", "idle", "boss", "member", "viewer", "postgres"] {
        assert!(!line.split([' ', ',']).any(|word| word == other), "{other}: {line}");
    }
}

/// What psql makes of a script, as this role.
fn psql(server: &Postgres, role: &str, script: &[u8]) -> Output {
    let mut psql = Command::new("psql");
    psql.args(["-X", "-q", "-U", role, "-d", "postgres", "-p", &server.port().to_string(), "-h"])
        .arg(server.folder());
    let mut psql =
        psql.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("psql runs");
    psql.stdin.take().expect("it is piped").write_all(script).expect("psql reads");
    psql.wait_with_output().expect("psql ends")
}

#[test]
fn printed_statements_need_no_store_and_their_failure_is_that_of_the_pipe() {
    let server = Postgres::on_port();
    server.run("CREATE ROLE app LOGIN");
    let printed = Place::new().output(&["migrate", "--print"]);
    assert!(printed.status.success(), "{printed:?}");
    let refused = psql(&server, "app", &printed.stdout);
    assert!(!refused.status.success(), "{refused:?}");
    assert!(server.try_run("SELECT FROM leasehold.layout").is_err(), "a part of it was done");
    // Again, on tables that are there.
    for _ in 0..2 {
        let done = psql(&server, "postgres", &printed.stdout);
        assert!(done.status.success() && done.stdout.is_empty(), "{done:?}");
    }
    let place = Place::on(&server.url());
    assert_eq!(place.code(&["run", "a", "--", "true"]).0, 0);
    let with_schema = place.output(&["--store", "postgres://nowhere/?schema=other", "migrate", "--print"]);
    assert!(
        String::from_utf8_lossy(&with_schema.stdout).contains("CREATE TABLE other.resource"),
        "{with_schema:?}"
    );
    // Who may not create them is told the command, and not all of the statements.
    let refused = Place::on(&format!("{}?schema=third", server.url().replace("postgres@", "app@")));
    let refused = refused.output(&["migrate"]);
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success()
            && stderr.contains("leasehold migrate --print")
            && stderr.lines().count() < 4,
        "{stderr}"
    );
}
