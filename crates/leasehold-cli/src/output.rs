//! Messages of `leasehold` itself, on stderr; stdout belongs to the command.
//!
//! A thread of its own writes them, because the reader of stderr may stop reading (a pager, or a terminal after Ctrl-S), and that
//! must not delay the end of a command whose lease is lost.

use std::fmt::Display;
use std::io::{self, Write as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::signal::SigSet;
use serde_json::json;

use crate::text::printable_lines;

/// The maximum number of queued messages; further ones are dropped.
const QUEUE_LIMIT: usize = 256;

/// How long the end of the program, or the start of a command, waits for queued messages.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The queue to the thread, from the first message on; none if the thread can't be started.
static WRITER: OnceLock<Option<SyncSender<Job>>> = OnceLock::new();

enum Job {
    Write(String),
    /// Dropped when all before it is written.
    Flush(SyncSender<()>),
}

/// Whether messages are JSON; set once, before the first message.
static IS_JSON: AtomicBool = AtomicBool::new(false);

/// Makes each message a JSON object on a line of its own.
pub(crate) fn use_json() {
    IS_JSON.store(true, Ordering::Relaxed);
}

/// Whether messages are JSON, so that nothing else may be written to stderr.
pub(crate) fn is_json() -> bool {
    IS_JSON.load(Ordering::Relaxed)
}

/// Prints one message on stderr. A closed stderr is ignored, above all while a command runs.
pub(crate) fn message(text: impl Display) {
    let text = printable_lines(&text.to_string());
    if !is_json() {
        return write_stderr(format!("leasehold: {text}\n"));
    }
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let time = u64::try_from(time).unwrap_or(u64::MAX);
    let line = json!({ "time_ms": time, "pid": std::process::id(), "message": text });
    write_stderr(format!("{line}\n"));
}

/// Writes text to stderr unchanged.
pub(crate) fn write_stderr(text: String) {
    match writer() {
        // The queue is full when stderr was not read for long.
        Some(writer) => drop(writer.try_send(Job::Write(text))),
        None => put(&text),
    }
}

/// Waits until all messages are written, up to [`FLUSH_TIMEOUT`].
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
