//! The exploration finds every known problem, in the recipes that have it and in no other.

use std::path::Path;
use std::sync::LazyLock;

use recipes::explorer::Check;
use recipes::recipes::leasehold::{OWN, publishing_to_wrong_channel, releasing_any_holder, repeating_tokens};
use recipes::recipes::{ROWS, Row, Variant};
use recipes::report::{self, Verdicts, explore_all};
use recipes::verdict::{Finding, Verdict, explore_scenarios};

/// All tests share one exploration.
static VERDICTS: LazyLock<Verdicts> = LazyLock::new(|| explore_all(|_, _| {}));

/// The verdict of a recipe's variant.
fn verdict(id: &str, switches: &str) -> &'static Verdict {
    let is_it = |row: &Row, variant: &Variant| row.id == id && variant.switches == switches;
    let found = VERDICTS.published.iter().find(|(row, variant, _)| is_it(row, variant));
    &found.unwrap_or_else(|| panic!("there is no {id} {switches}")).2
}

/// What breaks: the check, the fault that it needs, and `~` for a consequence of another violation.
const EXPECTED: &[(&str, &[&str])] = &[
    ("exists-set", &["OneHolder", "FreeAgain", "~FreesOnlyOwn", "~CanRelease"]),
    ("setnx", &["FreeAgain"]),
    ("setnx-expire", &["~OneHolder", "DetectsExpiry", "FreeAgain", "FreesOnlyOwn", "~CanRelease"]),
    (
        "timestamp-del",
        &["~OneHolder", "DetectsExpiry", "FreeAgain ClocksDiffer", "FreesOnlyOwn", "~CanRelease"],
    ),
    (
        "timestamp-getset",
        &[
            "~OneHolder",
            "OneHolder ClocksDiffer",
            "DetectsExpiry",
            "FreeAgain ClocksDiffer",
            "FreesOnlyOwn",
            "CanRelease",
            "NoStaleLock",
        ],
    ),
    (
        "timestamp-getset-expire",
        &[
            "~OneHolder",
            "OneHolder ClocksDiffer",
            "DetectsExpiry",
            "FreeAgain ClocksDiffer",
            "FreesOnlyOwn",
            "~CanRelease",
            "CanRelease ClocksDiffer",
        ],
    ),
    ("set-nx-ex", &["~OneHolder", "DetectsExpiry", "FreesOnlyOwn", "~CanRelease"]),
    ("set-nx-px-get-del", &["~OneHolder", "DetectsExpiry", "FreesOnlyOwn", "~CanRelease"]),
    ("lua-setnx-expire", &["~OneHolder", "DetectsExpiry", "FreesOnlyOwn", "~CanRelease"]),
    ("lua-setnx-token", &["DetectsExpiry"]),
    ("set-nx-px", &["DetectsExpiry"]),
    (
        "reentrant-hash",
        &["OneHolder SameOwner", "DetectsExpiry", "FreesOnlyOwn SameOwner", "CanRelease SameOwner"],
    ),
    ("local-count", &["DetectsExpiry"]),
    ("hash-pubsub", &["DetectsExpiry"]),
    (
        "redlock",
        &[
            "OneHolder MasterRestarts",
            "OneHolder MasterJumps",
            "FreesOnlyOwn MasterRestarts",
            "FreesOnlyOwn MasterJumps",
        ],
    ),
    ("rw-two-keys", &["OneHolder", "DetectsExpiry", "FreesOnlyOwn", "CanRelease"]),
    ("rw-hash", &["~OneHolder", "OneHolder ClocksDiffer", "DetectsExpiry", "FreesOnlyOwn", "CanRelease"]),
];

#[test]
fn each_recipe_breaks_exactly_the_expected_checks() {
    for (id, expected) in EXPECTED {
        let found: Vec<_> = verdict(id, "").findings.iter().map(Finding::brief).collect();
        assert_eq!(found, *expected, "{id}");
    }
}

#[test]
fn expectations_cover_every_recipe() {
    let ids: Vec<_> = EXPECTED.iter().map(|(id, _)| *id).collect();
    let rows: Vec<_> = ROWS.iter().map(|row| row.id).collect();
    assert_eq!(ids, rows);
}

#[test]
fn every_known_problem_is_found_and_every_violation_is_confirmed_without_restored_state() {
    for (row, variant, verdict) in &VERDICTS.published {
        for known in row.known(variant) {
            let shows = |found: &Finding| found.check() == known.check && found.fault == known.fault;
            assert!(verdict.findings.iter().any(shows), "{} {}: {}", row.id, variant.switches, known.problem);
        }
        for finding in &verdict.findings {
            assert!(finding.violation.is_confirmed, "{} {}: {finding:?}", row.id, variant.switches);
        }
    }
}

#[test]
fn getset_nil_taken_for_failure_leaves_a_lock_without_a_holder() {
    let is_broken =
        |switches| verdict("timestamp-getset-expire", switches).of(Check::NoStaleLock).any(Finding::is_root);
    assert!(is_broken("--getset-nil failed"));
    assert!(!is_broken(""));
}

#[test]
fn every_check_holds_for_leasehold_s_own_locks() {
    for (own, verdict) in &VERDICTS.own {
        assert!(verdict.findings.is_empty(), "{}: {:#?}", own.id, verdict.findings);
        assert_eq!(verdict.bound, None, "{} was not explored completely", own.id);
    }
}

#[test]
fn a_leasehold_release_without_comparison_is_caught() {
    for own in OWN.iter().filter(|own| own.id == "leasehold-try" || own.id == "leasehold-mutex") {
        let verdict = explore_scenarios(&own.subject(releasing_any_holder), &own.scenarios());
        assert!(verdict.of(Check::FreesOnlyOwn).any(Finding::is_root), "{}", own.id);
    }
}

#[test]
fn a_leasehold_grant_published_to_the_wrong_channel_is_caught() {
    let own = OWN[0];
    let verdict = explore_scenarios(&own.subject(publishing_to_wrong_channel), &own.scenarios());
    assert!(verdict.of(Check::WaitersWoken).any(Finding::is_root));
}

#[test]
fn a_leasehold_token_that_does_not_increase_is_caught() {
    for own in OWN.iter().filter(|own| own.id == "leasehold-try" || own.id == "leasehold-mutex") {
        let verdict = explore_scenarios(&own.subject(repeating_tokens), &own.scenarios());
        assert!(verdict.of(Check::TokensIncrease).any(Finding::is_root), "{}", own.id);
    }
}

#[test]
fn the_committed_report_equals_a_fresh_one() {
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
