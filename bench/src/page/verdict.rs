//! Where leasehold is not the best: found by comparing, not by choosing.

use crate::compare::catalog::{self, Promises, Row};
use crate::compare::results::{Cell, Results, RowResult};
use crate::compare::store::Kind;

use super::columns::{Better, Column, of};

/// So far behind the first of its class leasehold may be.
const CLASS: f64 = 1.1;
/// So far from the lower bound.
const BOUND: f64 = 1.3;
/// The promise that costs something also where nobody waits.
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
    /// Who is better, and the figure.
    pub(super) other: String,
    /// How many times worse leasehold is.
    pub(super) ratio: f64,
    /// What leasehold's row promises there, and the other does not.
    pub(super) leaves_out: Vec<&'static str>,
}

/// What leasehold is behind of.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Verdict {
    /// The best of those that do the same: they renew, whoever waits is told, and the first to come is the first served.
    pub(super) class: Vec<Behind>,
    /// The best of all others, whatever they leave out.
    pub(super) others: Vec<Behind>,
    /// The lower bound.
    pub(super) bound: Vec<Behind>,
}

/// Compares everywhere.
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
        // On other stores they pay for other promises.
        if row.row == own.0.row || row.is_broken() || Kind::of(known.program).is_some() {
            continue;
        }
        if known.program == "bounds" {
            if column.is_chief {
                note(&mut verdict.bound, cell, column, own, (row, figure), BOUND);
            }
            continue;
        }
        let does_the_same = is_of_class(known.promises, cell);
        let place = if does_the_same { &mut class } else { &mut others };
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

/// Whether it does what leasehold does, as far as the cell asks for it. To be first come, first served costs nothing where
/// nobody waits; of readers and writers, and of semaphores, there is only one other; and over a quorum no order is promised.
fn is_of_class(promises: Promises, cell: &Cell) -> bool {
    match cell.scenario.as_str() {
        "g" | "h" => promises.is_told,
        "i" => promises.renews && (promises.is_told || !cell.is_contended),
        _ => promises.is_told && promises.renews && (promises.is_fair || !cell.is_contended),
    }
}

/// A row with its figure.
type Rival<'a> = (&'a RowResult, f64);

fn promises(row: &RowResult) -> Promises {
    known(row).map(|row| row.promises).unwrap_or_default()
}

/// What one promises and the other does not, in the words of the page.
fn leaves_out(own: Promises, other: Promises) -> Vec<&'static str> {
    let promises = [
        ("renewal", own.renews, other.renews),
        ("being told", own.is_told, other.is_told),
        ("a queue", own.is_fair, other.is_fair),
        (TOKENS, own.is_fenced, other.is_fenced),
    ];
    promises.into_iter().filter(|(_, own, other)| *own && !other).map(|(what, ..)| what).collect()
}

fn note(list: &mut Vec<Behind>, cell: &Cell, column: Column, own: Rival<'_>, rival: Rival<'_>, limit: f64) {
    let (figure, best) = (own.1, rival.1);
    let ratio = if column.better == Better::Low { figure / best } else { best / figure };
    // Nothing lost against nothing lost is neither better nor worse.
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

/// What the catalog knows of it.
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
    fn whoever_is_a_tenth_better_and_does_the_same_is_named() {
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
        assert_eq!(found.others[0].leaves_out, ["renewal", "being told", "a queue", TOKENS]);
    }

    #[test]
    fn over_a_quorum_whoever_polls_is_of_the_class_only_where_nobody_waits() {
        let behind = |is_contended| {
            let rows = vec![row("leasehold redlock:", 100.0, 0.0), row("rslock", 120.0, 0.0)];
            let cell = Cell { scenario: "i".into(), is_contended, rows, ..Cell::default() };
            let found = verdict(&Results { cells: vec![cell], ..Results::default() });
            (found.class.len(), found.others.len())
        };
        assert_eq!([behind(false), behind(true)], [(1, 0), (0, 1)]);
    }

    #[test]
    fn nobody_is_behind_a_lock_that_is_broken_or_hardly_better() {
        let rows = vec![
            row("leasehold", 100.0, 0.0),
            row("Redisson RFairLock", 900.0, 1.0),
            row("redsync", 109.0, 0.0),
        ];
        assert_eq!(of_rows(rows), Verdict::default());
    }
}
