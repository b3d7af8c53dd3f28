//! What `leasehold` itself has to say, which is never on stdout: that is the command's.
//!
//! A thread of its own writes it. The reader of stderr may stop reading: a pager, or a terminal after Ctrl-S. That must not delay
//! the end of a command whose lease is lost.

use std::fmt::Display;
use std::io::{self, Write as _};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use nix::sys::signal::SigSet;

/// So much may wait to be written; what comes then is dropped.
const QUEUE_LIMIT: usize = 256;

/// How long the end of the program, or the start of a command, waits for what is still to be written.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Once something was said: the way to the thread, or none where it can't be started.
static WRITER: OnceLock<Option<SyncSender<Job>>> = OnceLock::new();

enum Job {
    Write(String),
    /// Dropped when all before it is written.
    Flush(SyncSender<()>),
}

/// Says one thing on stderr. That nobody reads there is no reason to end, least of all while a command runs.
pub(crate) fn message(text: impl Display) {
    write_stderr(format!("leasehold: {text}\n"));
}

/// Writes this on stderr as it is.
pub(crate) fn write_stderr(text: String) {
    match writer() {
        // The queue is full when stderr was not read for long.
        Some(writer) => drop(writer.try_send(Job::Write(text))),
        None => put(&text),
    }
}

/// Waits until all is written, but not for long.
pub(crate) fn flush() {
    let (done, flushed) = sync_channel(0);
    if let Some(Some(writer)) = WRITER.get()
        && writer.try_send(Job::Flush(done)).is_ok()
    {
        let _ = flushed.recv_timeout(FLUSH_TIMEOUT);
    }
}

fn writer() -> Option<&'static SyncSender<Job>> {
    let start = || {
        let (jobs, to_do) = sync_channel(QUEUE_LIMIT);
        thread::Builder::new().name("output".to_owned()).spawn(move || work(&to_do)).ok().map(|_| jobs)
    };
    WRITER.get_or_init(start).as_ref()
}

fn work(jobs: &Receiver<Job>) {
    // A terminal may stop background jobs that write (`stty tostop`), unless the signal for that is blocked.
    let _ = SigSet::all().thread_set_mask();
    while let Ok(job) = jobs.recv() {
        match job {
            Job::Write(text) => put(&text),
            Job::Flush(done) => drop(done),
        }
    }
}

fn put(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}
