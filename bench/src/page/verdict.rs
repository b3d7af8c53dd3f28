//! Finds every figure in which leasehold is not the best.

use crate::compare::catalog::{self, Promises, Row};
use crate::compare::results::{Cell, Results, RowResult};
use crate::compare::store::Kind;

use super::columns::{Better, Column, of};

/// Tolerated ratio to the best lock with the same features.
const CLASS: f64 = 1.1;
/// Tolerated ratio to the lower bound.
const BOUND: f64 = 1.3;
/// The feature that costs time even without contention.
pub(super) const TOKENS: &str = "fencing tokens";

/// One column of one cell in which leasehold is behind.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Behind {
    /// The scenario's letter, and the cell.
    pub(super) place: String,
    /// Which column.
    pub(super) column: &'static str,
    /// leasehold's figure.
    pub(super) own: String,
    /// The better row and its figure.
    pub(super) other: String,
    /// By which factor leasehold is worse.
    pub(super) ratio: f64,
    /// Features of leasehold's row that the other row lacks.
    pub(super) leaves_out: Vec<&'static str>,
}

/// All figures in which leasehold is behind.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Verdict {
    /// Against the best lock with the same features: renewal, push, FIFO.
    pub(super) class: Vec<Behind>,
    /// Against the best of all other locks.
    pub(super) others: Vec<Behind>,
    /// Against the lower bound.
    pub(super) bound: Vec<Behind>,
}

/// Compares every column of every cell.
#[must_use]
pub(super) fn verdict(results: &Results) -> Verdict {
    let mut verdict = Verdict::default();
    for cell in &results.cells {
        for column in of(&cell.scenario).into_iter().filter(|column| column.better != Better::Neither) {
            judge(&mut verdict, cell, column);
        }
    }
    verdict
}

fn judge(verdict: &mut Verdict, cell: &Cell, column: Column) {
    let is_own = |row: &&RowResult| known(row).is_some_and(|known| known.program == "leasehold");
    let own = cell.rows.iter().filter(is_own).find_map(|row| Some((row, row.median(column.figure)?)));
    let Some(own) = own else { return };
    let (mut class, mut others): (Option<Rival<'_>>, Option<Rival<'_>>) = (None, None);
    for row in &cell.rows {
        let (Some(known), Some(figure)) = (known(row), row.median(column.figure)) else { continue };
        // Locks on other stores pay for other guarantees.
        if row.row == own.0.row || [catalog::PYTHON.name, catalog::NODE.name].contains(&row.row.as_str()) {
            continue;
        }
        if row.is_broken() || row.is_unused() || Kind::of(known.program).is_some() {
            continue;
        }
        if known.program == "bounds" {
            if column.is_chief {
                note(&mut verdict.bound, cell, column, own, (row, figure), BOUND);
            }
            continue;
        }
        let has_same_features = is_of_class(known.promises, cell);
        let place = if has_same_features { &mut class } else { &mut others };
        if place.is_none_or(|(_, best)| is_better(column, figure, best)) {
            *place = Some((row, figure));
        }
    }
    for (rival, list) in [(class, &mut verdict.class), (others, &mut verdict.others)] {
        if let Some(rival) = rival {
            note(list, cell, column, own, rival, CLASS);
        }
    }
}

/// Whether the lock has the same features as leasehold, as far as they matter in this cell. FIFO order costs nothing without
/// contention, only one other library has read-write locks and semaphores, and a quorum promises no order.
fn is_of_class(promises: Promises, cell: &Cell) -> bool {
    match cell.scenario.as_str() {
        "g" | "h" => promises.has_push,
        "i" => promises.renews && (promises.has_push || !cell.is_contended),
        _ => promises.has_push && promises.renews && (promises.is_fifo || !cell.is_contended),
    }
}

/// A row with its figure.
type Rival<'a> = (&'a RowResult, f64);

fn promises(row: &RowResult) -> Promises {
    known(row).map(|row| row.promises).unwrap_or_default()
}

/// The features that the first has and the second lacks, as the page names them.
fn leaves_out(own: Promises, other: Promises) -> Vec<&'static str> {
    let promises = [
        ("renewal", own.renews, other.renews),
        ("push", own.has_push, other.has_push),
        ("FIFO", own.is_fifo, other.is_fifo),
        (TOKENS, own.is_fenced, other.is_fenced),
    ];
    promises.into_iter().filter(|(_, own, other)| *own && !other).map(|(what, ..)| what).collect()
}

fn note(list: &mut Vec<Behind>, cell: &Cell, column: Column, own: Rival<'_>, rival: Rival<'_>, limit: f64) {
    let (figure, best) = (own.1, rival.1);
    let ratio = if column.better == Better::Low { figure / best } else { best / figure };
    // Zero against zero has no ratio.
    if ratio.is_nan() || ratio <= limit {
        return;
    }
    list.push(Behind {
        place: format!("({}) {}", cell.scenario, cell.title),
        column: column.title,
        own: column.unit.show(figure),
        other: format!("{}: {}", rival.0.row, column.unit.show(best)),
        ratio,
        leaves_out: leaves_out(promises(own.0), promises(rival.0)),
    });
}

fn is_better(column: Column, figure: f64, best: f64) -> bool {
    if column.better == Better::Low { figure < best } else { figure > best }
}

/// Its entry in the catalog.
pub(super) fn known(row: &RowResult) -> Option<Row> {
    catalog::all().into_iter().chain(catalog::QUORUM).find(|known| known.name == row.row)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::results::Figures;

    fn row(name: &str, rate: f64, overlaps: f64) -> RowResult {
        let mut row = RowResult::of(name);
        row.push(Figures::from([("rate".to_owned(), rate), ("overlaps".to_owned(), overlaps)]));
        row
    }

    fn of_rows(rows: Vec<RowResult>) -> Verdict {
        let cell = Cell { scenario: "c".into(), is_contended: true, rows, ..Cell::default() };
        verdict(&Results { cells: vec![cell], ..Results::default() })
    }

    #[test]
    fn the_best_row_of_each_class_beyond_the_tolerance_is_listed() {
        let found = of_rows(vec![
            row("leasehold", 100.0, 0.0),
            row("Redisson RFairLock", 120.0, 0.0),
            row("Redisson RLock", 130.0, 0.0),
            row("redsync", 300.0, 0.0),
            row("PUBLISH to the next", 131.0, 0.0),
        ]);
        let named = |list: &[Behind]| list.iter().map(|one| one.other.clone()).collect::<Vec<_>>();
        assert_eq!(named(&found.class), ["Redisson RFairLock: 120"]);
        assert_eq!(named(&found.others), ["redsync: 300"]);
        assert_eq!(named(&found.bound), ["PUBLISH to the next: 131"]);
        assert_eq!(found.class[0].leaves_out, [TOKENS]);
        assert_eq!(found.others[0].leaves_out, ["renewal", "push", "FIFO", TOKENS]);
    }

    #[test]
    fn over_a_quorum_a_polling_lock_has_the_same_features_only_without_contention() {
        let behind = |is_contended| {
            let rows = vec![row("leasehold redlock:", 100.0, 0.0), row("rslock", 120.0, 0.0)];
            let cell = Cell { scenario: "i".into(), is_contended, rows, ..Cell::default() };
            let found = verdict(&Results { cells: vec![cell], ..Results::default() });
            (found.class.len(), found.others.len())
        };
        assert_eq!([behind(false), behind(true)], [(1, 0), (0, 1)]);
    }

    #[test]
    fn broken_locks_and_small_differences_are_not_listed() {
        let rows = vec![
            row("leasehold", 100.0, 0.0),
            row("Redisson RFairLock", 900.0, 1.0),
            row("redsync", 109.0, 0.0),
        ];
        assert_eq!(of_rows(rows), Verdict::default());
    }

    #[test]
    fn the_cost_of_a_lock_that_was_not_acquired_is_not_listed() {
        let with_cost = |name: &str, rate: f64, bytes: f64| {
            let mut row = RowResult::of(name);
            row.push(Figures::from([("rate".to_owned(), rate), ("bytes".to_owned(), bytes)]));
            row
        };
        let class = |rate| {
            of_rows(vec![with_cost("leasehold", 100.0, 700.0), with_cost("Redisson RFairLock", rate, 10.0)])
                .class
        };
        assert_eq!((class(0.0).len(), class(1.0).len()), (0, 1));
    }
}
