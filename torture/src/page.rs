//! The page `docs/torture.md`, from the reports.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use clap::ValueEnum as _;

use crate::check::{Check, Figures};
use crate::faults::{Fault, StoreKind, TABLE};
use crate::history::History;
use crate::report::Report;
use crate::targets::{PEERS, Target};

const INTRODUCTION: &str = include_str!("page/introduction.md");
const COLUMNS: &str = include_str!("page/columns.md");
const CHAPTERS: &str = include_str!("page/chapters.md");

/// The folder of the documents.
#[must_use]
pub fn documents() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("docs")
}

/// Copies the reports of these folders, and of the folders within them, beside the page, and writes it. A history beside a report is judged
/// again, by the checkers of this program.
///
/// # Errors
///
/// A folder cannot be read, or the page cannot be written.
pub fn publish(folders: &[PathBuf]) -> io::Result<PathBuf> {
    let kept = documents().join("torture");
    std::fs::create_dir_all(&kept)?;
    for (name, (file, mut report)) in named(folders)? {
        let history = file.with_file_name("history.json");
        if history.exists() {
            let history: History = serde_json::from_slice(&std::fs::read(history)?)?;
            report.judge(&history);
            std::fs::write(kept.join(format!("{name}.svg")), report.timeline(&history))?;
        }
        std::fs::write(kept.join(format!("{name}.json")), serde_json::to_string_pretty(&report)? + "\n")?;
    }
    let page = documents().join("torture.md");
    std::fs::write(&page, write(&kept)?)?;
    Ok(page)
}

/// The reports in these folders, by the name of the kept file. Two of one name are an error: one of them would be forgotten.
fn named(folders: &[PathBuf]) -> io::Result<BTreeMap<String, (PathBuf, Report)>> {
    let mut named = BTreeMap::new();
    for folder in folders {
        for file in reports_in(folder)? {
            let report = Report::read(&file)?;
            let before = named.insert(name(&report), (file.clone(), report));
            if let Some((other, _)) = before {
                let two =
                    format!("{} and {} have the same target and store", other.display(), file.display());
                return Err(io::Error::other(two));
            }
        }
    }
    Ok(named)
}

/// `report.json` in the folder and in those within it.
fn reports_in(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(reports_in(&path)?);
        } else if path.file_name().is_some_and(|name| name == "report.json") {
            found.push(path);
        }
    }
    Ok(found)
}

fn name(report: &Report) -> String {
    format!("{}-{}", report.target, report.store.name().replace('.', ""))
}

/// The page, from the kept reports.
///
/// # Errors
///
/// A report cannot be read.
pub fn write(kept: &Path) -> io::Result<String> {
    let mut reports = Vec::new();
    for entry in std::fs::read_dir(kept)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            reports.push(Report::read(&path)?);
        }
    }
    // leasehold first, then the peers, each in the order of the program's tables.
    reports
        .sort_by_key(|report| (Target::all().position(|target| target.name == report.target), report.store));
    let mut page = INTRODUCTION.to_owned();
    summary(&mut page, &reports);
    promises(&mut page, &reports);
    faults(&mut page);
    for report in &reports {
        details(&mut page, report);
    }
    page += CHAPTERS;
    Ok(page)
}

fn summary(page: &mut String, reports: &[Report]) {
    *page += "## Results\n\n\
        | target | store | commit | minutes asked for | faults | sections | overlaps | exempt | stale writes accepted with token | \
        without token | tokens that did not rise | stall nearest to its bound, ms | that bound, ms | stuck tasks | left | violated |\n\
        |---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|\n";
    for report in reports {
        let total = report.total();
        let (stall, bound) = stall(report);
        let _ = writeln!(
            page,
            "| {} | {} | {} | {:.0} | {} | {} | {} | {} | {} | {} | {} | {stall} | {bound} | {} | {} | {} |",
            report.library,
            target_store(report),
            report.commit.as_deref().unwrap_or("unknown"),
            report.seconds / 60.0,
            total.injected,
            total.sections,
            total.overlaps,
            total.exempt + total.exempt_tokens,
            fenced(report, &total),
            total.stale_unfenced,
            if report.has_tokens { total.token_falls.to_string() } else { "no token".to_owned() },
            report.count(Check::LostWaiter),
            report.left.keys.map_or_else(|| "unknown".to_owned(), |keys| keys.to_string()),
            if report.is_violated { "yes" } else { "no" },
        );
    }
    *page += COLUMNS;
}

fn target_store(report: &Report) -> String {
    let lock = match report.target.as_str() {
        "redisson" => "RLock, ",
        "redisson-fair" => "RFairLock, ",
        "redisson-fenced" => "RFencedLock, ",
        "leasehold-serve" => "HTTP, ",
        _ => "",
    };
    format!("{lock}{}", report.store.name())
}

/// Of the longest stalls of all faults, the one that is nearest to its bound.
fn stall(report: &Report) -> (u64, u64) {
    let longest =
        report.figures.values().max_by_key(|figures| figures.stall_ms * 1_000 / figures.bound_ms.max(1));
    longest.map_or((0, 0), |figures| (figures.stall_ms, figures.bound_ms))
}

fn fenced(report: &Report, figures: &Figures) -> String {
    if report.has_tokens { figures.stale_fenced.to_string() } else { "no token".to_owned() }
}

fn promises(page: &mut String, reports: &[Report]) {
    *page += "The peer programs of the comparison (`bench/peers`) use each library as its documentation advises. What the libraries \
        say about themselves:\n\n";
    for target in PEERS {
        let Some(report) = reports.iter().find(|report| report.target == target.name) else { continue };
        let _ = writeln!(
            page,
            "- {}, `{}`: “{}” ({})",
            report.library, target.name, target.promise, target.source
        );
    }
    *page += "\nThe bound of a stall is leasehold's own promise. No peer promises one.\n\n";
}

fn faults(page: &mut String) {
    *page += "## Faults, and what the guarantees exempt\n\n| fault | stores | two holders are exempt | a takeover may be later |\n|---|---|---|---|\n";
    for rule in TABLE.iter().filter(|rule| rule.fault != Fault::None) {
        let stores: Vec<String> = rule.stores.iter().map(|store| store.name()).collect();
        let all = StoreKind::value_variants().len() == stores.len();
        let quoted = |sentence: &str| format!("“{sentence}”");
        let _ = writeln!(
            page,
            "| `{}` | {} | {} | {} |",
            rule.fault.name(),
            if all { "all".to_owned() } else { stores.join(", ") },
            rule.exemption.map_or_else(|| "never".to_owned(), |exemption| quoted(exemption.sentence)),
            rule.delay.map_or_else(
                || "no".to_owned(),
                |delay| format!("by {} s: {}", delay.of.as_secs(), quoted(delay.sentence))
            ),
        );
    }
    *page += "\n## Each run, by fault\n\nEach figure belongs to the last fault that had begun by then. *Stall*: after the end of the fault, the longest time for which the lock was \
        free while a live task waited, and the bound of a takeover.\n\n";
}

fn details(page: &mut String, report: &Report) {
    let _ = writeln!(
        page,
        "### {} on {}\n\nSeed {}, ttl {} ms, {} processes with {} tasks each; {} failed calls; largest growth of open file descriptors {}; the machine paused for {} ms. \
         The worst moment: [timeline](torture/{}.svg).\n",
        report.target,
        report.store.name(),
        report.seed,
        report.ttl_ms,
        report.workers.0,
        report.workers.1,
        report.failures,
        report.left.descriptors,
        report.paused_ms,
        name(report),
    );
    *page += "| fault | times | sections | overlaps | exempt | stale with token | stale without | stall / bound, ms |\n\
        |---|---:|---:|---:|---:|---:|---:|---:|\n";
    for (fault, figures) in &report.figures {
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} | {} | {} | {} / {} |",
            fault.name(),
            figures.injected,
            figures.sections,
            figures.overlaps,
            figures.exempt + figures.exempt_tokens,
            fenced(report, figures),
            figures.stale_unfenced,
            figures.stall_ms,
            figures.bound_ms,
        );
    }
    *page += "\n";
    violations(page, report);
}

/// What broke a promise, and what no promise of a peer covers.
fn violations(page: &mut String, report: &Report) {
    let shown = report.findings.iter().filter(|finding| !finding.is_exempt).take(3);
    let shown: Vec<String> =
        shown.map(|finding| format!("- after `{}`: {}\n", finding.fault.name(), finding.text)).collect();
    if !shown.is_empty() {
        let _ = writeln!(page, "Examples of findings:\n\n{}", shown.concat());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_reports_of_one_target_and_store_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let kept = documents().join("torture/leasehold-redis.json");
        let [one, other] = ["one", "other"].map(|name| folder.path().join(name));
        for run in [&one, &other] {
            std::fs::create_dir(run).unwrap();
            std::fs::copy(&kept, run.join("report.json")).unwrap();
        }
        assert_eq!(named(std::slice::from_ref(&one)).unwrap().len(), 1);
        let refused = named(&[one, other]).unwrap_err().to_string();
        assert!(refused.contains("have the same target and store"), "{refused}");
    }
}
