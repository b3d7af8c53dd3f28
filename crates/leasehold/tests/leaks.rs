//! What a client leaves behind in its process when it goes: no thread, no open file, no pipe.
//!
//! One test only, since it counts what the whole process has.

#![cfg(target_os = "linux")]

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use leasehold::blocking::Client;
use leasehold_testkit::Server;

fn count(folder: impl AsRef<Path>) -> usize {
    fs::read_dir(folder).map_or(0, Iterator::count)
}

/// Takes locks, waits in vain, and goes in one of three ways.
fn use_and_drop(url: &str, way: usize) {
    let client = Client::connect(url).unwrap();
    let guard = client.mutex("a").lock().unwrap();
    let _other = client.mutex("b").try_lock().unwrap();
    assert!(client.mutex("a").lock_timeout(Duration::from_millis(1)).unwrap().is_none());
    match way {
        0 => {
            guard.release().unwrap();
            client.close().unwrap();
        }
        1 => {
            drop(client);
            drop(guard);
        }
        _ => {
            client.close().unwrap();
            assert!(!guard.is_held());
        }
    }
}

#[test]
fn dropped_client_leaves_no_thread_and_no_open_file() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::on_socket();
    let database = folder.path().join("locks.db");
    let urls = ["memory:".to_owned(), format!("sqlite:{}", database.display()), server.url()];
    for url in &urls {
        // The first may open what stays for the whole process.
        use_and_drop(url, 0);
        let now = || {
            (count("/proc/self/task"), count("/proc/self/fd"), count(folder.path().join("locks.db-inbox")))
        };
        let settled = |limit: (usize, usize, usize)| {
            let give_up = Instant::now() + Duration::from_secs(20);
            loop {
                let (threads, files, pipes) = now();
                if threads <= limit.0 && files <= limit.1 && pipes <= limit.2 {
                    return;
                }
                assert!(Instant::now() < give_up, "{url} leaves {:?}, more than {limit:?}", now());
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        // The test's own threads, and what a test harness has open.
        settled((3, 16, 0));
        let before = now();
        for round in 0..60 {
            use_and_drop(url, round % 3);
        }
        settled(before);
    }
}
