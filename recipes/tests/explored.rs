//! Each trouble is found in the recipes that have it, and in no other.

use std::path::Path;
use std::sync::LazyLock;

use recipes::explorer::Check;
use recipes::recipes::leasehold::{OWN, releasing_anything, repeating_tokens, telling_nobody};
use recipes::recipes::{ROWS, Row, Variant};
use recipes::report::{self, Verdicts, examine_all};
use recipes::verdict::{Finding, Verdict, examine};

/// All tests look at the same exploration.
static VERDICTS: LazyLock<Verdicts> = LazyLock::new(|| examine_all(|_, _| {}));

/// Of a recipe in its usual way, or with these switches.
fn verdict(id: &str, switches: &str) -> &'static Verdict {
    let is_it = |row: &Row, variant: &Variant| row.id == id && variant.switches == switches;
    let found = VERDICTS.published.iter().find(|(row, variant, _)| is_it(row, variant));
    &found.unwrap_or_else(|| panic!("there is no {id} {switches}")).2
}

/// What breaks: a check's name, what has to be wrong for it, and `~` where it follows from another one.
const EXPECTED: &[(&str, &[&str])] = &[
    ("exists-set", &["OneHolder", "FreeAgain", "~FreesOnlyOwn", "~CanRelease"]),
    ("setnx", &["FreeAgain"]),
    ("setnx-expire", &["~OneHolder", "KnowsItsEnd", "FreeAgain", "FreesOnlyOwn", "~CanRelease"]),
    (
        "timestamp-del",
        &["~OneHolder", "KnowsItsEnd", "FreeAgain ClocksDiffer", "FreesOnlyOwn", "~CanRelease"],
    ),
    (
        "timestamp-getset",
        &[
            "~OneHolder",
            "OneHolder ClocksDiffer",
            "KnowsItsEnd",
            "FreeAgain ClocksDiffer",
            "FreesOnlyOwn",
            "CanRelease",
            "NothingLeft",
        ],
    ),
    (
        "timestamp-getset-expire",
        &[
            "~OneHolder",
            "OneHolder ClocksDiffer",
            "KnowsItsEnd",
            "FreeAgain ClocksDiffer",
            "FreesOnlyOwn",
            "~CanRelease",
            "CanRelease ClocksDiffer",
        ],
    ),
    ("lua-setnx-expire", &["~OneHolder", "KnowsItsEnd", "FreesOnlyOwn", "~CanRelease"]),
    ("lua-setnx-token", &["KnowsItsEnd"]),
    ("set-nx-px", &["KnowsItsEnd"]),
    (
        "reentrant-hash",
        &["OneHolder SameOwner", "KnowsItsEnd", "FreesOnlyOwn SameOwner", "CanRelease SameOwner"],
    ),
    ("local-count", &["KnowsItsEnd"]),
    ("hash-pubsub", &["KnowsItsEnd"]),
    (
        "redlock",
        &[
            "OneHolder MasterRestarts",
            "OneHolder MasterJumps",
            "FreesOnlyOwn MasterRestarts",
            "FreesOnlyOwn MasterJumps",
        ],
    ),
    ("rw-two-keys", &["OneHolder", "KnowsItsEnd", "FreesOnlyOwn", "CanRelease"]),
    ("rw-hash", &["~OneHolder", "OneHolder ClocksDiffer", "KnowsItsEnd", "FreesOnlyOwn", "CanRelease"]),
];

#[test]
fn each_recipe_breaks_what_it_is_known_to_break_and_nothing_else() {
    for (id, expected) in EXPECTED {
        let found: Vec<_> = verdict(id, "").findings.iter().map(Finding::brief).collect();
        assert_eq!(found, *expected, "{id}");
    }
}

#[test]
fn the_table_of_the_test_has_every_recipe() {
    let ids: Vec<_> = EXPECTED.iter().map(|(id, _)| *id).collect();
    let rows: Vec<_> = ROWS.iter().map(|row| row.id).collect();
    assert_eq!(ids, rows);
}

#[test]
fn every_trouble_that_is_told_is_found_and_confirmed_on_servers_that_nobody_puts_back() {
    for (row, variant, verdict) in &VERDICTS.published {
        for named in row.known(variant) {
            let shows = |found: &Finding| found.check() == named.check && found.fault == named.fault;
            assert!(verdict.findings.iter().any(shows), "{} {}: {}", row.id, variant.switches, named.trouble);
        }
        for finding in &verdict.findings {
            assert!(finding.violation.is_confirmed, "{} {}: {finding:?}", row.id, variant.switches);
        }
    }
}

#[test]
fn a_getset_that_finds_nothing_and_is_taken_for_failure_locks_everybody_out() {
    let is_broken =
        |switches| verdict("timestamp-getset-expire", switches).of(Check::NothingLeft).any(Finding::is_root);
    assert!(is_broken("--getset-nil failed"));
    assert!(!is_broken(""));
}

#[test]
fn nothing_breaks_leasehold_s_own_locks() {
    for (own, verdict) in &VERDICTS.own {
        assert!(verdict.findings.is_empty(), "{}: {:#?}", own.id, verdict.findings);
        assert_eq!(verdict.bound, None, "{} was not looked at as a whole", own.id);
    }
}

#[test]
fn a_release_of_leasehold_s_that_does_not_compare_is_caught() {
    for own in OWN.iter().filter(|own| own.id == "leasehold-try" || own.id == "leasehold-mutex") {
        let verdict = examine(&own.subject(releasing_anything), &own.scenarios());
        assert!(verdict.of(Check::FreesOnlyOwn).any(Finding::is_root), "{}", own.id);
    }
}

#[test]
fn a_grant_of_leasehold_s_that_is_told_to_nobody_is_caught() {
    let own = OWN[0];
    let verdict = examine(&own.subject(telling_nobody), &own.scenarios());
    assert!(verdict.of(Check::Woken).any(Finding::is_root));
}

#[test]
fn a_token_of_leasehold_s_that_does_not_rise_is_caught() {
    for own in OWN.iter().filter(|own| own.id == "leasehold-try" || own.id == "leasehold-mutex") {
        let verdict = examine(&own.subject(repeating_tokens), &own.scenarios());
        assert!(verdict.of(Check::Fenced).any(Finding::is_root), "{}", own.id);
    }
}

#[test]
fn the_committed_report_is_what_the_explorer_finds() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let fresh = report::files(&VERDICTS);
    let folder = tempfile::tempdir().unwrap();
    report::write(&fresh, folder.path()).unwrap();
    let names = |folder: &Path| {
        let listed = std::fs::read_dir(folder.join("recipes")).unwrap();
        let mut names: Vec<_> = listed.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let stale = "docs/recipes.md is stale: cargo run --release -p recipes -- report";
    assert_eq!(names(&docs), names(folder.path()), "{stale}");
    for (path, text) in &fresh {
        assert!(
            std::fs::read_to_string(docs.join(path)).is_ok_and(|committed| committed == *text),
            "{path}: {stale}"
        );
    }
}
