//! A process that forks without `exec`: the threads of its clients do not run in the child, which starts its own,
//! and what is the parent's fails there.
//!
//! One test only, since a fork copies one thread.

#![cfg(target_os = "linux")]
// A fork is the only way to have a child without the threads of its parent.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use leasehold::Error;
use leasehold::blocking::{Client, Guard};
use leasehold_testkit::{Server, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

/// What the parent had when it forked.
struct Parents {
    url: String,
    clients: Vec<Client>,
    guard: Guard,
    file: String,
    of_file: Client,
    memory: Client,
}

impl Parents {
    fn new(url: String, file: String) -> Self {
        // On all threads that the parent may have.
        let clients: Vec<_> = (0..8).map(|_| Client::connect(&url).unwrap()).collect();
        let guard = clients[0].mutex("of the parent").lock().unwrap();
        let of_file = Client::connect(&file).unwrap();
        let memory = Client::connect("memory:shared").unwrap();
        Self { url, clients, guard, file, of_file, memory }
    }
}

fn assert_forked<T>(called: Result<T, Error>) {
    let error = called.err().expect("it is the parent's");
    assert!(error.is_forked() && error.to_string().contains("forked"), "{error}");
}

/// Everything of the parent's fails, and nothing of it has an effect when it is dropped.
fn use_what_is_the_parents(parents: Parents) {
    let Parents { clients, guard, file, of_file, memory, .. } = parents;
    assert!(!guard.is_held());
    assert_forked(guard.renew());
    for client in [&clients[0], &clients[7], &of_file, &memory] {
        let mutex = client.mutex("of the parent");
        assert_forked(mutex.try_lock());
        assert_forked(mutex.lock());
        assert_forked(mutex.lock_timeout(Duration::from_secs(60)));
        assert_forked(mutex.inspect());
        assert_forked(client.list());
        assert_forked(client.clone().close());
    }
    assert_forked(guard.release());
    drop((clients, of_file, memory));
    // SQLite takes the parent's locks on the file for its own.
    assert_forked(Client::connect(&file));
    assert_forked(Client::connect(&file));
}

fn locks_in_the_child(parents: Parents) -> Result<(), Error> {
    let url = parents.url.clone();
    let client = Client::connect(&url)?;
    use_what_is_the_parents(parents);
    // A store of this process.
    let memory = Client::connect("memory:shared")?;
    assert!(memory.mutex("of the parent").try_lock()?.is_some());
    let guard = client.mutex("of the child").lock()?;
    // The driver's timer ends the wait.
    let of_parent = client.mutex("of the parent").lock_timeout(Duration::from_millis(20))?;
    assert!(of_parent.is_none() && guard.is_held());
    guard.release()?;
    client.close()
}

#[test]
fn child_that_is_forked_has_clients_of_its_own() {
    let (server, folder) = (Server::on_socket(), tempfile::tempdir().unwrap());
    let parents = Parents::new(server.url(), format!("sqlite:{}", folder.path().join("locks.db").display()));
    let of_file = parents.of_file.mutex("of the parent").lock().unwrap();
    let in_memory = parents.memory.mutex("of the parent").lock().unwrap();
    // SAFETY: no other thread of this process holds a lock that the child needs: the C library makes its allocator usable in the child, and
    // the child leaves by `_exit`.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let ended = catch_unwind(AssertUnwindSafe(|| locks_in_the_child(parents)));
            let code = i32::from(!matches!(ended, Ok(Ok(()))));
            // SAFETY: it never returns, and runs nothing of the parent's.
            unsafe { nix::libc::_exit(code) }
        }
        ForkResult::Parent { child } => {
            let mut status = WaitStatus::StillAlive;
            let waited = catch_unwind(AssertUnwindSafe(|| {
                wait_until("the child ends", || {
                    status = waitpid(child, Some(WaitPidFlag::WNOHANG)).unwrap();
                    status != WaitStatus::StillAlive
                });
            }));
            if let Err(panic) = waited {
                kill(child, Signal::SIGKILL).unwrap();
                waitpid(child, None).unwrap();
                resume_unwind(panic);
            }
            assert_eq!(status, WaitStatus::Exited(child, 0));
        }
    }
    let Parents { clients, guard, .. } = parents;
    for guard in [guard, of_file, in_memory] {
        assert!(guard.is_held());
        guard.renew().unwrap();
        guard.release().unwrap();
    }
    drop(clients);
}
