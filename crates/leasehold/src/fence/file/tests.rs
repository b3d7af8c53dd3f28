use super::*;

fn token(number: u64) -> Token {
    Token::new(number).unwrap()
}

#[test]
fn fenced_file_keeps_the_content_of_the_highest_token() {
    let folder = tempfile::tempdir().unwrap();
    let file = FencedFile::new(folder.path().join("a"));
    file.write(token(100_000), b"new").unwrap();
    let error = file.write(token(99), b"old").unwrap_err();
    assert!(error.is_stale() && error.to_string().contains("100000"), "{error}");
    // Another process, which has only the files.
    let again = FencedFile::new(file.path());
    assert!(again.write(token(99_999), b"old").unwrap_err().is_stale());
    assert_eq!(fs::read(file.path()).unwrap(), b"new");
    again.write(token(100_000), b"newer").unwrap();
    assert_eq!(fs::read(file.path()).unwrap(), b"newer");
}

#[test]
fn concurrent_writers_leave_the_content_of_the_highest_token() {
    let folder = tempfile::tempdir().unwrap();
    let file = FencedFile::new(folder.path().join("a"));
    thread::scope(|scope| {
        for number in 1..=16 {
            let file = &file;
            scope.spawn(move || {
                let written = file.write(token(number), number.to_string().as_bytes());
                assert!(written.is_ok() || written.unwrap_err().is_stale());
            });
        }
    });
    assert_eq!(fs::read_to_string(file.path()).unwrap(), "16");
}

#[test]
fn write_error_of_a_fenced_file_names_the_cause() {
    let folder = tempfile::tempdir().unwrap();
    let file = FencedFile::new(folder.path().join("no/such/folder/a"));
    let error = file.write(token(1), b"x").unwrap_err();
    assert!(error.is_unavailable() && std::error::Error::source(&error).is_some(), "{error}");
    let file = FencedFile::new(folder.path().join("a"));
    let fence = folder.path().join("a.fence");
    fs::write(&fence, "nonsense").unwrap();
    assert!(file.write(token(1), b"x").unwrap_err().to_string().contains("no token"));
    // A hole of a hundred gigabytes, of which nothing is read but the beginning.
    File::create(&fence).unwrap().set_len(100 << 30).unwrap();
    assert!(file.write(token(1), b"x").unwrap_err().to_string().contains("no token"));
    fs::remove_file(&fence).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&fence).status().unwrap().success());
    assert!(file.write(token(1), b"x").unwrap_err().to_string().contains("a pipe or a device"));
}

/// A file whose path is a directory can't be replaced, so that a write ends after its token.
#[test]
fn token_is_synced_before_the_content_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    fs::create_dir(&path).unwrap();
    let file = FencedFile::new(&path);
    assert!(file.write(token(7), b"x").unwrap_err().is_unavailable());
    let error = file.write(token(6), b"x").unwrap_err();
    assert!(error.is_stale(), "a lower token may write over what the higher one has written: {error}");
}

#[test]
fn fenced_file_keeps_mode_and_owner() {
    const OTHER_USER: u32 = 65_534;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let file = FencedFile::new(&path);
    for (number, mode) in (1..).zip([0o600, 0o640, 0o664, 0o755, 0o444]) {
        let _ = fs::remove_file(folder.path().join("a.fence"));
        fs::write(folder.path().join("old"), "old").unwrap();
        fs::rename(folder.path().join("old"), &path).unwrap();
        // Only root may give a file away.
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
        }
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let before = fs::metadata(&path).unwrap();
        file.write(token(number), b"new").unwrap();
        let after = fs::metadata(&path).unwrap();
        let of = |found: &Metadata| (found.mode() & 0o7777, found.uid(), found.gid());
        assert_eq!(of(&after), of(&before));
        assert_eq!(fs::read(&path).unwrap(), b"new");
        let fence = fs::metadata(folder.path().join("a.fence")).unwrap();
        let writers = mode & 0o222;
        assert_eq!(fence.mode() & 0o777, 0o600 | writers | (writers << 1), "no others may lock it");
    }
}

/// The mode of a file with a list shows the list's mask, and not what the group may do.
#[test]
#[cfg(target_os = "linux")]
fn file_with_an_access_control_list_lets_in_nobody_else_after_a_write() {
    use leasehold_store::access_list::testing::{let_in, let_into_new_files};
    use std::os::unix::fs::chown;

    const BOB: u32 = 12_346;
    let folder = tempfile::tempdir().unwrap();
    let (path, fence) = (folder.path().join("a"), folder.path().join("a.fence"));
    let file = FencedFile::new(&path);
    let list_of = |path: &Path| AccessList::of(path).unwrap();
    let mode_of = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
    fs::write(&path, "old").unwrap();
    for (number, group) in (1..).zip([0, 4, 6]) {
        let _ = fs::remove_file(&fence);
        let_in(BOB, group, &path);
        let before = (list_of(&path), mode_of(&path));
        file.write(token(number), b"new").unwrap();
        assert_eq!((list_of(&path), mode_of(&path)), before);
        let writers = list_of(&fence).unwrap();
        assert_eq!(writers, before.0.unwrap().of_writers());
        assert_eq!(writers.group_rights(), if group == 6 { 6 } else { 0 }, "no reader may lock it");
    }
    // The directory gives one to new files, and the file has none.
    let_into_new_files(BOB, 4, folder.path());
    for path in [&path, &fence] {
        let _ = fs::remove_file(path);
    }
    fs::write(&path, "old").unwrap();
    AccessList::set(None, &File::open(&path).unwrap()).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o660)).unwrap();
    file.write(token(4), b"new").unwrap();
    assert_eq!((list_of(&path), mode_of(&path)), (None, 0o660));
    assert_eq!((list_of(&fence), mode_of(&fence)), (None, 0o660));
    // A new file has it, as any other, and its readers can't lock the fence.
    for path in [&path, &fence] {
        fs::remove_file(path).unwrap();
    }
    file.write(token(5), b"new").unwrap();
    assert!(list_of(&path).is_some_and(|list| list.group_rights() == 4));
    assert_eq!(list_of(&fence).map_or(mode_of(&fence) >> 3 & 7, |list| list.group_rights()), 0);
    if !rustix::process::geteuid().is_root() {
        return;
    }
    // Its writer is in another group, for which there is no entry.
    let_in(BOB, 6, &path);
    chown(&path, Some(BOB), Some(BOB)).unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o1777)).unwrap();
    chown(folder.path(), Some(12_000), None).unwrap();
    fs::remove_file(&fence).unwrap();
    thread::scope(|scope| {
        let write = || {
            rustix::thread::set_thread_groups(&[]).unwrap();
            rustix::thread::set_thread_res_gid(None, rustix::process::Gid::from_raw(12_000), None).unwrap();
            rustix::thread::set_thread_res_uid(None, rustix::process::Uid::from_raw(12_000), None).unwrap();
            file.write(token(6), b"new")
        };
        scope.spawn(write).join().unwrap().unwrap();
    });
    assert_eq!((list_of(&path), mode_of(&path)), (None, 0o600));
    assert_eq!((list_of(&fence), mode_of(&fence)), (None, 0o600));
}

#[test]
fn fence_is_hidden_from_readers_from_its_first_moment() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let made = || {
        let _ = fs::remove_file(folder.path().join("fence"));
        let fence = Target::find(&path).unwrap().create_fence(&folder.path().join("fence")).unwrap();
        fence.metadata().unwrap().mode() & 0o777
    };
    assert_eq!((made() & 0o044, made() & 0o600), (0, 0o600));
    fs::write(&path, "").unwrap();
    assert_eq!(made(), 0o600, "who may write it is as with the file");
}

#[test]
fn fence_that_another_user_made_first_is_refused() {
    const OTHER: Option<u32> = Some(12_345);
    if !rustix::process::geteuid().is_root() {
        // Only root can give files away.
        return;
    }
    use std::os::unix::fs::chown;
    let folder = tempfile::tempdir().unwrap();
    let (path, fence) = (folder.path().join("a"), folder.path().join("a.fence"));
    let file = FencedFile::new(&path);
    // Root writes no file where all may.
    let user = rustix::process::Uid::from_raw(12_000);
    chown(folder.path(), Some(12_000), None).unwrap();
    let write = |number: u64, content: &[u8]| {
        thread::scope(|scope| {
            let writing = scope.spawn(|| {
                rustix::thread::set_thread_res_uid(None, user, None).unwrap();
                file.write(token(number), content)
            });
            writing.join().unwrap()
        })
    };
    let made_by_other = || {
        let _ = fs::remove_file(&fence);
        fs::write(&fence, "").unwrap();
        fs::set_permissions(&fence, Permissions::from_mode(0o666)).unwrap();
        chown(&fence, OTHER, OTHER).unwrap();
    };
    // Who may create files here is trusted, unless all are.
    made_by_other();
    write(1, b"new").unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o1777)).unwrap();
    let refused = |number| {
        let error = write(number, b"other").unwrap_err();
        assert!(error.is_unavailable() && error.to_string().contains("uid 12345"), "{error}");
    };
    refused(2);
    assert_eq!(fs::read(&path).unwrap(), b"new");
    fs::remove_file(&path).unwrap();
    refused(3);
    made_by_other();
    // The file is the other user's too, or is writable for a group that he is in, or for all.
    for (owner, group, mode, is_trusted) in [
        (OTHER, None, 0o644, true),
        (None, OTHER, 0o664, true),
        (None, OTHER, 0o644, false),
        (None, None, 0o664, false),
        (None, None, 0o666, true),
    ] {
        fs::write(&path, "").unwrap();
        chown(&path, owner.or(Some(0)), group.or(Some(0))).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        assert_eq!(write(4, b"x").is_ok(), is_trusted, "{owner:?} {group:?} {mode:o}");
    }
}

/// The owner of a directory exchanges it for a link while root writes a file in it.
#[test]
#[cfg(target_os = "linux")]
fn root_writes_in_the_directory_of_another_user_with_that_user_s_rights() {
    use std::os::unix::fs::{chown, symlink};

    const ALICE: u32 = 12_345;
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    let [of_alice, of_root] = ["alice", "root"].map(|name| folder.path().join(name));
    for folder in [&of_alice, &of_root] {
        fs::create_dir(folder).unwrap();
    }
    chown(&of_alice, Some(ALICE), Some(ALICE)).unwrap();
    let path = of_alice.join("report");
    let file = FencedFile::new(&path);
    file.write(token(1), b"new").unwrap();
    for path in [&path, &of_alice.join("report.fence")] {
        assert_eq!(fs::metadata(path).unwrap().uid(), ALICE);
    }
    // Root's own would become alice's.
    fs::write(of_alice.join("secret"), "").unwrap();
    let error = FencedFile::new(of_alice.join("secret")).write(token(1), b"x").unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("chown"), "{error}");
    symlink(&of_root, of_alice.join("link")).unwrap();
    assert!(
        FencedFile::new(of_alice.join("link/report")).write(token(1), b"x").unwrap_err().is_unavailable()
    );
    assert_eq!(fs::read_dir(&of_root).unwrap().count(), 0);
    fs::set_permissions(&of_root, Permissions::from_mode(0o2770)).unwrap();
    let error = FencedFile::new(of_root.join("report")).write(token(1), b"x").unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("may write the directory"), "{error}");
}

#[test]
fn symbolic_link_is_preserved_and_shares_the_fence() {
    let folder = tempfile::tempdir().unwrap();
    let (real, link) = (folder.path().join("real"), folder.path().join("link"));
    std::os::unix::fs::symlink("real", &link).unwrap();
    let (by_name, by_link) = (FencedFile::new(&real), FencedFile::new(&link));
    // The link leads to nothing yet.
    by_link.write(token(5), b"first").unwrap();
    assert_eq!(fs::read(&real).unwrap(), b"first");
    by_name.write(token(9), b"new").unwrap();
    assert!(by_link.write(token(8), b"old").unwrap_err().is_stale());
    by_link.write(token(10), b"newer").unwrap();
    assert!(by_name.write(token(9), b"old").unwrap_err().is_stale());
    assert_eq!(fs::read(&real).unwrap(), b"newer");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(!folder.path().join("link.fence").exists());
}

#[test]
fn link_of_another_user_is_not_followed() {
    use std::os::unix::fs::{chown, lchown, symlink};

    const ALICE: u32 = 12_345;
    const BOB: u32 = 12_346;
    if !rustix::process::geteuid().is_root() {
        // Only root can play several users.
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    let [shared, of_alice] = ["shared", "alice"].map(|name| folder.path().join(name));
    for (folder, owner, mode) in [(&shared, 0, 0o1777), (&of_alice, ALICE, 0o700)] {
        fs::create_dir(folder).unwrap();
        chown(folder, Some(owner), Some(owner)).unwrap();
        fs::set_permissions(folder, Permissions::from_mode(mode)).unwrap();
    }
    let (precious, link) = (of_alice.join("precious"), shared.join("report"));
    let user = rustix::process::Uid::from_raw(ALICE);
    let write = |number| {
        let as_alice = || {
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            FencedFile::new(&link).write(token(number), b"new")
        };
        thread::scope(|scope| scope.spawn(as_alice).join().unwrap())
    };
    for target in ["precious", "missing"] {
        fs::write(&precious, "precious").unwrap();
        chown(&precious, Some(ALICE), Some(ALICE)).unwrap();
        symlink(of_alice.join(target), &link).unwrap();
        lchown(&link, Some(BOB), Some(BOB)).unwrap();
        let error = write(1).unwrap_err();
        assert!(error.is_unavailable() && error.to_string().contains("uid 12346"), "{error}");
        assert_eq!(fs::read(&precious).unwrap(), b"precious");
        assert_eq!(fs::read_dir(&of_alice).unwrap().count(), 1);
        // Her own, and root's.
        for owner in [ALICE, 0] {
            lchown(&link, Some(owner), Some(owner)).unwrap();
            write(2).unwrap();
        }
        assert_eq!(fs::read(of_alice.join(target)).unwrap(), b"new");
        fs::remove_file(&link).unwrap();
        for name in fs::read_dir(&of_alice).unwrap() {
            fs::remove_file(name.unwrap().path()).unwrap();
        }
    }
    // In a sticky directory she can't remove what he has put there.
    fs::write(shared.join("report.fence-new"), "").unwrap();
    chown(shared.join("report.fence-new"), Some(BOB), Some(BOB)).unwrap();
    let error = write(3).unwrap_err().to_string();
    assert!(error.contains("report.fence-new") && error.contains("uid 12346"), "{error}");
}

#[test]
fn hard_link_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (path, twin) = (folder.path().join("a"), folder.path().join("twin"));
    FencedFile::new(&path).write(token(2), b"new").unwrap();
    fs::hard_link(&path, &twin).unwrap();
    let error = FencedFile::new(&twin).write(token(1), b"old").unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("second name"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"new");
}

#[test]
fn write_timeout_bounds_the_wait_for_a_stopped_writer() {
    let folder = tempfile::tempdir().unwrap();
    let file = FencedFile::new(folder.path().join("a"));
    file.write(token(1), b"first").unwrap();
    // As a writer that has been stopped after it took the lock.
    let (_, stopped) = file.lock(None).unwrap().unwrap();
    let error = file.write_timeout(token(2), b"second", Duration::from_millis(50)).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("stopped"), "{error}");
    assert_eq!(fs::read(file.path()).unwrap(), b"first");
    drop(stopped);
    file.write(token(2), b"second").unwrap();
}

#[test]
fn write_without_a_limit_waits_for_the_other_writer() {
    let folder = tempfile::tempdir().unwrap();
    let file = FencedFile::new(folder.path().join("a"));
    let (_, other) = file.lock(None).unwrap().unwrap();
    thread::scope(|scope| {
        let writer = scope.spawn(|| file.write_timeout(token(1), b"new", Duration::MAX));
        drop(other);
        writer.join().unwrap().unwrap();
    });
}

#[test]
fn file_with_the_suffix_new_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let neighbour = folder.path().join("a.new");
    FencedFile::new(&neighbour).write(token(1), b"neighbour").unwrap();
    FencedFile::new(folder.path().join("a")).write(token(2), b"new").unwrap();
    assert_eq!(fs::read(&neighbour).unwrap(), b"neighbour");
}

#[test]
fn link_in_place_of_the_new_content_is_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other");
    fs::write(&other, "other").unwrap();
    std::os::unix::fs::symlink(&other, folder.path().join("a.fence-new")).unwrap();
    FencedFile::new(folder.path().join("a")).write(token(1), b"new").unwrap();
    assert_eq!(fs::read(&other).unwrap(), b"other");
    // Nor one in the place of the fence.
    std::os::unix::fs::symlink(&other, folder.path().join("b.fence")).unwrap();
    FencedFile::new(folder.path().join("b")).write(token(1), b"new").unwrap_err();
    assert_eq!(fs::read(&other).unwrap(), b"other");
}
