//! Files that are removed, replaced, moved or mounted under their clients, and who may use them.

use std::path::Path;

use leasehold_testkit::wait_until;

use super::*;
use crate::worker::FILE_CHECK_INTERVAL;

/// What is done to one of a client's files.
type Harm = fn(&Path);

fn remove(path: &Path) {
    fs::remove_file(path).unwrap();
}

/// Another file takes its name, as a tool that restores a copy does.
fn replace(path: &Path) {
    let copy = files::beside(path, ".copy");
    fs::copy(path, &copy).unwrap();
    fs::rename(copy, path).unwrap();
}

fn renew(acquisition: Acquisition) -> Command {
    Command::Renew(Renew::to(acquisition, TTL))
}

fn is_gone(answered: &CallResult) -> bool {
    matches!(answered, Err(error) if error.failure == Failure::Gone && error.message.contains("removed or replaced"))
}

#[test]
fn removed_or_replaced_files_lose_all_leases() {
    for harm in [remove as Harm, replace] {
        for suffix in files::SUFFIXES {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("locks.db");
            let store = open(&path, 1).unwrap();
            assert!(matches!(granted(&store, id(1, 1)), Reply::Granted(_)));
            // The worker has a connection of its own.
            assert_eq!(pollster::block_on(store.list()).unwrap().len(), 1);
            harm(&files::beside(&path, suffix));
            let ask = |command: Command| store.try_call_inline(&resource("a"), &command).unwrap();
            assert!(is_gone(&ask(acquire(id(1, 2), true))), "after {suffix:?}");
            assert!(is_gone(&ask(Command::Inspect)));
            let batch = [acquire(id(1, 3), true), renew(id(1, 1)), release(id(1, 1))];
            let batch = batch.map(|command| Call::new(Arc::new(resource("a")), command)).to_vec();
            let answers = pollster::block_on(store.call_batch(batch, 0));
            assert!(is_gone(&answers[0]));
            for answered in &answers[1..] {
                assert!(matches!(answered, Ok(Answer { reply: Reply::NotHeld, .. })), "{answered:?}");
            }
            let Command::Acquire(attempt) = acquire(id(1, 4), false) else { unreachable!() };
            let together = store.acquire_all(&[(Arc::new(resource("a")), attempt)]).unwrap();
            assert!(pollster::block_on(together).iter().all(is_gone));
            assert!(pollster::block_on(store.list()).is_err_and(|error| error.failure == Failure::Gone));
        }
    }
}

#[test]
fn removed_log_is_noticed_before_the_lease_expires() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let client = leasehold::blocking::Client::connect(&format!("sqlite:{}", path.display())).unwrap();
    let guard = client.mutex("a").ttl(Duration::from_secs(600)).lock().unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(|| client.mutex("a").global_fifo().lock());
        wait_until("it waits", || !client.mutex("a").inspect().unwrap().waiters.is_empty());
        remove(&files::beside(&path, "-wal"));
        let loss = guard.lost_within(FILE_CHECK_INTERVAL + Duration::from_secs(20));
        assert_eq!(loss, Some(leasehold_core::Loss::Gone));
        let error = waits.join().unwrap().unwrap_err();
        assert!(error.is_unavailable() && error.to_string().contains("removed or replaced"), "{error}");
    });
    assert!(guard.release().unwrap_err().is_lost());
    client.close().unwrap();
}

/// A cleaner of old files may remove it. Without it the client would be skipped at each grant.
#[test]
fn removed_pipe_of_a_client_is_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let url = format!("sqlite:{}", path.display());
    let [holder, other] = [(); 2].map(|()| leasehold::blocking::Client::connect(&url).unwrap());
    let guard = holder.mutex("a").lock().unwrap();
    let inbox = files::beside(&path, "-inbox");
    let pipes = || fs::read_dir(&inbox).map_or(0, Iterator::count);
    thread::scope(|scope| {
        let waits = scope.spawn(|| other.mutex("a").lock());
        let waiters = || holder.mutex("a").inspect().unwrap().waiters;
        wait_until("the other client waits", || waiters().len() == 1);
        assert_eq!(pipes(), 2);
        fs::remove_dir_all(&inbox).unwrap();
        wait_until("both pipes are there again", || pipes() == 2);
        wait_until("the waiter is not skipped", || waiters().iter().all(|waiter| !waiter.skipped));
        drop(guard);
        assert!(waits.join().unwrap().unwrap().is_held());
    });
    for client in [holder, other] {
        client.close().unwrap();
    }
    assert_eq!(pipes(), 0);
}

#[test]
fn directory_that_is_moved_away_ends_its_clients_leases() {
    let folder = tempfile::tempdir().unwrap();
    let (here, there) = (folder.path().join("here"), folder.path().join("there"));
    fs::create_dir(&here).unwrap();
    let store = open(&here.join("locks.db"), 1).unwrap();
    assert!(matches!(granted(&store, id(1, 1)), Reply::Granted(_)));
    fs::rename(&here, &there).unwrap();
    assert!(is_gone(&store.try_call_inline(&resource("a"), &acquire(id(1, 2), false)).unwrap()));
    // A client that comes by the new name shares SQLite's memory with the old one, which writes nothing any more.
    assert!(open(&there.join("locks.db"), 2).is_err());
    drop(store);
    let store = open(&there.join("locks.db"), 3).unwrap();
    assert!(matches!(granted(&store, id(3, 1)), Reply::Queued(_)), "the lease is in the file");
}

#[test]
fn new_log_is_opened_only_after_old_clients_ended() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let first = open(&path, 1).unwrap();
    remove(&files::beside(&path, "-wal"));
    remove(&files::beside(&path, "-shm"));
    assert!(refusal(&path).contains("removed or replaced"));
    drop(first);
    let second = open(&path, 2).unwrap();
    let third = open(&path, 3).unwrap();
    assert!(matches!(granted(&second, id(2, 1)), Reply::Granted(_)));
    assert!(matches!(granted(&third, id(3, 1)), Reply::Queued(_)), "both use the new one");
}

#[test]
fn removed_log_is_not_checkpointed_into_the_shared_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    assert!(matches!(granted(&store, id(1, 1)), Reply::Granted(_)));
    assert_eq!(pollster::block_on(store.list()).unwrap().len(), 1, "the worker has a connection");
    remove(&files::beside(&path, "-wal"));
    let before = fs::read(&path).unwrap();
    store.shared.commands.store(CHECKPOINT_AFTER + 1, Ordering::Relaxed);
    // The job makes the worker go round once, and another one waits for the end of that.
    for _ in 0..2 {
        assert!(pollster::block_on(store.list()).is_err());
    }
    assert_eq!(fs::read(&path).unwrap(), before);
}

#[test]
#[cfg(target_os = "linux")]
fn bind_mounted_file_is_detected() {
    // A directory will do: whatever the kernel mounts is the root of its mount.
    assert!(files::is_mount_point(Path::new("/proc")));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    drop(open(&path, 1).unwrap());
    assert!(!files::is_mount_point(&path));
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn files_in_a_group_directory_get_group_permissions() {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for (directory, is_shared) in [(0o2775, true), (0o2755, false), (0o775, false), (0o2770, true)] {
        let here = folder.path().join(format!("{directory:o}"));
        fs::create_dir(&here).unwrap();
        // Root uses none of its own that others may write.
        give_to_alice(&here);
        fs::set_permissions(&here, fs::Permissions::from_mode(directory)).unwrap();
        // What the umask leaves of a new file.
        fs::write(here.join("plain"), "").unwrap();
        let plain = mode(&here.join("plain"));
        let path = here.join("locks.db");
        let _store = open(&path, 1).unwrap();
        let mode_of_umask = if is_shared { plain | 0o060 } else { plain };
        // Who may not write it may not read it.
        let expected = mode_of_umask & !((!mode_of_umask & 0o022) << 1);
        for suffix in files::SUFFIXES {
            assert_eq!(mode(&files::beside(&path, suffix)), expected, "{suffix:?} in {directory:o}");
        }
        let inbox = files::beside(&path, "-inbox");
        let pipe = fs::read_dir(&inbox).unwrap().next().unwrap().unwrap().path();
        let may_group_write = expected & 0o020 != 0;
        assert_eq!(mode(&inbox) & 0o070 == 0o070, may_group_write, "in {directory:o}");
        assert_eq!(mode(&pipe), if may_group_write { 0o660 } else { 0o600 }, "in {directory:o}");
        let group = fs::metadata(&here).unwrap().gid();
        for path in [&path, &files::beside(&path, "-wal"), &inbox, &pipe] {
            assert!(!is_shared || fs::metadata(path).unwrap().gid() == group, "{}", path.display());
        }
    }
}

/// A reader could keep a lock of the file, and so keep everyone from locks.
#[test]
fn new_file_is_hidden_from_those_who_may_only_read_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let _store = open(&path, 1).unwrap();
    for suffix in files::SUFFIXES {
        let mode = mode(&files::beside(&path, suffix));
        assert_eq!((mode & 0o044) >> 1 & !(mode & 0o022), 0, "{suffix:?}: {mode:o}");
    }
}

#[test]
fn existing_file_keeps_its_mode() {
    let folder = tempfile::tempdir().unwrap();
    give_to_alice(folder.path());
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o2775)).unwrap();
    let path = folder.path().join("locks.db");
    fs::write(&path, "").unwrap();
    give_to_alice(&path);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let _store = open(&path, 1).unwrap();
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(&files::beside(&path, "-wal")), 0o600);
}
