//! What many clients of one process cost: they share threads, and each has its connections only: one for commands, and one for pushes.
//!
//! One test only, since it counts what the whole process has.

#![cfg(target_os = "linux")]

use std::fs;

use leasehold::blocking::{Client, Guard};
use leasehold_testkit::{Server, wait_until};

const CLIENTS: usize = 200;

/// Of a client.
const CONNECTIONS: usize = 2;

/// Of the process: threads and open files.
fn count() -> (usize, usize) {
    let entries = |folder| fs::read_dir(folder).map_or(0, Iterator::count);
    (entries("/proc/self/task"), entries("/proc/self/fd"))
}

fn connections(server: &Server) -> usize {
    let clients: String = server.query(&["CLIENT", "LIST"]).unwrap();
    clients.lines().count()
}

#[test]
fn clients_share_threads_and_each_has_its_connections_only() {
    let server = Server::on_socket();
    drop(Client::connect(&server.url()).unwrap());
    wait_until("the first client ends", || count().0 <= 3);
    let (threads, files) = count();
    let clients: Vec<_> = (0..CLIENTS).map(|_| Client::connect(&server.url()).unwrap()).collect();
    let guards: Vec<_> =
        clients.iter().enumerate().map(|(at, client)| client.mutex(at.to_string()).lock().unwrap()).collect();
    let (more_threads, more_files) = count();
    assert!(more_threads - threads <= 4, "{} threads", more_threads - threads);
    // Each thread has its poll, its waker and its timer, and what the system's signals need.
    let of_threads = 4 * 6;
    assert!(more_files - files <= CLIENTS * CONNECTIONS + of_threads, "{} files", more_files - files);

    // A client that ends beside others closes its connection.
    let mut left = clients;
    for client in left.split_off(CLIENTS / 2) {
        client.close().unwrap();
    }
    wait_until("their files are closed", || count().1 <= more_files - CLIENTS / 2 * CONNECTIONS);
    wait_until("the server sees the end", || connections(&server) <= CLIENTS / 2 * CONNECTIONS + 1);
    assert!(guards[..CLIENTS / 2].iter().all(Guard::is_held));
    assert!(!guards[CLIENTS / 2].is_held());
    drop((guards, left));
    wait_until("the threads end", || count().0 <= threads && count().1 <= files);
}
