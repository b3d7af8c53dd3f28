//! Several runs of each lock as a table, as a comparison, and as a part of a page.

use std::fmt::Write as _;
use std::time::Duration;

use super::Contender;
use super::measure::Run;
use crate::outcome::Outcome;

/// In a page, the lines that a measurement replaces.
const BEGIN: &str = "<!-- flash-sale: written by `flash-sale --page` -->\n";
const END: &str = "<!-- end of flash-sale -->\n";

/// All runs of one lock.
#[derive(Clone, Debug)]
pub struct Row {
    /// The lock.
    pub contender: Contender,
    /// Number of service processes.
    pub services: usize,
    /// At least one run, in the order of the rounds. Runs of the same round follow each other closely.
    pub runs: Vec<Run>,
}

impl Row {
    /// The run with the median rate.
    #[must_use]
    pub fn median(&self) -> &Run {
        let mut runs: Vec<_> = self.runs.iter().collect();
        runs.sort_by(|one, other| one.result.rate().total_cmp(&other.result.rate()));
        runs[runs.len() / 2]
    }

    /// Lowest and highest rate.
    #[must_use]
    pub fn range(&self) -> (f64, f64) {
        range(self.runs.iter().map(|run| run.result.rate()))
    }
}

fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, 0.0), |(low, high), value| (low.min(value), high.max(value)))
}

/// The table of all runs, the highest rate first. A line has the latencies of the run with the median rate.
#[must_use]
pub fn table(rows: &[Row]) -> String {
    let mut out = String::from(
        "| lock and policy | services | driver | runs | sales/s, median | lowest to highest | failed | p50 | p90 | p99 | max | commands/sale | oversold |\n",
    );
    out += "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n";
    for row in sorted(rows) {
        let Row { contender, services, runs } = row;
        let Run { result, commands_per_sale, .. } = row.median();
        let (low, high) = row.range();
        let (driver, rate, count) = (result.driver, result.rate(), runs.len());
        let failed: usize = runs.iter().map(|run| run.result.failed).sum();
        let oversold: i64 = runs.iter().map(|run| run.oversold).sum();
        let [p50, p90, p99, max] = [500, 900, 990, 1_000].map(|part| span(result.quantile(part)));
        let _ = writeln!(
            out,
            "| {contender} | {services} | {driver} | {count} | {rate:.0} | {low:.0} to {high:.0} | {failed} | {p50} | {p90} | {p99} | {max} | {commands_per_sale:.1} | {oversold} |"
        );
    }
    out
}

/// By number of services, then the highest rate first.
pub(super) fn sorted(rows: &[Row]) -> Vec<&Row> {
    let mut rows: Vec<_> = rows.iter().collect();
    rows.sort_by(|one, other| {
        let rate = |row: &Row| row.median().result.rate();
        one.services.cmp(&other.services).then(rate(other).total_cmp(&rate(one)))
    });
    rows
}

/// leasehold against the best published policy of the same round, for each number of services. Rounds are compared one by one,
/// since load from other programs affects all runs of a round alike.
#[must_use]
pub fn comparison(rows: &[Row]) -> String {
    let mut out = String::new();
    for own in rows.iter().filter(|row| row.contender == Contender::Leasehold) {
        let others: Vec<_> = rows
            .iter()
            .filter(|row| row.services == own.services && matches!(row.contender, Contender::Recipe { .. }))
            .collect();
        let ratios: Vec<_> =
            own.runs.iter().enumerate().filter_map(|(round, run)| ratios(run, &others, round)).collect();
        if ratios.is_empty() {
            continue;
        }
        let (low, high) = range(ratios.iter().map(|(sales, _)| *sales));
        let (least, most) = range(ratios.iter().map(|(_, p99)| *p99));
        let (services, driver) = (own.services, own.runs[0].result.driver);
        let plural = if services == 1 { "service" } else { "services" };
        let rounds = if ratios.len() == 1 { "round" } else { "rounds" };
        let _ = writeln!(
            out,
            "- {services} {plural}, driver `{driver}`, {} {rounds}: leasehold sells {} times as much as the best published policy of the same round, with a p99 of {} of the best.",
            ratios.len(),
            spread(low, high, ""),
            spread(most, least, "1/"),
        );
    }
    out
}

/// The ratio of the rates, and that of the 99th percentiles, in one round.
fn ratios(own: &Run, others: &[&Row], round: usize) -> Option<(f64, f64)> {
    let runs = || others.iter().filter_map(|row| row.runs.get(round));
    let rate = runs().map(|run| run.result.rate()).fold(0.0, f64::max);
    let p99 = runs().map(|run| run.result.quantile(990)).min()?;
    let own_p99 = own.result.quantile(990).as_secs_f64();
    (rate > 0.0 && own_p99 > 0.0).then(|| (own.result.rate() / rate, p99.as_secs_f64() / own_p99))
}

fn spread(from: f64, to: f64, prefix: &str) -> String {
    if (from - to).abs() < 0.05 {
        format!("{prefix}{from:.1}")
    } else {
        format!("{prefix}{from:.1} to {prefix}{to:.1}")
    }
}

/// The page with the comparison and the table in place of those that it had.
///
/// # Errors
///
/// The page lacks one of the two marks.
pub fn replace_in(page: &str, rows: &[Row]) -> Outcome<String> {
    let marks = page.split_once(BEGIN).and_then(|(head, rest)| Some((head, rest.split_once(END)?.1)));
    let (head, tail) = marks.ok_or_else(|| format!("the page needs the lines\n{BEGIN}{END}"))?;
    Ok(format!("{head}{BEGIN}\n{}\n{}\n{END}{tail}", comparison(rows), table(rows)))
}

/// In milliseconds, or seconds.
pub(super) fn span(span: Duration) -> String {
    let ms = span.as_secs_f64() * 1_000.0;
    match ms {
        ..10.0 => format!("{ms:.1} ms"),
        ..1_000.0 => format!("{ms:.0} ms"),
        _ => format!("{:.1} s", ms / 1_000.0),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::Retry;
    use super::super::driver::LoadResult;
    use super::*;

    /// Runs that sell 1,000 in so many seconds each.
    pub(in super::super) fn row(contender: Contender, seconds: &[f64]) -> Row {
        let run = |seconds: &f64| {
            let took = Duration::from_secs_f64(*seconds);
            let result = LoadResult { latencies: vec![took; 1_000], failed: 0, took, driver: "built-in" };
            Run { result, commands_per_sale: 2.0, oversold: 0 }
        };
        Row { contender, services: 1, runs: seconds.iter().map(run).collect() }
    }

    fn rows() -> [Row; 3] {
        let recipe = |retry| Contender::Recipe { id: "set-nx-px", retry };
        [
            row(recipe(Retry::Sleep2s), &[8.0, 20.0]),
            row(recipe(Retry::Yield), &[4.0, 10.0]),
            row(Contender::Leasehold, &[0.5, 0.5]),
        ]
    }

    #[test]
    fn comparison_has_the_range_of_the_ratios_within_a_round_and_names_the_driver() {
        let line = comparison(&rows());
        assert!(
            line.starts_with("- 1 service, driver `built-in`, 2 rounds: leasehold sells 8.0 to 20.0 times"),
            "{line}"
        );
        assert!(line.contains("p99 of 1/20.0 to 1/8.0"), "{line}");
    }

    #[test]
    fn table_is_sorted_by_rate_and_has_the_range_of_the_rates() {
        let table = table(&rows());
        let names: Vec<_> = table.lines().skip(2).filter_map(|line| line.split('|').nth(1)).collect();
        assert_eq!(names, [" leasehold ", " set-nx-px, yield ", " set-nx-px, sleep2s "]);
        assert!(table.contains("| 2 | 250 | 100 to 250 |"), "{table}");
    }

    #[test]
    fn a_page_keeps_everything_outside_of_the_marks() {
        let page = format!("before\n{BEGIN}stale figures\n{END}after\n");
        let new = replace_in(&page, &rows()).unwrap();
        assert!(new.starts_with("before\n") && new.ends_with("after\n") && !new.contains("stale"));
        assert_eq!(replace_in(&new, &rows()).unwrap(), new);
        assert!(replace_in("no marks", &rows()).is_err());
    }
}
