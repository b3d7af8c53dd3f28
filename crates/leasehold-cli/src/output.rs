//! Messages of `leasehold` itself, on stderr; stdout belongs to the command.
//!
//! A thread of its own writes them, because the reader of stderr may stop reading (a pager, or a terminal after Ctrl-S), and that
//! must not delay the end of a command whose lease is lost.

use std::fmt::Display;
use std::io::{self, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold::{Kind, Token};
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

/// How important a message is, for JSON.
#[derive(Clone, Copy)]
pub(crate) enum Level {
    Info,
    Warn,
    Error,
}

impl Level {
    fn word(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }
}

/// A lock that this program is about, for JSON.
struct Subject {
    kind: Option<Kind>,
    name: String,
    /// Of the last grant.
    token: Option<Token>,
}

static SUBJECTS: Mutex<Vec<Subject>> = Mutex::new(Vec::new());

fn subjects() -> MutexGuard<'static, Vec<Subject>> {
    SUBJECTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Names the locks that all further messages are about.
pub(crate) fn set_locks(kind: Option<Kind>, names: impl IntoIterator<Item = impl Into<String>>) {
    let of = |name: _| Subject { kind, name: Into::into(name), token: None };
    *subjects() = names.into_iter().map(of).collect();
}

/// Sets the tokens of these locks, in their order; none while they are waited for.
pub(crate) fn set_tokens(tokens: &[Token]) {
    for (at, subject) in subjects().iter_mut().enumerate() {
        subject.token = tokens.get(at).copied();
    }
}

/// Makes each message a JSON object on a line of its own.
pub(crate) fn use_json() {
    IS_JSON.store(true, Ordering::Relaxed);
}

/// Whether messages are JSON, so that nothing else may be written to stderr.
pub(crate) fn is_json() -> bool {
    IS_JSON.load(Ordering::Relaxed)
}

/// Prints one message on stderr. A closed stderr is ignored, above all while a command runs. The event is for JSON: programs recognise
/// the message by it.
pub(crate) fn message(level: Level, event: &'static str, text: impl Display) {
    let text = printable_lines(&text.to_string());
    if !is_json() {
        return write_stderr(format!("leasehold: {text}\n"));
    }
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let time = u64::try_from(time).unwrap_or(u64::MAX);
    let about_none = json!({
        "time_ms": time, "level": level.word(), "event": event, "pid": std::process::id(), "message": text,
    });
    // One object for each lock, so that every program finds its name in one place.
    let about = |subject: &Subject| {
        let mut object = about_none.clone();
        object["lock"] = subject.name.as_str().into();
        object["kind"] = subject.kind.map(Kind::as_str).into();
        object["token"] = subject.token.map(Token::get).into();
        format!("{object}\n")
    };
    let lines: String = subjects().iter().map(about).collect();
    write_stderr(if lines.is_empty() { format!("{about_none}\n") } else { lines });
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
