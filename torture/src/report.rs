//! The report of one run: JSON for the page, text for people.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::check::{Check, Figures, Finding, Terms, Verdict, check};
use crate::faults::{Fault, StoreKind};
use crate::history::{History, Ns};
use crate::options::{Options, TASKS, TTL, WORKERS, WRITE, millis};
use crate::targets::{LEASEHOLD, Target};
use crate::timeline;

/// What was left at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// Holders and waiters for leasehold, keys for a peer. None: unknown.
    pub keys: Option<u64>,
    /// The largest growth of a worker's open file descriptors.
    pub descriptors: i64,
}

/// One run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// The target's name on the command line.
    pub target: String,
    /// The library with its version.
    pub library: String,
    /// The commit of this repository. None: unknown, because the report is older than this field, or there is no git.
    #[serde(default)]
    pub commit: Option<String>,
    /// The store.
    pub store: StoreKind,
    /// The seed.
    pub seed: u64,
    /// The time for new attempts, in seconds.
    pub seconds: f64,
    /// The ttl, in milliseconds.
    pub ttl_ms: u64,
    /// How long the write of a section was on its way, in milliseconds.
    #[serde(default = "usual_write")]
    pub write_ms: u64,
    /// Worker processes, and tasks in each.
    pub workers: (u32, u32),
    /// The faults that were asked for.
    pub faults: BTreeSet<Fault>,
    /// Whether the library has fencing tokens.
    pub has_tokens: bool,
    /// By fault.
    pub figures: BTreeMap<Fault, Figures>,
    /// Number of findings of each check.
    pub counts: BTreeMap<Check, usize>,
    /// The first findings of each check, those first that nothing exempts.
    pub findings: Vec<Finding>,
    /// Number of failed attempts and releases.
    pub failures: u64,
    /// The most frequent failures, with their numbers.
    pub failure_texts: Vec<(usize, String)>,
    /// What was left.
    pub left: Left,
    /// Whether something was found that nothing exempts.
    pub is_violated: bool,
    /// Time for which the whole machine stood still, in milliseconds.
    pub paused_ms: u64,
    /// The beginning of the run, by the machine's monotonic clock.
    pub start: Ns,
}

fn usual_write() -> u64 {
    millis(WRITE)
}

/// More than this many additional file descriptors are a leak: connections may come and go.
const DESCRIPTORS: i64 = 16;
/// Findings of one check that a report has.
const FINDINGS: usize = 20;
/// Failures that a report names.
const FAILURES: usize = 8;

impl Report {
    /// From everything that is known of a run.
    #[must_use]
    pub fn new(options: &Options, library: String, history: &History, left: Left, failures: u64) -> Self {
        let mut report = Self {
            target: options.target.name.to_owned(),
            library,
            commit: commit(),
            store: options.store,
            seed: options.seed,
            seconds: options.time.as_secs_f64(),
            ttl_ms: millis(options.ttl),
            write_ms: millis(options.write),
            workers: options.workers,
            faults: options.faults.iter().copied().collect(),
            has_tokens: options.target.has_tokens,
            figures: BTreeMap::new(),
            counts: BTreeMap::new(),
            findings: Vec::new(),
            failures,
            failure_texts: frequent(history),
            left,
            is_violated: false,
            paused_ms: history.pauses.iter().map(|pause| (pause.to - pause.from) / 1_000_000).sum(),
            start: history.start,
        };
        report.judge(history);
        report
    }

    /// Runs the checkers, also those of a newer program over an old history.
    pub fn judge(&mut self, history: &History) {
        let target = Target::find(&self.target).unwrap_or(LEASEHOLD);
        let ttl = Duration::from_millis(self.ttl_ms);
        let mut verdict = check(history, &Terms { store: self.store, ttl, has_bound: target.has_bound() });
        self.look_at_rest(&mut verdict, history.end, target.has_bound());
        self.is_violated = verdict.is_violated();
        self.figures = verdict.figures;
        self.counts.clear();
        self.findings.clear();
        verdict.findings.sort_by_key(|finding| finding.is_exempt);
        for finding in verdict.findings {
            let count = self.counts.entry(finding.check).or_default();
            *count += 1;
            if *count <= FINDINGS {
                self.findings.push(finding);
            }
        }
    }

    /// What is left is no promise of a peer, and its pool of connections may grow.
    fn look_at_rest(&self, verdict: &mut Verdict, at: Ns, is_promised: bool) {
        let mut found = |check, text| {
            let (fault, is_exempt) = (Fault::None, !is_promised);
            verdict.findings.push(Finding { check, fault, from: at, to: at, text, is_exempt });
        };
        if let Some(keys) = self.left.keys.filter(|keys| *keys > 0) {
            found(Check::Left, format!("{keys} keys, holders or waiters are left in the store"));
        }
        if self.left.descriptors > DESCRIPTORS {
            let grown = self.left.descriptors;
            found(Check::Descriptors, format!("a worker has {grown} file descriptors more than at first"));
        }
    }

    /// Reads a report.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or is no report.
    pub fn read(path: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&std::fs::read(path)?)?)
    }

    /// Writes `report.json`, `report.txt`, `timeline.svg` and `history.json` into a folder.
    ///
    /// # Errors
    ///
    /// The folder cannot be written to.
    pub fn write(&self, folder: &Path, history: &History) -> io::Result<()> {
        std::fs::create_dir_all(folder)?;
        std::fs::write(folder.join("report.json"), serde_json::to_string_pretty(self)? + "\n")?;
        std::fs::write(folder.join("report.txt"), self.text())?;
        std::fs::write(folder.join("timeline.svg"), self.timeline(history))?;
        std::fs::write(folder.join("history.json"), serde_json::to_string(history)?)
    }

    /// The worst moment as a picture.
    #[must_use]
    pub fn timeline(&self, history: &History) -> String {
        timeline::draw(history, &format!("{} on {}", self.library, self.store.name()), &self.findings)
    }

    /// The command that repeats the run, as far as real processes allow.
    #[must_use]
    pub fn command(&self) -> String {
        let faults: Vec<String> = self.faults.iter().map(|fault| fault.name()).collect();
        let faults = if faults.is_empty() { "none".to_owned() } else { faults.join(",") };
        let mut command = format!(
            "cargo run --release -p leasehold-torture -- --target {} --store {} --faults {faults} --minutes {:.2} --seed {}",
            self.target,
            self.store.name(),
            self.seconds / 60.0,
            self.seed
        );
        let (workers, tasks) = self.workers;
        let settings = [
            ("ttl-ms", self.ttl_ms, millis(TTL)),
            ("write-ms", self.write_ms, millis(WRITE)),
            ("workers", workers.into(), WORKERS.into()),
            ("tasks", tasks.into(), TASKS.into()),
        ];
        for (name, set, usual) in settings {
            if set != usual {
                command += &format!(" --{name} {set}");
            }
        }
        command
    }

    /// Sums over all faults.
    #[must_use]
    pub fn total(&self) -> Figures {
        let mut total = Figures::default();
        for figures in self.figures.values() {
            total.injected += figures.injected;
            total.sections += figures.sections;
            total.overlaps += figures.overlaps;
            total.exempt += figures.exempt;
            total.stale_unfenced += figures.stale_unfenced;
            total.stale_fenced += figures.stale_fenced;
            total.token_falls += figures.token_falls;
            total.exempt_tokens += figures.exempt_tokens;
            total.stall_ms = total.stall_ms.max(figures.stall_ms);
            total.bound_ms = total.bound_ms.max(figures.bound_ms);
        }
        total
    }

    /// Number of findings of a check.
    #[must_use]
    pub fn count(&self, check: Check) -> usize {
        self.counts.get(&check).copied().unwrap_or(0)
    }

    /// Why the run says less than was asked for, if it does.
    #[must_use]
    pub fn shortfall(&self) -> Option<String> {
        if self.total().sections == 0 {
            return Some("no task has held the lock".to_owned());
        }
        let is_missing = |fault: &&Fault| self.figures.get(fault).is_none_or(|figures| figures.injected == 0);
        let missing: Vec<String> = self.faults.iter().filter(is_missing).map(|fault| fault.name()).collect();
        if !missing.is_empty() {
            return Some(format!("not injected: {}", missing.join(", ")));
        }
        let has_bound = Target::find(&self.target).is_some_and(|target| target.has_bound());
        (has_bound && self.left.keys.is_none()).then(|| "what is left in the store is unknown".to_owned())
    }

    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = format!(
            "{} on {}: {:.0} s, seed {}, commit {}\n{}\n\n",
            self.library,
            self.store.name(),
            self.seconds,
            self.seed,
            self.commit.as_deref().unwrap_or("unknown"),
            self.command()
        );
        text += "fault            times sections overlaps exempt  stale: fenced unfenced  longest stall / bound in ms\n";
        let rows = self.figures.iter().map(|(fault, figures)| (fault.name(), figures.clone()));
        for (name, figures) in rows.chain([("all".to_owned(), self.total())]) {
            let _ = writeln!(
                text,
                "{name:<16} {:>5} {:>8} {:>8} {:>6} {:>14} {:>8}  {:>13} / {}",
                figures.injected,
                figures.sections,
                figures.overlaps,
                figures.exempt + figures.exempt_tokens,
                figures.stale_fenced,
                figures.stale_unfenced,
                figures.stall_ms,
                figures.bound_ms
            );
        }
        let keys = self.left.keys.map_or_else(|| "unknown".to_owned(), |keys| keys.to_string());
        let _ = writeln!(
            text,
            "\nstuck tasks {}, left in the store {keys}, file descriptors {:+}, failed calls {}, machine paused for {} ms",
            self.count(Check::LostWaiter),
            self.left.descriptors,
            self.failures,
            self.paused_ms
        );
        for (count, failure) in &self.failure_texts {
            let _ = writeln!(text, "  {count:>5}  {failure}");
        }
        for finding in &self.findings {
            let mark = if finding.is_exempt { "exempt" } else { "VIOLATION" };
            let at = finding.from.saturating_sub(self.start) / 1_000_000;
            let _ = writeln!(
                text,
                "{mark} {:?} at {at} ms ({}): {}",
                finding.check,
                finding.fault.name(),
                finding.text
            );
        }
        text += if self.is_violated { "violated\n" } else { "no violation\n" };
        text
    }
}

/// The commit of this repository, marked if files have changed since.
fn commit() -> Option<String> {
    let mut git = Command::new("git");
    git.current_dir(env!("CARGO_MANIFEST_DIR")).args(["describe", "--always", "--dirty", "--exclude=*"]);
    let done = git.output().ok().filter(|done| done.status.success())?;
    Some(String::from_utf8_lossy(&done.stdout).trim().to_owned())
}

/// The same failures of different moments are one.
fn frequent(history: &History) -> Vec<(usize, String)> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for failure in &history.failures {
        *counts.entry(&failure.text).or_default() += 1;
    }
    let mut counts: Vec<(usize, String)> =
        counts.into_iter().map(|(text, count)| (count, text.to_owned())).collect();
    counts.sort_by(|one, other| other.cmp(one));
    counts.truncate(FAILURES);
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::{Injected, Section};

    fn options() -> Options {
        Options {
            target: LEASEHOLD,
            store: StoreKind::Redis,
            faults: vec![Fault::FlushAll],
            time: Duration::from_secs(60),
            seed: 7,
            ttl: Duration::from_secs(2),
            write: WRITE,
            workers: (3, 2),
            is_verbose: false,
        }
    }

    fn flushed(at: Ns) -> Injected {
        let (fault, target, tasks) = (Fault::FlushAll, String::new(), Vec::new());
        Injected { fault, target, start: at, healed: at, tasks, has_failed: false }
    }

    fn held(begin: Ns, last_held: Ns) -> Section {
        Section { begin, last_held, end: Some(last_held), token: begin, ..Section::default() }
    }

    #[test]
    fn shortfall_names_what_the_run_does_not_say() {
        let report = |history: &History, keys| {
            let left = Left { keys, ..Left::default() };
            Report::new(&options(), String::new(), history, left, 0).shortfall().unwrap_or_default()
        };
        let mut history = History::default();
        assert_eq!(report(&history, Some(0)), "no task has held the lock");
        history.sections = vec![held(1, 2)];
        assert_eq!(report(&history, Some(0)), "not injected: flush-all");
        history.faults = vec![flushed(0)];
        assert_eq!(report(&history, Some(0)), "");
        assert_eq!(report(&history, None), "what is left in the store is unknown");
        history.faults[0].has_failed = true;
        assert_eq!(report(&history, Some(0)), "not injected: flush-all");
    }

    #[test]
    fn command_names_every_setting_that_is_not_usual() {
        let options = Options { write: Duration::from_millis(9), ..options() };
        let report = Report::new(&options, String::new(), &History::default(), Left::default(), 0);
        assert!(report.command().ends_with("--seed 7 --write-ms 9 --workers 3"), "{}", report.command());
    }

    /// Pairs of sections, of which the last ones have no fault before them.
    #[test]
    fn findings_that_nothing_exempts_are_kept_before_all_others() {
        let second = 1_000_000_000;
        let pairs = (0..26).flat_map(|pair| {
            [held(pair * second, pair * second + 9), held(pair * second + 5, pair * second + 6)]
        });
        let faults = (0..20).map(|pair| flushed(pair * second)).collect();
        let history = History { sections: pairs.collect(), faults, ..History::default() };
        let report = Report::new(&options(), String::new(), &history, Left::default(), 0);
        assert_eq!((report.findings.len(), report.count(Check::Overlap)), (FINDINGS, 26));
        assert!(!report.findings[0].is_exempt && report.text().contains("VIOLATION Overlap"));
    }
}
