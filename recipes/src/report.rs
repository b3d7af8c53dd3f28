//! The page about all recipes, and its pictures: the same, to the last byte, whenever it is written.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::explorer::{Check, Fault, Scenario, Subject};
use crate::recipes::leasehold::{OWN, Own, unaltered};
use crate::recipes::{Named, ROWS, Row, Variant};
use crate::timeline;
use crate::verdict::{Finding, Verdict, examine};

/// Rows explored at the same time.
const WORKERS: usize = 2;

/// The page itself.
const PAGE: &str = "recipes.md";

/// The files of the report, by their path below `docs`.
pub type Files = BTreeMap<String, String>;

/// What all explorations came to.
pub struct Verdicts {
    /// Of each variant of each recipe, in the order of the table.
    pub published: Vec<(&'static Row, &'static Variant, Verdict)>,
    /// Of leasehold's own locks.
    pub own: Vec<(Own, Verdict)>,
}

/// Explores everything. `say` hears how far it is.
pub fn examine_all(say: impl Fn(usize, usize) + Sync) -> Verdicts {
    let rows = ROWS.iter().flat_map(|row| row.variants.iter().map(move |variant| (row, variant)));
    let rows: Vec<_> = rows.collect();
    let published = rows.iter().map(|(row, variant)| (row.subject(variant), row.scenarios()));
    let jobs: Vec<_> = published.chain(OWN.map(|own| (own.subject(unaltered), own.scenarios()))).collect();
    let mut verdicts = all(&jobs, say).into_iter();
    let published =
        rows.into_iter().zip(&mut verdicts).map(|((row, variant), verdict)| (row, variant, verdict));
    Verdicts { published: published.collect(), own: OWN.into_iter().zip(verdicts).collect() }
}

fn all(jobs: &[(Subject, Vec<Scenario>)], say: impl Fn(usize, usize) + Sync) -> Vec<Verdict> {
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let verdicts = Mutex::new(vec![Verdict::default(); jobs.len()]);
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some((subject, scenarios)) = jobs.get(number) else { return };
            let verdict = examine(subject, scenarios);
            verdicts.lock().expect("nobody panicked")[number] = verdict;
            say(done.fetch_add(1, Ordering::Relaxed) + 1, jobs.len());
        }
    };
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(work);
        }
    });
    verdicts.into_inner().expect("nobody panicked")
}

/// Writes it down.
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

/// Writes them below this folder, and takes away the pictures of the page that is there which this one does not have. What
/// else is there stays, since the folder may be anybody's.
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

/// The pictures that a page shows, by their path beside it: those that lie where this report puts its own.
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
    /// The table's lines.
    table: String,
    sections: String,
    /// What was found that nobody had told of: what breaks, and where.
    untold: BTreeMap<(Check, Fault), Vec<String>>,
    /// What was told of, and is not so.
    unfound: String,
    pictures: Files,
}

const HEAD: &str = "# The published recipes, and what breaks them

This page is written by `cargo run --release -p recipes -- report`, which runs every recipe as it was published, on a real
Redis, in every interleaving of the steps of two and of three clients. Any of them may be late before any of its steps. Of two
clients each tries twice, one may die between two steps, and time may pass twice; of three each tries once, and time may pass once. All
may die at any moment. Time passes by setting the keys' expiry, not by sleeping. The search goes by length, so every picture is a
shortest schedule, and each was run once more straight through on an empty server, with the same outcome. How to look at one:

```sh
cargo run --release -p recipes -- list
cargo run --release -p recipes -- run set-nx-px         # a few clients, step by step, on a Redis of its own
cargo run --release -p recipes -- explore timestamp-getset --getset-nil failed
```

What they cost under load is in [recipes-under-load.md](recipes-under-load.md).

`✓` holds in every schedule. `✗` breaks, and nothing else had to break before. `~` breaks only after something else has. A letter
says what has to be wrong for it: `c` clocks that differ by more than a lease, `r` a master that restarts without its data,
`j` a master whose clock jumps, `o` two clients that give the same owner.
";

const MEANING: &str = "
What the columns mean:

- **one holder**: two clients are never in the critical section while the leases of both run. A lease counts from when its
  holder began to ask for it.
- **knows its end**: whoever is still in the critical section after its lease knows that by its own clock, before another one is
  in. Even then it may be stopped before its next write, which only fencing tokens can tell.
- **free again**: when all clients have died, and the longest lease has passed, the lock can be had.
- **own only**: no step of one client frees what another one holds, or has begun to hold.
- **can release**: whoever releases before its lease has passed finds its lock.
- **nothing left**: when nobody has died and all are through, the lock can be had.
- **gets word**: nobody waits for word while nobody holds, nobody has died, and nobody is about to do anything. Most recipes don't
  wait, and ask again and again.
- **fencing**: holders get numbers, and each is higher than all before it.
";

impl Page {
    fn recipe(&mut self, row: &Row, verdicts: &[(&Row, &Variant, Verdict)]) {
        let (_, _, usual) = &verdicts[0];
        for (_, variant, verdict) in verdicts {
            self.line(&name(row, variant), verdict, false, row.waits);
        }
        let _ = writeln!(self.sections, "\n## `{}`\n\n- Takes it: {}.", row.id, row.acquire);
        let _ = writeln!(self.sections, "- Frees it: {}.", row.release);
        let known: Vec<_> = row.known.iter().map(|named| named.trouble).chain(told(row.remark)).collect();
        let known = if known.is_empty() { "nothing".to_owned() } else { known.join("; ") };
        let _ = writeln!(self.sections, "- What is told of it: {known}.");
        let _ = writeln!(self.sections, "- Instead: {}.", row.answer);
        for (_, variant, verdict) in verdicts {
            let own: Vec<_> = verdict.findings.iter().filter(|found| is_new(found, variant, usual)).collect();
            if !variant.switches.is_empty() {
                let same = if own.is_empty() {
                    "; it breaks what the usual way breaks, and nothing else"
                } else {
                    ""
                };
                let _ = writeln!(
                    self.sections,
                    "\n### With `{}`\n\n{}{same}.",
                    variant.switches,
                    looked(verdict)
                );
            } else {
                let holds = holding(verdict, row.waits);
                let _ = writeln!(self.sections, "- What holds: {holds}.\n- {}.", looked(verdict));
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
        let why = match (finding.violation.follows, finding.fault) {
            (Some(first), Fault::None) => format!("breaks after this one: {first}"),
            (Some(first), fault) => format!("breaks {fault}, after this one: {first}"),
            (None, Fault::None) => "breaks".to_owned(),
            (None, fault) => format!("breaks {fault}"),
        };
        let _ = writeln!(self.sections, "\n**{check}** {why}.\n\n![{title}]({file})");
        self.pictures.insert(file, timeline::svg(&title, &finding.violation));
    }

    /// What was told, beside what was found.
    fn compare(&mut self, row: &Row, variant: &Variant, verdict: &Verdict, usual: &Verdict) {
        let known = row.known(variant);
        for named in &known {
            if !verdict.findings.iter().any(|finding| shows(finding, named)) {
                let _ = writeln!(self.unfound, "- `{}`: {}.", name(row, variant), named.trouble);
            }
        }
        for finding in verdict.findings.iter().filter(|finding| finding.is_root()) {
            let is_told = known.iter().any(|named| shows(finding, named));
            if !is_told && is_new(finding, variant, usual) {
                let link = format!("[`{}`]({})", name(row, variant), picture_of(row, variant, finding));
                self.untold.entry((finding.check(), finding.fault)).or_default().push(link);
            }
        }
    }

    fn own(&mut self, own: Own, verdict: &Verdict) {
        let Own { id, title, waits, .. } = own;
        self.line(&format!("leasehold, {title}"), verdict, true, waits);
        let _ = writeln!(self.sections, "\n## `{id}`: leasehold's {title}\n\n{}.", looked(verdict));
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
                (Check::Fenced, true) if !is_fenced => "none".to_owned(),
                (Check::Woken, true) if !waits => "asks".to_owned(),
                (_, true) => "✓".to_owned(),
                _ => marks.join(" "),
            };
            let _ = write!(self.table, " {cell} |");
        }
        self.table.push('\n');
    }

    fn files(self) -> Files {
        let mut page = HEAD.to_owned();
        page += "\n| | one holder | knows its end | free again | own only | can release | nothing left | gets word | fencing |\n";
        page += "|---|---|---|---|---|---|---|---|---|\n";
        page += &self.table;
        page += MEANING;
        page += "\n## What was found that is not told of them\n\n";
        for ((check, fault), links) in &self.untold {
            let when = if *fault == Fault::None { String::new() } else { format!(", {fault}") };
            let _ = writeln!(page, "- *{check}* breaks{when}: {}.", links.join(", "));
        }
        page += "\n## What is told of them and was not found\n\n";
        page += if self.unfound.is_empty() {
            "Nothing: every trouble that a schedule can show was found.\n"
        } else {
            &self.unfound
        };
        page += &self.sections;
        let mut files = self.pictures;
        files.insert(PAGE.to_owned(), page);
        files
    }
}

fn name(row: &Row, variant: &Variant) -> String {
    format!("{} {}", row.id, variant.switches).trim_end().to_owned()
}

fn told(remark: &str) -> Option<&str> {
    Some(remark).filter(|remark| !remark.is_empty())
}

/// Whether a variant's finding is not the usual way's as well.
fn is_new(finding: &Finding, variant: &Variant, usual: &Verdict) -> bool {
    variant.switches.is_empty() || !usual.findings.iter().any(|known| known.brief() == finding.brief())
}

fn shows(finding: &Finding, named: &Named) -> bool {
    finding.check() == named.check && finding.fault == named.fault
}

fn mark(finding: &Finding) -> String {
    let sign = if finding.is_root() { "✗" } else { "~" };
    let letter = match finding.fault {
        Fault::None => "",
        Fault::ClocksDiffer => "c",
        Fault::MasterRestarts => "r",
        Fault::MasterJumps => "j",
        Fault::SameOwner => "o",
    };
    format!("{sign}{letter}")
}

fn holding(verdict: &Verdict, waits: bool) -> String {
    let applies = |check: &Check| *check != Check::Fenced && (waits || *check != Check::Woken);
    let holds = Check::ALL.into_iter().filter(applies).filter(|check| verdict.of(*check).next().is_none());
    holds.map(|check| check.to_string()).collect::<Vec<_>>().join("; ")
}

fn looked(verdict: &Verdict) -> String {
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
    fn pictures_of_the_page_before_are_taken_away_and_nothing_else_is() {
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
    fn only_pictures_in_the_report_s_own_folder_are_taken_for_its_own() {
        let page = "![a](recipes/a.svg) ![b](recipes/../b.svg) [c](recipes/c.md) ![d](other/d.svg)";
        assert_eq!(pictures_of(page).collect::<Vec<_>>(), ["recipes/a.svg"]);
    }
}
