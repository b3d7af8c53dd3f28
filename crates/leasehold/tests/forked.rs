//! A process that forks without `exec`: the threads of its clients do not run in the child, which starts its own.
//!
//! One test only, since a fork copies one thread.

#![cfg(target_os = "linux")]
// A fork is the only way to have a child without the threads of its parent.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use leasehold::blocking::Client;
use leasehold_testkit::{Server, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

fn locks_in_the_child(url: &str) -> Result<(), leasehold::Error> {
    let client = Client::connect(url)?;
    let guard = client.mutex("of the child").lock()?;
    // The driver's timer ends the wait.
    let of_parent = client.mutex("of the parent").lock_timeout(Duration::from_millis(20))?;
    assert!(of_parent.is_none() && guard.is_held());
    guard.release()?;
    client.close()
}

#[test]
fn child_that_is_forked_has_clients_of_its_own() {
    let server = Server::on_socket();
    let url = server.url();
    // On all threads that the parent may have.
    let clients: Vec<_> = (0..8).map(|_| Client::connect(&url).unwrap()).collect();
    let guard = clients[0].mutex("of the parent").lock().unwrap();
    // SAFETY: no other thread of this process holds a lock that the child needs: the C library makes its allocator usable in the child, and
    // the child leaves by `_exit`.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let ended = catch_unwind(AssertUnwindSafe(|| locks_in_the_child(&url)));
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
    assert!(guard.is_held());
    guard.release().unwrap();
}
