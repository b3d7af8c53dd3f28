//! The resource that the lock protects, on a Unix socket: a fenced register, one without a fence, and the record of the run.
//!
//! A worker's lines are `worker TASK PID`, `want NS [PARTS]`, `begin NS TOKENS [ASKED]`, `held NS`, `lost NS`, `write NS TOKENS`, `leave NS`,
//! `done NS`, `kept NS WHY`, `fail NS WHY` and `end NS`. `begin` and `write` are answered, so that the worker goes on only after the record has
//! them. `PARTS` is JSON: what the attempt asks of which locks, by default the whole mutex. `TOKENS` has a token for each part, with commas.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Write as _};
use std::ops::Range;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_bench_peer::clock::now_ns;

use crate::history::{Failure, History, Loss, Ns, Section, Waiting, Write};
use crate::parts::{Lock, Part};

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
    /// The highest token of each lock.
    highest: BTreeMap<Lock, u64>,
    order: u64,
    history: History,
    failures: u64,
    /// By task: the open sections, and the open waits, as indices. One for each lock that it acquires.
    inside: BTreeMap<u32, Range<usize>>,
    waiting: BTreeMap<u32, Range<usize>>,
    /// By task: what it has asked for last.
    parts: BTreeMap<u32, Vec<Part>>,
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
            highest: BTreeMap::new(),
            order: 0,
            history: History::default(),
            failures: 0,
            inside: BTreeMap::new(),
            waiting: BTreeMap::new(),
            parts: BTreeMap::new(),
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
            "want" => self.want(task, at, rest)?,
            "begin" => {
                let (tokens, asked) = rest.split_once(' ').unwrap_or((rest, "0"));
                return Some(self.begin(task, at, &numbers(tokens)?, asked.parse().ok()?));
            }
            "held" => {
                self.sections(task).for_each(|section| section.last_held = section.last_held.max(at));
            }
            "write" => return Some(self.write(task, at, &numbers(rest)?, now)),
            "lost" => {
                self.waited(task, at);
                self.history.losses.push(Loss { task, at });
                self.sections(task).for_each(|section| section.is_lost = true);
            }
            "leave" => self.sections(task).for_each(|section| section.left = Some(at)),
            "done" => self.end(task, at),
            "end" => {
                self.ended.insert(task);
            }
            "fail" => self.fail(Failure { task, at, text: format!("fail: {rest}"), is_after_loss: false }),
            "kept" => {
                // A lock that was lost at once had no section.
                let is_after_loss = self.sections(task).all(|section| section.is_lost);
                self.fail(Failure { task, at, text: format!("kept: {rest}"), is_after_loss });
                self.end(task, at);
            }
            _ => {}
        }
        None
    }

    fn sections(&mut self, task: u32) -> impl Iterator<Item = &mut Section> {
        let open = self.inside.get(&task).cloned().unwrap_or_default();
        self.history.sections[open].iter_mut()
    }

    fn want(&mut self, task: u32, at: Ns, parts: &str) -> Option<()> {
        let parts =
            if parts.is_empty() { vec![Part::default()] } else { serde_json::from_str(parts).ok()? };
        let first = self.history.waiting.len();
        self.history.waiting.extend(parts.iter().map(|part| Waiting {
            task,
            part: *part,
            from: at,
            to: None,
        }));
        self.waiting.insert(task, first..self.history.waiting.len());
        self.parts.insert(task, parts);
        Some(())
    }

    fn begin(&mut self, task: u32, at: Ns, tokens: &[u64], asked: Ns) -> &'static str {
        self.waited(task, at);
        self.order += 1;
        let first = self.history.sections.len();
        let parts = self.parts.get(&task).cloned().unwrap_or_else(|| vec![Part::default()]);
        for (Part { lock, share }, token) in parts.into_iter().zip(tokens) {
            self.history.sections.push(Section {
                task,
                lock,
                share,
                asked,
                begin: at,
                begin_order: self.order,
                token: *token,
                last_held: at,
                ..Section::default()
            });
        }
        self.inside.insert(task, first..self.history.sections.len());
        let begun: Vec<(Lock, u64)> =
            self.sections(task).map(|section| (section.lock, section.token)).collect();
        // Readers too: a writer is late once a reader with a higher token has begun.
        self.compare(&begun)
    }

    /// The fenced registers, one for each lock: whether they accept these tokens.
    fn compare(&mut self, tokens: &[(Lock, u64)]) -> &'static str {
        let mut answer = "ok";
        for (lock, token) in tokens {
            let highest = self.highest.entry(*lock).or_default();
            if *token < *highest && *token > 0 && self.fence == Fence::Compares {
                answer = "refused";
            }
            *highest = (*highest).max(*token);
        }
        answer
    }

    fn write(&mut self, task: u32, checked: Ns, tokens: &[u64], now: Ns) -> &'static str {
        let open = self.inside.get(&task).cloned().unwrap_or_default();
        self.order += 1;
        let mut last = "ok";
        for (index, token) in open.zip(tokens) {
            let section = &self.history.sections[index];
            let (lock, writes) = (section.lock, section.share.writes());
            let answer = if writes { self.compare(&[(lock, *token)]) } else { "ok" };
            let write = Write { checked, arrived: now, order: self.order, is_accepted: answer == "ok" };
            let section = &mut self.history.sections[index];
            section.last_held = section.last_held.max(checked);
            section.write = writes.then_some(write);
            last = if answer == "ok" { last } else { answer };
        }
        last
    }

    fn waited(&mut self, task: u32, at: Ns) {
        let open = self.waiting.remove(&task).unwrap_or_default();
        self.history.waiting[open].iter_mut().for_each(|waiting| waiting.to = Some(at));
    }

    fn fail(&mut self, failure: Failure) {
        self.failures += 1;
        if self.history.failures.len() < FAILURES_KEPT {
            self.history.failures.push(failure);
        }
    }

    fn end(&mut self, task: u32, at: Ns) {
        self.sections(task).for_each(|section| section.end = Some(at));
        self.inside.remove(&task);
    }

    /// The worker's process has ended.
    fn gone(&mut self, task: u32, at: Ns) {
        self.connected.remove(&task);
        self.waited(task, at);
        self.end(task, at);
    }
}

/// With commas.
fn numbers(text: &str) -> Option<Vec<u64>> {
    text.split(',').map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::Share;

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

    #[test]
    fn attempt_for_several_locks_has_a_section_and_a_fence_of_each() {
        let parts = r#"[{"lock":{"set":0},"share":"whole"},{"lock":{"set":2},"share":"whole"}]"#;
        let want = format!("want 1 {parts}");
        let lines =
            [(0, want.as_str()), (0, "begin 3 7,9 2"), (0, "held 4"), (1, "begin 5 8 4"), (0, "write 6 7,9")];
        let (mut record, answers) = record(Fence::Compares, &lines);
        let seen: Vec<_> =
            record.history.sections.iter().map(|section| (section.lock, section.token)).collect();
        assert_eq!(seen, [(Lock::Set(0), 7), (Lock::Set(2), 9), (Lock::Mutex, 8)]);
        assert_eq!(answers[4], Some("ok"));
        assert!(
            record.history.sections[..2].iter().all(|section| section.asked == 2 && section.write.is_some())
        );
        assert!(record.history.waiting.iter().all(|waiting| waiting.to == Some(3)));
        record.gone(0, 50);
        assert!(record.history.sections[..2].iter().all(|section| section.end == Some(50)));
    }

    #[test]
    fn fence_refuses_the_write_of_a_writer_after_a_later_reader_and_readers_write_nothing() {
        let [writer, reader] =
            ["whole", "read"].map(|share| format!(r#"want 1 [{{"lock":"read-write","share":"{share}"}}]"#));
        let lines = [
            (0, writer.as_str()),
            (1, reader.as_str()),
            (0, "begin 2 7 1"),
            (1, "begin 3 8 2"),
            (1, "write 4 8"),
            (0, "write 5 7"),
        ];
        let (record, answers) = record(Fence::Compares, &lines);
        assert_eq!(answers[4..], [Some("ok"), Some("refused")]);
        let [writer, reader] = &record.history.sections[..] else { panic!("two sections") };
        assert!(writer.write.is_some_and(|write| !write.is_accepted));
        assert_eq!((reader.share, reader.write), (Share::Read, None));
    }
}
