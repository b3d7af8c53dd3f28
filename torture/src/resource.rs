//! The resource that the lock protects, on a Unix socket: a fenced register, one without a fence, and the record of the run.
//!
//! A worker's lines are `worker TASK PID`, `want NS`, `begin NS TOKEN`, `held NS`, `lost NS`, `write NS TOKEN`, `leave NS`, `done NS`,
//! `kept NS WHY`, `fail NS WHY` and `end NS`. `begin` and `write` are answered, so that the worker goes on only after the record has them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_bench_peer::clock::now_ns;

use crate::history::{Failure, History, Loss, Ns, Section, Waiting, Write};

/// Failures beyond these are only counted.
const FAILURES_KEPT: usize = 200_000;

/// Whether the fenced register compares tokens. Without it the resource is a broken specimen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// A write with a token lower than the highest one is refused.
    Compares,
    /// Everything is accepted.
    Absent,
}

/// The resource. Its threads end with the process.
pub struct Resource {
    path: PathBuf,
    shared: Arc<Mutex<Record>>,
}

/// The record, and the state of the registers.
struct Record {
    fence: Fence,
    highest: u64,
    order: u64,
    history: History,
    failures: u64,
    /// By task: the open section, and the open wait, as indices.
    inside: BTreeMap<u32, usize>,
    waiting: BTreeMap<u32, usize>,
    connected: BTreeSet<u32>,
    /// Tasks that have taken their last lock.
    ended: BTreeSet<u32>,
}

impl Resource {
    /// Listens on a socket in this folder.
    ///
    /// # Errors
    ///
    /// The socket cannot be created.
    pub fn start(folder: &Path, fence: Fence) -> std::io::Result<Self> {
        let path = folder.join("resource");
        let listener = UnixListener::bind(&path)?;
        let shared = Arc::new(Mutex::new(Record::new(fence)));
        let record = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let record = Arc::clone(&record);
                std::thread::spawn(move || serve(stream, &record));
            }
        });
        Ok(Self { path, shared })
    }

    /// The path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of sections so far.
    #[must_use]
    pub fn sections(&self) -> usize {
        lock(&self.shared).history.sections.len()
    }

    /// Whether no task works and no task waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let record = lock(&self.shared);
        record.waiting.is_empty() && record.inside.is_empty() && record.is_over()
    }

    /// A task that is in a section.
    #[must_use]
    pub fn holder(&self) -> Option<u32> {
        lock(&self.shared).inside.keys().next().copied()
    }

    /// Whether a task is in a section.
    #[must_use]
    pub fn has_holder(&self) -> bool {
        self.holder().is_some()
    }

    /// Whether a task has a connection.
    #[must_use]
    pub fn is_connected(&self, task: u32) -> bool {
        lock(&self.shared).connected.contains(&task)
    }

    /// Number of failed attempts and releases.
    #[must_use]
    pub fn failures(&self) -> u64 {
        lock(&self.shared).failures
    }

    /// The record so far.
    #[must_use]
    pub fn history(&self) -> History {
        lock(&self.shared).history.clone()
    }
}

fn lock(shared: &Mutex<Record>) -> MutexGuard<'_, Record> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(stream: UnixStream, shared: &Mutex<Record>) {
    let Ok(mut answers) = stream.try_clone() else { return };
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let first = lines.next().unwrap_or_default();
    let Some(task) = first.strip_prefix("worker ").and_then(|rest| rest.split(' ').next()?.parse().ok())
    else {
        return;
    };
    lock(shared).connected.insert(task);
    for line in lines {
        let answer = lock(shared).hear(task, &line, now_ns());
        if answer.is_some_and(|answer| writeln!(answers, "{answer}").is_err()) {
            break;
        }
    }
    lock(shared).gone(task, now_ns());
}

impl Record {
    fn new(fence: Fence) -> Self {
        Self {
            fence,
            highest: 0,
            order: 0,
            history: History::default(),
            failures: 0,
            inside: BTreeMap::new(),
            waiting: BTreeMap::new(),
            connected: BTreeSet::new(),
            ended: BTreeSet::new(),
        }
    }

    /// Whether all tasks have taken their last lock, and there was one.
    fn is_over(&self) -> bool {
        !self.ended.is_empty() && self.connected.is_subset(&self.ended)
    }

    /// Records a line. Returns the answer, if the line has one.
    fn hear(&mut self, task: u32, line: &str, now: Ns) -> Option<&'static str> {
        let mut words = line.splitn(3, ' ');
        let event = words.next()?;
        let at: Ns = words.next()?.parse().ok()?;
        let rest = words.next().unwrap_or_default();
        match event {
            "want" => {
                self.waiting.insert(task, self.history.waiting.len());
                self.history.waiting.push(Waiting { task, from: at, to: None });
            }
            "begin" => return Some(self.begin(task, at, rest.parse().ok()?)),
            "held" => {
                if let Some(section) = self.section(task) {
                    section.last_held = section.last_held.max(at);
                }
            }
            "write" => return Some(self.write(task, at, rest.parse().ok()?, now)),
            "lost" => {
                self.waited(task, at);
                self.history.losses.push(Loss { task, at });
                if let Some(section) = self.section(task) {
                    section.is_lost = true;
                }
            }
            "leave" => {
                if let Some(section) = self.section(task) {
                    section.left = Some(at);
                }
            }
            "done" => self.end(task, at),
            "end" => {
                self.ended.insert(task);
            }
            "fail" => self.fail(Failure { task, at, text: format!("fail: {rest}"), is_after_loss: false }),
            "kept" => {
                // A lock that was lost at once had no section.
                let is_after_loss = self.section(task).is_none_or(|section| section.is_lost);
                self.fail(Failure { task, at, text: format!("kept: {rest}"), is_after_loss });
                self.end(task, at);
            }
            _ => {}
        }
        None
    }

    fn section(&mut self, task: u32) -> Option<&mut Section> {
        self.inside.get(&task).map(|index| &mut self.history.sections[*index])
    }

    fn begin(&mut self, task: u32, at: Ns, token: u64) -> &'static str {
        self.waited(task, at);
        self.order += 1;
        self.inside.insert(task, self.history.sections.len());
        self.history.sections.push(Section {
            task,
            begin: at,
            begin_order: self.order,
            token,
            last_held: at,
            ..Section::default()
        });
        self.compare(token)
    }

    /// The fenced register: whether it accepts this token.
    fn compare(&mut self, token: u64) -> &'static str {
        if token < self.highest && token > 0 && self.fence == Fence::Compares {
            return "refused";
        }
        self.highest = self.highest.max(token);
        "ok"
    }

    fn write(&mut self, task: u32, checked: Ns, token: u64, now: Ns) -> &'static str {
        let answer = self.compare(token);
        self.order += 1;
        let write = Write { checked, arrived: now, order: self.order, is_accepted: answer == "ok" };
        if let Some(section) = self.section(task) {
            section.last_held = section.last_held.max(checked);
            section.write = Some(write);
        }
        answer
    }

    fn waited(&mut self, task: u32, at: Ns) {
        if let Some(index) = self.waiting.remove(&task) {
            self.history.waiting[index].to = Some(at);
        }
    }

    fn fail(&mut self, failure: Failure) {
        self.failures += 1;
        if self.history.failures.len() < FAILURES_KEPT {
            self.history.failures.push(failure);
        }
    }

    fn end(&mut self, task: u32, at: Ns) {
        if let Some(index) = self.inside.remove(&task) {
            self.history.sections[index].end = Some(at);
        }
    }

    /// The worker's process has ended.
    fn gone(&mut self, task: u32, at: Ns) {
        self.connected.remove(&task);
        self.waited(task, at);
        self.end(task, at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(fence: Fence, lines: &[(u32, &str)]) -> (Record, Vec<Option<&'static str>>) {
        let mut record = Record::new(fence);
        let answers = lines.iter().map(|(task, line)| record.hear(*task, line, 100)).collect();
        (record, answers)
    }

    const STALE: [(u32, &str); 5] =
        [(0, "want 1"), (0, "begin 2 7"), (1, "begin 5 8"), (1, "write 6 8"), (0, "write 3 7")];

    #[test]
    fn fenced_register_refuses_a_lower_token_and_accepts_the_same_again() {
        let (_, answers) = record(Fence::Compares, &STALE);
        assert_eq!(answers, [None, Some("ok"), Some("ok"), Some("ok"), Some("refused")]);
        let (_, answers) = record(Fence::Absent, &STALE);
        assert_eq!(answers[4], Some("ok"));
    }

    #[test]
    fn section_of_a_lost_lock_ends_when_its_release_returns() {
        let lines =
            [(0, "want 1"), (0, "begin 2 7"), (0, "lost 3"), (0, "leave 4"), (0, "kept 5 it is lost")];
        let (record, _) = record(Fence::Compares, &lines);
        let section = &record.history.sections[0];
        assert_eq!((section.is_lost, section.left, section.end), (true, Some(4), Some(5)));
        assert_eq!(record.history.losses, [Loss { task: 0, at: 3 }]);
        assert!(record.history.failures[0].is_after_loss);
    }

    #[test]
    fn failures_of_an_attempt_and_of_a_held_lock_follow_no_loss() {
        let lines = [
            (0, "want 1"),
            (0, "fail 2 no answer"),
            (0, "begin 3 7"),
            (0, "leave 4"),
            (0, "kept 5 no answer"),
        ];
        let (record, _) = record(Fence::Compares, &lines);
        assert!(record.history.failures.iter().all(|failure| !failure.is_after_loss));
        assert_eq!(record.history.failures.len(), 2);
    }

    #[test]
    fn a_process_that_ends_leaves_its_section_and_its_place() {
        let (mut record, _) = record(Fence::Compares, &[(0, "want 1"), (1, "want 1"), (0, "begin 2 7")]);
        assert_eq!((record.waiting.len(), record.inside.len()), (1, 1));
        record.gone(0, 50);
        record.gone(1, 60);
        assert_eq!(record.history.sections[0].end, Some(50));
        assert_eq!(record.history.waiting[1].to, Some(60));
        assert!(record.inside.is_empty() && record.waiting.is_empty());
    }
}
