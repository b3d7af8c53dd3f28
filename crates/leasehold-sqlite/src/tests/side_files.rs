//! What others put beside the file. Only root can play several users: without root, these tests say so and check what one user can do.

use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, chown};
use std::path::PathBuf;

use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use super::*;
use crate::files::beside;

/// Has no right to Alice's files.
const BOB: u32 = 12_346;

const SUFFIXES: [&str; 4] = ["-journal", "-wal", "-shm", "-inbox"];

/// Whether this is root, who plays the other users of a test.
fn can_play_others() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("the part of this test with other users has not run: only root can play them");
    }
    is_root
}

/// With the rights of this user, whose group has the same number, and of these groups.
fn as_user<T: Send>(uid: u32, groups: &[u32], run: impl FnOnce() -> T + Send) -> T {
    let groups: Vec<_> = groups.iter().copied().map(Gid::from_raw).collect();
    thread::scope(|scope| {
        let thread = scope.spawn(move || {
            set_thread_groups(&groups).unwrap();
            set_thread_res_gid(None, Gid::from_raw(uid), None).unwrap();
            set_thread_res_uid(None, Uid::from_raw(uid), None).unwrap();
            run()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn as_alice<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    as_user(ALICE, &[], run)
}

/// A directory of this owner, group and mode, and the one to remove it by.
fn directory(owner: u32, mode: u32) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let place = folder.path().join("place");
    fs::create_dir(&place).unwrap();
    chown(&place, Some(owner), Some(owner)).unwrap();
    fs::set_permissions(&place, fs::Permissions::from_mode(mode)).unwrap();
    (folder, place)
}

/// Makes a file that all users may use, or a directory, if no other is in its place. Umasks are the process's, and count here.
fn put(name: &Path, content: &[u8]) -> std::io::Result<()> {
    if name.to_str().unwrap().ends_with("-inbox") {
        fs::DirBuilder::new().mode(0o777).create(name)?;
        return fs::set_permissions(name, fs::Permissions::from_mode(0o777));
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o666).open(name)?;
    file.set_permissions(fs::Permissions::from_mode(0o666))?;
    std::io::Write::write_all(&mut file, content)
}

/// By the worker, which waits for the file while that of an earlier client is at it.
fn answer(store: &Sqlite, acquisition: Acquisition) -> Reply {
    let call = Call::new(Arc::new(resource("a")), acquire(acquisition, true));
    pollster::block_on(store.call(call, 0)).unwrap().reply
}

fn remove(name: &Path) {
    let _ = if name.is_dir() { fs::remove_dir_all(name) } else { fs::remove_file(name) };
}

/// A journal by which SQLite cuts the database off: it says that the database was empty.
fn emptying_journal() -> Vec<u8> {
    let mut journal = vec![0; 512];
    let words = [0xD9D5_05F9, 0x20A1_63D7, 0, 1, 0, 512, 1024_u32];
    for (place, word) in journal.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_be_bytes());
    }
    journal
}

fn assert_refuses_bob_s(path: &Path, suffix: &str) {
    let began = Instant::now();
    let said = refusal(path);
    let name = beside(path, suffix).display().to_string();
    for part in [name.as_str(), "uid 12346", "remove it"] {
        assert!(said.contains(part), "{suffix}: {said}");
    }
    assert!(began.elapsed() < Duration::from_secs(30), "{suffix}");
}

#[test]
fn files_of_a_stranger_beside_the_file_are_refused_by_every_user() {
    if !can_play_others() {
        return;
    }
    for mode in [0o1777, 0o777] {
        let (_folder, place) = directory(0, mode);
        for suffix in SUFFIXES {
            // Before the first use, and in the place of what the first one has made.
            let path = place.join(format!("locks{suffix}"));
            let name = beside(&path, suffix);
            as_user(BOB, &[], || put(&name, b"").unwrap());
            as_alice(|| assert_refuses_bob_s(&path, suffix));
            remove(&name);
            as_alice(|| drop(schema::prepare(&path, false).unwrap()));
            remove(&name);
            as_user(BOB, &[], || put(&name, &emptying_journal()).unwrap());
            as_alice(|| assert_refuses_bob_s(&path, suffix));
            remove(&name);
            as_alice(|| drop(open(&path, 1).unwrap()));
        }
    }
}

/// Root is refused as well: the rights of the file's owner count.
#[test]
fn journal_of_a_stranger_takes_no_lease_away() {
    if !can_play_others() {
        return;
    }
    for mode in [0o1777, 0o3777] {
        let (_folder, place) = directory(ALICE, mode);
        let path = place.join("locks.db");
        as_alice(|| {
            let store = open(&path, 1).unwrap();
            assert!(matches!(answer(&store, id(1, 1)), Reply::Granted(_)));
        });
        let journal = beside(&path, "-journal");
        assert!(as_user(BOB, &[], || put(&journal, &emptying_journal())).is_err(), "its name is taken");
        remove(&journal);
        as_user(BOB, &[], || put(&journal, &emptying_journal()).unwrap());
        as_alice(|| assert_refuses_bob_s(&path, "-journal"));
        assert_refuses_bob_s(&path, "-journal");
        assert!(fs::metadata(&path).unwrap().len() > 0, "it was emptied");
        remove(&journal);
        as_alice(|| {
            let store = open(&path, 2).unwrap();
            assert!(matches!(answer(&store, id(2, 1)), Reply::Queued(_)), "the lease is in the file");
        });
    }
}

/// Nothing is left to a race: between its look and SQLite's open, a client's names can't become another user's.
#[test]
fn names_beside_the_file_in_a_sticky_directory_are_taken_by_its_owner() {
    if !can_play_others() {
        return;
    }
    let (_folder, place) = directory(0, 0o1777);
    let path = place.join("locks.db");
    for _ in 0..2 {
        as_alice(|| drop(open(&path, 1).unwrap()));
        for suffix in SUFFIXES {
            let name = beside(&path, suffix);
            let found = fs::metadata(&name).unwrap();
            assert_eq!((found.uid(), found.mode() & 0o066), (ALICE, 0), "{suffix}");
            let moved = place.join("moved");
            as_user(BOB, &[], || {
                assert!(put(&name, b"").is_err() && fs::rename(&name, &moved).is_err(), "{suffix}");
                assert!(fs::remove_file(&name).is_err() && fs::remove_dir(&name).is_err(), "{suffix}");
            });
        }
        // As programs do that write the file without leasehold, and end.
        remove(&beside(&path, "-journal"));
    }
    // Elsewhere no name is taken.
    let (_folder, place) = directory(0, 0o755);
    let path = place.join("locks.db");
    drop(open(&path, 1).unwrap());
    assert!(!beside(&path, "-journal").exists());
}

/// What SQLite leaves if a process dies while it makes the file, or in a transaction of another program before WAL mode is back.
#[test]
fn journal_of_one_s_own_is_rolled_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let crash = |begins_with_leases: bool| {
        let crashed = folder.path().join(format!("crashed {begins_with_leases}"));
        let connection = Connection::open(&path).unwrap();
        connection.execute_batch("PRAGMA journal_mode = DELETE; PRAGMA cache_size = 1; BEGIN").unwrap();
        connection
            .execute_batch("CREATE TABLE t (a); INSERT INTO t VALUES (zeroblob(1000000)); DROP TABLE t; CREATE TABLE u (a)")
            .unwrap();
        for suffix in ["", "-journal"] {
            fs::copy(beside(&path, suffix), beside(&crashed, suffix)).unwrap();
        }
        assert!(fs::metadata(beside(&crashed, "-journal")).unwrap().len() > 512);
        connection.execute_batch("ROLLBACK").unwrap();
        let store = open(&crashed, 3).unwrap();
        assert!(!beside(&crashed, "-journal").exists(), "it was rolled back");
        assert_eq!(matches!(answer(&store, id(3, 1)), Reply::Queued(_)), begins_with_leases);
    };
    crash(false);
    let store = open(&path, 1).unwrap();
    assert!(matches!(answer(&store, id(1, 1)), Reply::Granted(_)));
    drop(store);
    // Its worker's connection would keep the file in WAL mode.
    leasehold_testkit::wait_until("the file is in no use", || {
        let connection = Connection::open(&path).unwrap();
        connection
            .query_row("PRAGMA journal_mode = DELETE", [], |row| row.get::<_, String>(0))
            .is_ok_and(|mode| mode == "delete")
    });
    crash(true);
}

#[test]
fn rights_beside_the_file_are_those_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    for (number, suffix) in ["-wal", "-shm", "-inbox"].into_iter().enumerate() {
        let path = folder.path().join(number.to_string());
        drop(schema::prepare(&path, false).unwrap());
        drop(Mailboxes::beside(&path).unwrap());
        let name = beside(&path, suffix);
        let set = |name: &Path, mode| fs::set_permissions(name, fs::Permissions::from_mode(mode)).unwrap();
        set(&path, 0o600);
        for mode in [0o644, 0o640, 0o606] {
            set(&name, mode);
            let said = refusal(&path);
            let chmod = format!("chmod {} {}", if suffix == "-inbox" { 700 } else { 600 }, name.display());
            assert!(
                said.contains("who may not use the database") && said.contains(&chmod),
                "{mode:o}: {said}"
            );
        }
        set(&name, 0o700);
        drop(open(&path, 1).unwrap());
    }
    let path = folder.path().join("linked");
    drop(schema::prepare(&path, false).unwrap());
    fs::hard_link(beside(&path, "-wal"), folder.path().join("link")).unwrap();
    assert!(refusal(&path).contains("second name"));
}

/// In the directory that `docs/operations.md` describes.
#[test]
fn users_of_a_group_share_what_any_of_them_has_made() {
    if !can_play_others() {
        return;
    }
    // Alice's group, with Bob in it.
    let as_member = |run: &(dyn Fn() + Sync)| as_user(BOB, &[ALICE], run);
    let (_folder, place) = directory(ALICE, 0o2770);
    let path = place.join("locks.db");
    // Without a worker, which would use them for a moment.
    as_alice(|| drop(schema::prepare(&path, false).unwrap()));
    for suffix in SUFFIXES {
        remove(&beside(&path, suffix));
    }
    as_member(&|| {
        let store = open(&path, 2).unwrap();
        assert!(matches!(answer(&store, id(2, 1)), Reply::Granted(_)));
    });
    for suffix in ["-wal", "-shm", "-inbox"] {
        assert_eq!(fs::metadata(beside(&path, suffix)).unwrap().uid(), BOB, "{suffix}");
    }
    as_alice(|| {
        let store = open(&path, 3).unwrap();
        assert!(matches!(answer(&store, id(3, 1)), Reply::Queued(_)), "it is the member's");
    });
    // Root uses it as Alice.
    let store = open(&path, 4).unwrap();
    assert!(matches!(answer(&store, id(4, 1)), Reply::Queued(_)));
    drop(store);
    // Where others make files, these have the group of the directory, too.
    fs::set_permissions(&place, fs::Permissions::from_mode(0o2777)).unwrap();
    as_alice(|| assert!(refusal(&path).contains("uid 12346")));
}

#[test]
fn file_for_all_is_used_by_all() {
    if !can_play_others() {
        return;
    }
    let (_folder, place) = directory(ALICE, 0o777);
    let path = place.join("locks.db");
    as_alice(|| fs::write(&path, "").unwrap());
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    as_user(BOB, &[], || {
        let store = open(&path, 1).unwrap();
        assert!(matches!(answer(&store, id(1, 1)), Reply::Granted(_)));
    });
    as_alice(|| {
        let store = open(&path, 2).unwrap();
        assert!(matches!(answer(&store, id(2, 1)), Reply::Queued(_)));
    });
}

/// The mode of a file with a list shows the list's mask, and not what the group may do.
#[test]
#[cfg(target_os = "linux")]
fn file_with_an_access_control_list_is_refused_and_lets_in_nobody() {
    use leasehold_store::access_list::testing::{let_in, let_into_new_files};

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let refused = |name: &Path| {
        let said = refusal(&path);
        for part in [&name.display().to_string(), "access control list", "setfacl -"] {
            assert!(said.contains(part), "{said}");
        }
        assert!(!said.contains("could be made"), "{said}");
        for other in SUFFIXES.map(|suffix| beside(&path, suffix)).iter().filter(|other| *other != name) {
            let mode = fs::metadata(other).map_or(0, |found| found.mode());
            assert_eq!(mode & 0o077, 0, "{}: {mode:o}", other.display());
        }
    };
    // A directory whose new files get one: nothing is made there.
    let_into_new_files(BOB, 0, folder.path());
    refused(folder.path());
    assert!(!path.exists());
    assert!(rustix::fs::removexattr(folder.path(), "system.posix_acl_default").is_ok());
    // The file, before it is used for the first time and afterwards.
    fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).unwrap();
    let remove_list = |name: &Path| rustix::fs::removexattr(name, "system.posix_acl_access").unwrap();
    let_in(BOB, 0, &path);
    refused(&path);
    remove_list(&path);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let open = || (schema::prepare(&path, false).unwrap(), Mailboxes::beside(&path).unwrap());
    let used = open();
    let_in(BOB, 0, &path);
    refused(&path);
    assert!(used.1.open(ClientId::new(7), &path).is_err(), "its pipe would let in the group");
    remove_list(&path);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    for suffix in SUFFIXES {
        let name = beside(&path, suffix);
        if !name.exists() {
            put(&name, b"").unwrap();
        }
        let_in(BOB, 0, &name);
        refused(&name);
        remove_list(&name);
        let mode = if name.is_dir() { 0o700 } else { 0o600 };
        fs::set_permissions(&name, fs::Permissions::from_mode(mode)).unwrap();
    }
    drop(open());
}
