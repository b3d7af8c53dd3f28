//! Files that are damaged, full, of others, or changed by others.

use super::*;

#[test]
fn foreign_file_is_refused_and_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("no/locks.db");
    assert!(refusal(&missing).contains("does not exist: create it"));
    assert!(!missing.parent().unwrap().exists());
    assert!(refusal(folder.path()).contains("this is a directory"));

    let text = folder.path().join("text");
    let said = "no database at all\n".repeat(500);
    fs::write(&text, &said).unwrap();
    assert!(refusal(&text).contains("damaged or no database"));
    assert_eq!(fs::read_to_string(&text).unwrap(), said);

    let foreign = folder.path().join("foreign");
    Connection::open(&foreign)
        .unwrap()
        .execute_batch("CREATE TABLE t (a); INSERT INTO t VALUES (1)")
        .unwrap();
    let before = fs::read(&foreign).unwrap();
    assert!(refusal(&foreign).contains("of another program"));
    assert_eq!(fs::read(&foreign).unwrap(), before);

    let newer = folder.path().join("newer");
    drop(open(&newer, 1).unwrap());
    Connection::open(&newer).unwrap().execute_batch("PRAGMA user_version = 9").unwrap();
    assert!(refusal(&newer).contains("another version of leasehold wrote it (layout 9"));
}

/// A query that does not end.
const ENDLESS: &str = "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i FROM n) SELECT count(*) FROM n";

#[test]
fn file_with_code_of_another_person_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (number, (change, says)) in [
        (format!("CREATE TRIGGER t BEFORE INSERT ON lease BEGIN {ENDLESS}; END"), "the trigger \"t\""),
        (format!("DROP TABLE meta; CREATE VIEW meta (key, value) AS {ENDLESS}"), "\"meta\""),
        (format!("CREATE VIEW v AS {ENDLESS}"), "the view \"v\""),
        ("CREATE UNIQUE INDEX i ON lease (hex(metadata))".to_owned(), "the index \"i\""),
        (
            format!("CREATE INDEX i ON lease (hex(metadata)); {}", renamed("i", "sqlite_i")),
            "the index \"sqlite_i\"",
        ),
        ("ALTER TABLE waiter ADD COLUMN c AS (hex(since))".to_owned(), "the table \"waiter\""),
        ("CREATE TABLE t (a CHECK (hex(a) > ''))".to_owned(), "the table \"t\""),
        ("DROP INDEX lease_owner".to_owned(), "the index \"lease_owner\""),
    ]
    .into_iter()
    .enumerate()
    {
        let path = folder.path().join(number.to_string());
        drop(open(&path, 1).unwrap());
        Connection::open(&path).unwrap().execute_batch(&change).unwrap();
        let refusal = refusal(&path);
        assert!(refusal.contains(says) && refusal.contains("undo this change"), "{change}: {refusal}");
    }
    let analyzed = folder.path().join("analyzed");
    drop(open(&analyzed, 1).unwrap());
    Connection::open(&analyzed).unwrap().execute_batch("ANALYZE").unwrap();
    drop(open(&analyzed, 1).expect("its statistics are not code"));
}

fn renamed(index: &str, name: &str) -> String {
    format!(
        "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET name = '{name}', sql = replace(sql, 'INDEX {index}', 'INDEX {name}')
        WHERE name = '{index}'; PRAGMA writable_schema = RESET"
    )
}

#[test]
fn trigger_that_is_made_meanwhile_does_not_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    Connection::open(&path)
        .unwrap()
        .execute_batch(&format!("CREATE TRIGGER t BEFORE INSERT ON lease BEGIN {ENDLESS}; END"))
        .unwrap();
    for command in [acquire(id(1, 1), false), Command::Inspect] {
        let refused = store.try_call_inline(&resource("a"), &command).unwrap().unwrap_err();
        assert!(refused.message.contains("the trigger \"t\"") && refused.failure.is_refusal(), "{refused:?}");
    }
    Connection::open(&path).unwrap().execute_batch("DROP TRIGGER t").unwrap();
    assert!(matches!(granted(&store, id(1, 1)), Reply::Granted(_)));
}

/// SQLite goes on with the schema that it has read, if the file has the same version of it again.
#[test]
fn index_that_is_taken_back_does_not_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    assert!(matches!(granted(&store, id(1, 1)), Reply::Granted(_)));
    let other = Connection::open(&path).unwrap();
    let command = |client| acquire(id(client, 1), false);
    // Over the connection of the callers, and that of the worker.
    let inline = |client| store.try_call_inline(&resource("b"), &command(client)).unwrap();
    let worker =
        |client| pollster::block_on(store.call(Call::new(Arc::new(resource("c")), command(client)), 0));
    for call in [&inline as &dyn Fn(u128) -> CallResult, &worker] {
        other
            .execute_batch("CREATE INDEX i ON tombstone (abs(until * 0 - 9223372036854775807 - 1))")
            .unwrap();
        assert!(call(1).unwrap_err().message.contains("the index \"i\""));
        other
            .execute_batch("PRAGMA writable_schema = ON; DELETE FROM sqlite_schema WHERE name = 'i'")
            .unwrap();
        assert!(matches!(call(1).unwrap().reply, Reply::Granted(_)));
        // Its tombstone would be in the index.
        let released = store.try_call_inline(&resource("a"), &release(id(9, 9))).unwrap();
        assert!(released.is_ok(), "{released:?}");
        other.execute_batch("PRAGMA writable_schema = RESET").unwrap();
    }
}

/// SQLite reads the statistics with the schema, before it can be checked, and calls what a column of theirs calls.
#[test]
fn statistics_with_code_end_in_time_and_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    drop(open(&path, 1).unwrap());
    let other = Connection::open(&path).unwrap();
    let column = "x, stat AS (instr(zeroblob(200000000), CAST(zeroblob(100000000) || x AS BLOB)))";
    other
        .execute_batch(&format!(
            "CREATE TABLE s (tbl, idx, stat); INSERT INTO s VALUES ('resource', 'resource_visit', 1); PRAGMA writable_schema = ON;
            UPDATE sqlite_schema SET name = 'sqlite_stat1', tbl_name = 'sqlite_stat1', sql = 'CREATE TABLE sqlite_stat1(tbl, idx, {column})'
            WHERE name = 's'"
        ))
        .unwrap();
    drop(other);
    let refusal = refusal(&path);
    assert!(refusal.contains("the table \"sqlite_stat1\""), "{refusal}");
}

#[test]
fn what_takes_too_long_is_ended() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    drop(open(&path, 1).unwrap());
    let connection = schema::connect(&path, false).unwrap();
    let ended = connection.limited().query_row(ENDLESS, [], |_| Ok(())).unwrap_err();
    assert!(schema::explain(&ended).contains("took too long"), "{ended}");
    connection.limited().query_row("SELECT 1", [], |_| Ok(())).unwrap();
}

/// SQLite looks at the limit after some steps of a statement, which it counts over all runs: the first one is over at any moment of a command.
#[test]
fn command_that_is_ended_leaves_no_transaction_open() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    let other = Connection::open(&path).unwrap();
    // The schema is read and checked.
    assert!(matches!(granted(&store, id(9, 1)), Reply::Granted(_)));
    callers_connection(&store).limit = Duration::ZERO;
    let mut ended = 0;
    for number in 0..100 {
        // BEGIN and COMMIT are never ended, however long ago the connection was used.
        let answered = store.try_call_inline(&resource("a"), &acquire(id(1, number), false)).unwrap();
        ended += u32::from(answered.is_err_and(|error| error.message.contains("took too long")));
        drop(callers_connection(&store).begin().expect("no transaction is open"));
        other.execute_batch("BEGIN IMMEDIATE; ROLLBACK").expect("the file is free");
    }
    assert!(ended > 5, "{ended} of 100 were ended");
    callers_connection(&store).limit = foreign_code::TIME_LIMIT;
    assert!(store.try_call_inline(&resource("b"), &acquire(id(9, 2), false)).unwrap().is_ok());
}

/// The transaction of a BEGIN that was reported as ended. A connection that a caller uses next has none.
#[test]
fn open_transaction_is_rolled_back_by_the_next_use() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    callers_connection(&store).limited().execute_batch("BEGIN IMMEDIATE").unwrap();
    let failed = store.try_call_inline(&resource("a"), &acquire(id(1, 1), false)).unwrap();
    assert!(failed.is_err(), "{failed:?}");
    assert!(matches!(granted(&store, id(1, 2)), Reply::Granted(_)));
    Connection::open(&path).unwrap().execute_batch("BEGIN IMMEDIATE; ROLLBACK").expect("the file is free");
}

/// What is at the name of the log when SQLite opens it would be overwritten, and become the property of the owner of the database.
#[test]
fn root_uses_the_file_with_the_rights_of_the_directory_s_owner() {
    let folder = tempfile::tempdir().unwrap();
    let of_alice = folder.path().join("alice");
    fs::create_dir(&of_alice).unwrap();
    if !give_to_alice(&of_alice) {
        return;
    }
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let path = of_alice.join("locks.db");
    let store = open(&path, 1).unwrap();
    let attempt = acquire(id(1, 1), false);
    assert!(store.try_call_inline(&resource("a"), &attempt).is_none(), "this thread has root's rights");
    let answer = pollster::block_on(store.call(Call::new(Arc::new(resource("a")), attempt), 0)).unwrap();
    assert!(matches!(answer.reply, Reply::Granted(_)));
    let set = [(Arc::new(resource("b")), Arc::new(Acquire::exclusive(id(1, 2), TTL)))];
    let answers = pollster::block_on(store.acquire_all(&set).unwrap());
    assert!(answers[0].is_ok(), "{answers:?}");
    pollster::block_on(store.diagnose()).unwrap();
    for suffix in ["", "-wal", "-shm", "-inbox"] {
        let found = fs::metadata(format!("{}{suffix}", path.display())).unwrap();
        assert_eq!((found.uid(), found.gid()), (ALICE, ALICE), "{suffix}");
    }
    drop(store);
    leasehold_testkit::wait_until("the pipe is removed", || {
        fs::read_dir(files::beside(&path, "-inbox")).unwrap().next().is_none()
    });
    // What a check beforehand can't see in time.
    let (private, log) = (of_alice.join("private"), of_alice.join("locks.db-wal"));
    fs::remove_file(&log).unwrap();
    fs::write(&private, "private").unwrap();
    fs::set_permissions(&private, fs::Permissions::from_mode(0o600)).unwrap();
    fs::rename(&private, &log).unwrap();
    let identity = Identity::for_file(&path).unwrap();
    let opened =
        identity.run(|| Connection::open(&path).unwrap().execute_batch("SELECT * FROM lease")).unwrap();
    assert!(opened.is_err(), "{opened:?}");
    assert!(refusal(&path).contains("is not SQLite's"));
    let found = fs::metadata(&log).unwrap();
    assert_eq!((found.uid(), fs::read_to_string(&log).unwrap().as_str()), (0, "private"));
}

/// The name of the directory that root was given, or the one above it, is in another user's hands.
#[test]
fn root_makes_no_file_where_the_owner_of_a_link_may_make_none() {
    let folder = tempfile::tempdir().unwrap();
    let [of_alice, of_root, shared] = ["alice", "root", "shared"].map(|name| folder.path().join(name));
    for folder in [&of_alice, &of_root, &shared] {
        fs::create_dir(folder).unwrap();
    }
    if !give_to_alice(&of_alice) {
        return;
    }
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::symlink(&of_root, of_alice.join("run")).unwrap();
    let Err(refused) = open(&of_alice.join("run/jobs"), 1) else { panic!("alice may make no file there") };
    let refused = refused.to_string();
    assert!(refused.contains("no permission") && refused.contains("uid 12345"), "{refused}");
    assert_eq!(fs::read_dir(&of_root).unwrap().count(), 0);
    for mode in [0o2770, 0o1777] {
        fs::set_permissions(&shared, fs::Permissions::from_mode(mode)).unwrap();
        assert!(refusal(&shared.join("locks.db")).contains("may write the directory"), "{mode:o}");
    }
    assert_eq!(fs::read_dir(&shared).unwrap().count(), 0);
    drop(open(&of_root.join("locks.db"), 1).unwrap());
}

#[test]
fn what_others_have_put_beside_the_file_or_in_its_place_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for suffix in ["-journal", "-wal", "-shm"] {
        let path = folder.path().join(format!("pipe{suffix}"));
        let beside = format!("{}{suffix}", path.display());
        assert!(std::process::Command::new("mkfifo").arg(&beside).status().unwrap().success());
        assert!(refusal(&path).contains("is not SQLite's"), "{suffix}");
        fs::remove_file(&beside).unwrap();
        // Without a worker, which would write to the log.
        drop(schema::prepare(&path, false).unwrap());
        if rustix::process::geteuid().is_root() {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o660)).unwrap();
            fs::write(&beside, "private").unwrap();
            fs::set_permissions(&beside, fs::Permissions::from_mode(0o600)).unwrap();
            assert!(refusal(&path).contains("does not let in all users"), "{suffix}");
            assert_eq!(fs::read_to_string(&beside).unwrap(), "private");
        }
    }
    if rustix::process::geteuid().is_root() {
        let (empty, link) = (folder.path().join("empty"), folder.path().join("link"));
        fs::write(&empty, "").unwrap();
        std::os::unix::fs::symlink(&empty, &link).unwrap();
        std::os::unix::fs::lchown(&link, Some(12_345), None).unwrap();
        assert!(refusal(&link).contains("a link of another user (uid 12345)"));
        assert!(fs::read(&empty).unwrap().is_empty());
        std::os::unix::fs::lchown(&link, Some(0), None).unwrap();
        drop(open(&link, 1).unwrap());
    }
}

#[test]
fn token_that_leaves_none_above_it_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    assert!(matches!(granted(&store, id(1, 1)), Reply::Granted(_)));
    let other = Connection::open(&path).unwrap();
    for last in ["9007199254740992", "9007199254740991"] {
        other.execute_batch(&format!("UPDATE resource SET last_token = {last}")).unwrap();
        let refused = store.try_call_inline(&resource("a"), &acquire(id(2, 1), false)).unwrap();
        assert!(refused.is_err(), "{refused:?}");
    }
}

#[test]
fn rows_that_contradict_each_other_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for (number, change) in ["in_use = 255", "in_use = 0", "parked = 3"].into_iter().enumerate() {
        let path = folder.path().join(number.to_string());
        let store = open(&path, 1).unwrap();
        assert!(matches!(granted(&store, id(1, 1)), Reply::Granted(_)));
        Connection::open(&path).unwrap().execute_batch(&format!("UPDATE resource SET {change}")).unwrap();
        let refused = store.try_call_inline(&resource("a"), &release(id(1, 1))).unwrap().unwrap_err();
        assert!(refused.message.contains("contradict each other"), "{change}: {refused:?}");
        let answers = pollster::block_on(
            store.call_batch(vec![Call::new(Arc::new(resource("a")), release(id(1, 1)))], 0),
        );
        assert!(matches!(&answers[..], [Err(error)] if error.failure.is_refusal()), "{answers:?}");
        // Another lock is not affected.
        assert!(store.try_call_inline(&resource("b"), &acquire(id(1, 2), false)).unwrap().is_ok());
    }
}

#[test]
fn sweep_passes_over_rows_that_contradict_each_other() {
    let folder = tempfile::tempdir().unwrap();
    for (number, change) in ["in_use = 255", "in_use = 0", "parked = 3", "capacity = 'text'", "kind = x'00'"]
        .into_iter()
        .enumerate()
    {
        let path = folder.path().join(number.to_string());
        let store = open(&path, 1).unwrap();
        assert!(matches!(granted(&store, id(1, 1)), Reply::Granted(_)));
        let other = Connection::open(&path).unwrap();
        let make_due =
            format!("UPDATE resource SET {change}, visit = 0, remember_until = 0, next_expiry = 0");
        other.execute_batch(&make_due).unwrap();
        // A command that makes a row sweeps those that are due.
        let answered = store.try_call_inline(&resource("b"), &acquire(id(1, 2), false)).unwrap();
        assert!(matches!(&answered, Ok(Answer { reply: Reply::Granted(_), .. })), "{change}: {answered:?}");
        let visit = "SELECT visit > 0 FROM resource ORDER BY id LIMIT 1";
        assert!(other.query_row(visit, [], |row| row.get::<_, bool>(0)).unwrap(), "{change}");
        // So does the worker of a client that comes.
        other.execute_batch("UPDATE resource SET visit = 0").unwrap();
        let next = open(&path, 2).unwrap();
        leasehold_testkit::wait_until("the row is swept", || {
            other.query_row("SELECT min(visit) > 0 FROM resource", [], |row| row.get::<_, bool>(0)).unwrap()
        });
        let listed = pollster::block_on(next.list()).unwrap();
        assert!(listed.contains(&resource("b")), "{listed:?}");
        let answers = pollster::block_on(
            next.call_batch(vec![Call::new(Arc::new(resource("c")), acquire(id(2, 1), false))], 0),
        );
        assert!(matches!(&answers[..], [Ok(_)]), "{change}: {answers:?}");
    }
}

#[test]
fn file_without_permission_is_reported() {
    if rustix::process::geteuid().is_root() {
        // Nothing is forbidden to root; a file on a device that can't be written is as good.
        let path = Path::new("/proc/leasehold-locks.db");
        assert!(refusal(path).contains("can't be opened") || refusal(path).contains("no permission"));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    assert!(refusal(&path).contains("no permission"));
}

#[test]
fn damaged_file_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    assert!(matches!(granted(&store, id(1, 1)), Reply::Granted(_)));
    drop(store);
    Connection::open(&path).unwrap().execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let size = bytes.len();
    bytes[1024..].fill(0xA5);
    fs::write(&path, &bytes).unwrap();
    assert_eq!(fs::read(&path).unwrap().len(), size);
    match open(&path, 2) {
        Err(error) => assert!(error.to_string().contains("damaged"), "{error}"),
        Ok(store) => {
            let answered = store.try_call_inline(&resource("a"), &acquire(id(2, 1), false)).unwrap();
            assert!(answered.unwrap_err().message.contains("damaged"));
        }
    }
}

#[test]
fn full_disk_is_an_error_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder.path().join("locks.db"), 1).unwrap();
    {
        let connection = callers_connection(&store);
        let connection = connection.limited();
        let pages: i64 = connection.query_row("PRAGMA page_count", [], |row| row.get(0)).unwrap();
        connection.query_row(&format!("PRAGMA max_page_count = {pages}"), [], |_| Ok(())).unwrap();
    }
    let mut failed = 0;
    for number in 0..400 {
        let name = format!("{number}-{}", "x".repeat(500));
        match store.try_call_inline(&resource(&name), &acquire(id(1, number), false)).unwrap() {
            Ok(answer) => assert!(matches!(answer.reply, Reply::Granted(_))),
            Err(error) => {
                failed += 1;
                assert!(
                    error.message.contains("the disk is full")
                        && error.failure == Failure::Transient(Effect::None)
                );
                let view = inspect(&store, &name);
                assert!(view.holders.is_empty() && view.last_token.is_none(), "{view:?}");
            }
        }
    }
    assert!(failed > 0, "the disk was never full");
    let connection = callers_connection(&store);
    connection.limited().query_row("PRAGMA max_page_count = 100000", [], |_| Ok(())).unwrap();
    drop(connection);
    assert!(matches!(granted(&store, id(1, 10_000)), Reply::Granted(_)));
}
