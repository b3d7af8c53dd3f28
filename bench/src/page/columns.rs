//! The columns of each scenario's tables.

use crate::{grouped, show};

/// Which direction is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Better {
    /// Lower.
    Low,
    /// Higher.
    High,
    /// Neither: it only describes the row.
    Neither,
}

/// The unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// Microseconds.
    Time,
    /// Seconds.
    Seconds,
    /// Per second.
    Rate,
    /// A number with this many decimals.
    Number(usize),
}

impl Unit {
    /// The figure as text.
    #[must_use]
    pub(super) fn show(self, value: f64) -> String {
        match self {
            Self::Time => show(value / 1e6),
            Self::Seconds => show(value),
            Self::Rate | Self::Number(0) => grouped(value),
            Self::Number(decimals) => format!("{value:.decimals$}"),
        }
    }
}

/// One column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    /// The figure, as the results name it.
    pub(super) figure: &'static str,
    /// Its heading.
    pub(super) title: &'static str,
    /// Its unit.
    pub(super) unit: Unit,
    /// Which direction is better.
    pub(super) better: Better,
    /// Whether it has a spread and a ratio to the lower bound.
    pub(super) is_chief: bool,
}

const fn column(figure: &'static str, title: &'static str, unit: Unit, better: Better) -> Column {
    Column { figure, title, unit, better, is_chief: false }
}

const fn chief(column: Column) -> Column {
    Column { is_chief: true, ..column }
}

/// Under contention a low median may only mean that other clients wait longer.
const fn neutral(column: Column) -> Column {
    Column { better: Better::Neither, ..column }
}

const RATE: Column = column("rate", "acquisitions/s", Unit::Rate, Better::High);
const PAIR: Column = column("pair_p50", "lock + release p50", Unit::Time, Better::Low);
const PAIR_P99: Column = column("pair_p99", "p99", Unit::Time, Better::Low);
const HANDOFF: Column = column("handoff_p50", "hand-off p50", Unit::Time, Better::Low);
const HANDOFF_P99: Column = column("handoff_p99", "p99", Unit::Time, Better::Low);
const HANDOFF_MAX: Column = column("handoff_max", "max", Unit::Time, Better::Neither);
const LONGEST: Column = column("wait_max", "longest wait", Unit::Time, Better::Low);
const JAIN: Column = column("jain", "Jain", Unit::Number(3), Better::High);
const LEAST: Column = column("least", "fewest acquisitions", Unit::Number(0), Better::Neither);
const MOST: Column = column("most", "most acquisitions", Unit::Number(0), Better::Neither);
const SENT: Column = column("sent", "commands", Unit::Number(1), Better::Low);
const BYTES: Column = column("bytes", "bytes", Unit::Number(0), Better::Low);
const SERVER: Column = column("server_us", "server's CPU", Unit::Time, Better::Low);
const CLIENT: Column = column("client_us", "clients' CPU", Unit::Time, Better::Neither);

/// The columns of a scenario, by its letter.
#[must_use]
pub(super) fn of(scenario: &str) -> Vec<Column> {
    match scenario {
        "a" => vec![chief(PAIR), PAIR_P99, RATE, SENT, BYTES, SERVER, CLIENT],
        "b" => vec![chief(RATE), PAIR, PAIR_P99, SENT, BYTES, SERVER, CLIENT],
        "c" => vec![
            chief(RATE),
            chief(HANDOFF),
            HANDOFF_P99,
            HANDOFF_MAX,
            LONGEST,
            JAIN,
            LEAST,
            MOST,
            SENT,
            BYTES,
            SERVER,
            CLIENT,
        ],
        "d" => vec![chief(RATE), LONGEST, JAIN, LEAST, MOST, SENT, BYTES, SERVER, CLIENT],
        "e" => vec![
            chief(column("takeover", "until the next holder", Unit::Seconds, Better::Low)),
            column("of_ttl", "of the ttl", Unit::Number(2), Better::Neither),
        ],
        "f" => vec![
            column("server_percent", "server's CPU, % of a core", Unit::Number(2), Better::Low),
            column("client_percent", "client's CPU, %", Unit::Number(1), Better::Neither),
            column("calls_per_second", "commands/s, with scripts'", Unit::Number(0), Better::Low),
            column("bytes_per_second", "bytes/s", Unit::Number(0), Better::Low),
            column("lost", "lost", Unit::Number(0), Better::Low),
            column("taking", "time to acquire all", Unit::Seconds, Better::Neither),
        ],
        "g" | "h" => {
            vec![chief(RATE), neutral(PAIR), LONGEST, JAIN, LEAST, MOST, SENT, BYTES, SERVER, CLIENT]
        }
        _ => {
            vec![chief(RATE), neutral(PAIR), neutral(PAIR_P99), HANDOFF, LONGEST, JAIN, SENT, BYTES, SERVER]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_readable_units_and_digit_groups() {
        let texts = [
            Unit::Time.show(29.34),
            Unit::Seconds.show(3.25),
            Unit::Rate.show(1_234_567.8),
            Unit::Rate.show(999.0),
            Unit::Number(2).show(0.5),
            Unit::Number(0).show(-1_000.0),
        ];
        assert_eq!(texts, ["29.34 µs", "3.25 s", "1,234,568", "999", "0.50", "-1,000"]);
    }
}
