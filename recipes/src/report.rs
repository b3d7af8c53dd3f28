//! The page about all recipes, with its pictures. Its output is deterministic, to the last byte.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::explorer::{Check, Fault, Scenario, Subject};
use crate::recipes::leasehold::{OWN, Own, unmodified};
use crate::recipes::{KnownProblem, ROWS, Row, Variant, articles};
use crate::timeline;
use crate::verdict::{Finding, Verdict, explore_scenarios};

/// Number of threads.
const WORKERS: usize = 2;

/// The page.
const PAGE: &str = "recipes.md";

/// The files of the report, by path below `docs`.
pub type Files = BTreeMap<String, String>;

/// The results of all explorations.
pub struct Verdicts {
    /// One for each variant of each recipe, in the order of the catalogue.
    pub published: Vec<(&'static Row, &'static Variant, Verdict)>,
    /// One for each of leasehold's locks.
    pub own: Vec<(Own, Verdict)>,
}

/// Explores all recipes. `progress` receives how many are done, and of how many.
pub fn explore_all(progress: impl Fn(usize, usize) + Sync) -> Verdicts {
    let rows = ROWS.iter().flat_map(|row| row.variants.iter().map(move |variant| (row, variant)));
    let rows: Vec<_> = rows.collect();
    let published = rows.iter().map(|(row, variant)| (row.subject(variant), row.scenarios()));
    let jobs: Vec<_> = published.chain(OWN.map(|own| (own.subject(unmodified), own.scenarios()))).collect();
    let mut verdicts = all(&jobs, progress).into_iter();
    let published =
        rows.into_iter().zip(&mut verdicts).map(|((row, variant), verdict)| (row, variant, verdict));
    Verdicts { published: published.collect(), own: OWN.into_iter().zip(verdicts).collect() }
}

fn all(jobs: &[(Subject, Vec<Scenario>)], progress: impl Fn(usize, usize) + Sync) -> Vec<Verdict> {
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let verdicts = Mutex::new(vec![Verdict::default(); jobs.len()]);
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some((subject, scenarios)) = jobs.get(number) else { return };
            let verdict = explore_scenarios(subject, scenarios);
            verdicts.lock().expect("no thread panicked")[number] = verdict;
            progress(done.fetch_add(1, Ordering::Relaxed) + 1, jobs.len());
        }
    };
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(work);
        }
    });
    verdicts.into_inner().expect("no thread panicked")
}

/// Renders the page and its pictures.
#[must_use]
pub fn files(verdicts: &Verdicts) -> Files {
    let mut page = Page::default();
    for of_row in verdicts.published.chunk_by(|one, next| one.0.id == next.0.id) {
        page.recipe(of_row[0].0, of_row);
    }
    for (own, verdict) in &verdicts.own {
        page.own(*own, verdict);
    }
    page.files()
}

/// Writes the files below this folder. Pictures of the previous page that the new one lacks are deleted; all other files stay,
/// since the folder may contain anything.
///
/// # Errors
///
/// The file system's.
pub fn write(files: &Files, docs: &Path) -> io::Result<()> {
    let before = unless_missing(fs::read_to_string(docs.join(PAGE)))?.unwrap_or_default();
    fs::create_dir_all(docs.join("recipes"))?;
    for picture in pictures_of(&before).filter(|picture| !files.contains_key(picture)) {
        unless_missing(fs::remove_file(docs.join(picture)))?;
    }
    files.iter().try_for_each(|(path, text)| fs::write(docs.join(path), text))
}

/// The pictures that a page links to, if they lie in the report's own folder.
fn pictures_of(page: &str) -> impl Iterator<Item = String> {
    let links = page.split("](recipes/").skip(1).filter_map(|rest| rest.split_once(')'));
    let names = links.map(|(name, _)| name).filter(|name| name.ends_with(".svg") && !name.contains('/'));
    names.map(|name| format!("recipes/{name}"))
}

fn unless_missing<T>(done: io::Result<T>) -> io::Result<Option<T>> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        done => done.map(Some),
    }
}

#[derive(Default)]
struct Page {
    /// The lines of the table.
    table: String,
    sections: String,
    /// Violations that no article mentions, with links.
    unpublished: BTreeMap<(Check, Fault), Vec<String>>,
    /// Known problems that no schedule shows.
    not_reproduced: String,
    pictures: Files,
}

const HEAD: &str = "# The published recipes, and what breaks them

`cargo run --release -p recipes -- report` writes this page. It runs every recipe as it was published, on a real Redis, in every
interleaving of the steps of two and of three clients. A client may be delayed before any of its steps. With two clients,
each makes two attempts, one may crash between two steps, and time may advance twice. With three clients, each makes one attempt and
time may advance once. All clients may crash at any moment. Time advances by changing the keys' expiry; nothing sleeps. The search
is breadth-first, so every picture is a shortest schedule. Each was confirmed by a second run from an empty server.

```sh
cargo run --release -p recipes -- list                  # every recipe, its known problem, and what to use instead
cargo run --release -p recipes -- list --articles       # from the words of an article to the recipe, in English and Chinese
cargo run --release -p recipes -- run set-nx-px         # a few clients, step by step, on a Redis of its own
cargo run --release -p recipes -- explore timestamp-getset --getset-nil failed
```

[recipes-under-load.md](recipes-under-load.md) has the cost under load. 中文指南：[zh-CN/recipes.md](zh-CN/recipes.md)。

## Which recipe an article means

";

const TABLE: &str = "
## What breaks

`✓` holds in every schedule. `✗` breaks, and no other check before it. `~` breaks only after another check has broken. A
letter names the required fault: `c` the clients' clocks differ by more than a lease, `r` a master restarts without its data,
`j` a master's clock jumps, `o` two clients use the same owner name.

| | one holder | notices expiry | free after crash | frees only own | can release | no stale lock | notified | fencing |
|---|---|---|---|---|---|---|---|---|
";

const MEANING: &str = "
The columns:

- **one holder**: two clients are never in the critical section while the leases of both run. A lease counts from the start of
  the attempt that acquired it.
- **notices expiry**: a client that is in the critical section after its lease has expired notices that by its own clock before
  another client enters. It may still be paused just before its next write; only fencing tokens help against that.
- **free after crash**: when all clients have crashed and the longest lease has expired, the lock can be acquired.
- **frees only own**: no step of one client frees a lock that another client holds or is certain to acquire.
- **can release**: a release before the lease has expired succeeds.
- **no stale lock**: when no client has crashed and all have finished, the lock can be acquired.
- **notified**: no client waits for a notification while the lock is free, no client has crashed, and no other client is about to
  act. Most recipes do not wait; they poll.
- **fencing**: each holder gets a number that is higher than all before it.
";

impl Page {
    fn recipe(&mut self, row: &Row, verdicts: &[(&Row, &Variant, Verdict)]) {
        let (_, _, usual) = &verdicts[0];
        for (_, variant, verdict) in verdicts {
            self.line(&name(row, variant), verdict, false, row.waits);
        }
        let _ = writeln!(self.sections, "\n## `{}`\n\n- Acquires: {}.", row.id, row.acquire);
        let _ = writeln!(self.sections, "- Releases: {}.", row.release);
        let _ = writeln!(self.sections, "- Known problem: {}.", row.problems());
        let _ = writeln!(self.sections, "- Use: {}.", row.instead);
        for (_, variant, verdict) in verdicts {
            let own: Vec<_> = verdict.findings.iter().filter(|found| is_new(found, variant, usual)).collect();
            if variant.switches.is_empty() {
                let holds = holding(verdict, row.waits);
                let _ = writeln!(self.sections, "- Holds: {holds}.\n- {}.", coverage(verdict));
            } else {
                let same = if own.is_empty() {
                    ". It breaks the same checks as the usual variant, and no other"
                } else {
                    ""
                };
                let _ = writeln!(
                    self.sections,
                    "\n### `{}` with `{}`\n\n{}{same}.",
                    row.id,
                    variant.switches,
                    coverage(verdict)
                );
            }
            for finding in own {
                self.finding(row, variant, finding);
            }
            self.compare(row, variant, verdict, usual);
        }
    }

    fn finding(&mut self, row: &Row, variant: &Variant, finding: &Finding) {
        let file = picture_of(row, variant, finding);
        let check = finding.check();
        let title = format!("{}: {check}?", name(row, variant));
        let why = broken(finding);
        let _ = writeln!(self.sections, "\n**{check}**: {why}.\n\n![{title}]({file})");
        self.pictures.insert(file, timeline::svg(&title, &finding.violation));
    }

    /// Compares the known problems with the violations found.
    fn compare(&mut self, row: &Row, variant: &Variant, verdict: &Verdict, usual: &Verdict) {
        let known = row.known(variant);
        for problem in &known {
            if !verdict.findings.iter().any(|finding| shows(finding, problem)) {
                let _ = writeln!(self.not_reproduced, "- `{}`: {}.", name(row, variant), problem.problem);
            }
        }
        for finding in verdict.findings.iter().filter(|finding| finding.is_root()) {
            let is_known = known.iter().any(|problem| shows(finding, problem));
            if !is_known && is_new(finding, variant, usual) {
                let link = format!("[`{}`]({})", name(row, variant), picture_of(row, variant, finding));
                self.unpublished.entry((finding.check(), finding.fault)).or_default().push(link);
            }
        }
    }

    fn own(&mut self, own: Own, verdict: &Verdict) {
        let Own { id, title, waits, .. } = own;
        self.line(&format!("leasehold, {title}"), verdict, true, waits);
        let _ = writeln!(self.sections, "\n## `{id}`: leasehold's {title}\n\n{}.", coverage(verdict));
        for finding in &verdict.findings {
            let _ = writeln!(self.sections, "\n```text\n{}```", timeline::text(&finding.violation));
        }
    }

    fn line(&mut self, name: &str, verdict: &Verdict, is_fenced: bool, waits: bool) {
        let name = if name.contains('`') { name.to_owned() } else { format!("`{name}`") };
        let _ = write!(self.table, "| {name} |");
        for check in Check::ALL {
            let marks: Vec<_> = verdict.of(check).map(mark).collect();
            let cell = match (check, marks.is_empty()) {
                (Check::TokensIncrease, true) if !is_fenced => "none".to_owned(),
                (Check::WaitersWoken, true) if !waits => "polls".to_owned(),
                (_, true) => "✓".to_owned(),
                _ => marks.join(" "),
            };
            let _ = write!(self.table, " {cell} |");
        }
        self.table.push('\n');
    }

    fn files(self) -> Files {
        let mut page = [HEAD, &articles::table(), TABLE, &self.table, MEANING].concat();
        page += "\n## Violations that the articles do not mention\n\n";
        for ((check, fault), links) in &self.unpublished {
            let when = if *fault == Fault::None { String::new() } else { format!(" {fault}") };
            let _ = writeln!(page, "- *{check}* breaks{when}: {}.", links.join(", "));
        }
        page += "\n## Known problems that no schedule shows\n\n";
        page += if self.not_reproduced.is_empty() {
            "None: the exploration found every known problem that a schedule can show.\n"
        } else {
            &self.not_reproduced
        };
        page += &self.sections;
        let mut files = self.pictures;
        files.insert(PAGE.to_owned(), page);
        files
    }
}

/// What a violation needs: `breaks if a master's clock jumps, after "at most one holder" has broken`.
#[must_use]
pub fn broken(finding: &Finding) -> String {
    let when = if finding.fault == Fault::None { String::new() } else { format!(" {}", finding.fault) };
    let after = finding.violation.follows.map(|first| format!(", after \"{first}\" has broken"));
    format!("breaks{when}{}", after.unwrap_or_default())
}

fn name(row: &Row, variant: &Variant) -> String {
    format!("{} {}", row.id, variant.switches).trim_end().to_owned()
}

/// Whether the usual variant lacks this finding.
fn is_new(finding: &Finding, variant: &Variant, usual: &Verdict) -> bool {
    variant.switches.is_empty() || !usual.findings.iter().any(|known| known.brief() == finding.brief())
}

fn shows(finding: &Finding, known: &KnownProblem) -> bool {
    finding.check() == known.check && finding.fault == known.fault
}

fn mark(finding: &Finding) -> String {
    let sign = if finding.is_root() { "✗" } else { "~" };
    let suffix = match finding.fault {
        Fault::None => "",
        Fault::ClocksDiffer => "c",
        Fault::MasterRestarts => "r",
        Fault::MasterJumps => "j",
        Fault::SameOwner => "o",
    };
    format!("{sign}{suffix}")
}

fn holding(verdict: &Verdict, waits: bool) -> String {
    let applies = |check: &Check| *check != Check::TokensIncrease && (waits || *check != Check::WaitersWoken);
    let holds = Check::ALL.into_iter().filter(applies).filter(|check| verdict.of(*check).next().is_none());
    let holds: Vec<_> = holds.map(|check| check.to_string()).collect();
    if holds.is_empty() { "none of the checks".to_owned() } else { holds.join("; ") }
}

/// How much of the state space was explored.
fn coverage(verdict: &Verdict) -> String {
    match verdict.bound {
        None => format!("Every interleaving was run: {} states", verdict.states),
        Some(bound) => {
            format!("Every interleaving of up to {bound} events was run: {} states", verdict.states)
        }
    }
}

fn picture_of(row: &Row, variant: &Variant, finding: &Finding) -> String {
    let switches = variant.switches.replace("--", "").replace(' ', "-");
    let variant = if switches.is_empty() { String::new() } else { format!("-{switches}") };
    let mut check = String::new();
    for c in finding.brief().trim_start_matches('~').replace(' ', "").chars() {
        if c.is_uppercase() {
            check.push('-');
        }
        check.extend(c.to_lowercase());
    }
    format!("recipes/{}{variant}{check}.svg", row.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_deletes_stale_pictures_of_the_previous_page_and_no_other_file() {
        let folder = tempfile::tempdir().unwrap();
        let docs = folder.path();
        let report = |pictures: &[&str]| {
            let page = pictures.iter().map(|name| format!("![why]({name})\n")).collect();
            let pictures = pictures.iter().map(|name| ((*name).to_owned(), "<svg/>".to_owned()));
            pictures.chain([(PAGE.to_owned(), page)]).collect::<Files>()
        };
        write(&report(&["recipes/stale.svg", "recipes/same.svg"]), docs).unwrap();
        fs::create_dir(docs.join("recipes/photos")).unwrap();
        for mine in ["recipes/photos/a.svg", "recipes/mine.svg", "recipes/notes.txt"] {
            fs::write(docs.join(mine), "mine").unwrap();
        }
        write(&report(&["recipes/same.svg", "recipes/fresh.svg"]), docs).unwrap();
        let is_there = |path: &str| docs.join(path).exists();
        assert!(!is_there("recipes/stale.svg"));
        assert!(is_there("recipes/same.svg") && is_there("recipes/fresh.svg"));
        assert!(
            is_there("recipes/photos/a.svg") && is_there("recipes/mine.svg") && is_there("recipes/notes.txt")
        );
    }

    #[test]
    fn only_pictures_in_the_report_s_own_folder_count_as_its_own() {
        let page = "![a](recipes/a.svg) ![b](recipes/../b.svg) [c](recipes/c.md) ![d](other/d.svg)";
        assert_eq!(pictures_of(page).collect::<Vec<_>>(), ["recipes/a.svg"]);
    }
}
