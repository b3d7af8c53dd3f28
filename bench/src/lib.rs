//! Interleaved measurement: contestants run in turn, round by round, in one process, since only this is comparable on a noisy
//! machine. Figures are medians over the rounds; ratios are medians of the ratios within each round.

pub mod bare;
pub mod bridges;
pub mod compare;
pub mod handoff;
pub mod local;
pub mod page;
pub mod pair;
pub mod peers;
pub mod program;
pub mod redlock;
pub mod renewals;
pub mod report;
pub mod rounds;
pub mod scale;
pub mod server_cost;

use std::time::{Duration, Instant};

/// A workload to measure.
pub struct Contestant<'a> {
    name: &'a str,
    work: Box<dyn FnMut() + 'a>,
    /// Number of operations per call.
    count: u32,
}

impl<'a> Contestant<'a> {
    /// Calls `work`, which performs `count` operations, once in each round.
    pub fn new(name: &'a str, count: u32, work: impl FnMut() + 'a) -> Self {
        Self { name, work: Box::new(work), count }
    }

    fn round(&mut self) -> f64 {
        let began = Instant::now();
        (self.work)();
        began.elapsed().as_secs_f64() / f64::from(self.count)
    }
}

/// The result of an interleaved measurement.
pub struct Result {
    /// Seconds per operation, in the order of the contestants.
    pub seconds: Vec<f64>,
    /// Ratios to the first contestant.
    pub ratios: Vec<f64>,
}

/// Runs the contestants in turn, and prints the cost of each and its ratio to the first.
pub fn compare(title: &str, rounds: u32, mut contestants: Vec<Contestant<'_>>) -> Result {
    // The first round is a warm-up and does not count.
    for contestant in &mut contestants {
        contestant.round();
    }
    let mut all: Vec<Vec<f64>> = vec![Vec::new(); contestants.len()];
    for _ in 0..rounds {
        for (times, contestant) in all.iter_mut().zip(&mut contestants) {
            times.push(contestant.round());
        }
    }
    let ratio =
        |times: &Vec<f64>| median(times.iter().zip(&all[0]).map(|(time, first)| time / first).collect());
    let ratios: Vec<f64> = all.iter().map(ratio).collect();
    let seconds: Vec<f64> = all.iter().cloned().map(median).collect();
    println!("\n{title} ({rounds} rounds, interleaved; medians)");
    for ((contestant, time), ratio) in contestants.iter().zip(&seconds).zip(&ratios) {
        println!("  {:<44} {:>12}   {ratio:6.2} x", contestant.name, show(*time));
    }
    Result { seconds, ratios }
}

/// Prints whether a measurement is within its limit.
pub fn bar(promise: &str, measured: f64, limit: f64) {
    let verdict = if measured <= limit { "kept" } else { "MISSED" };
    println!("  -> {promise}: {measured:.3} of at most {limit}: {verdict}");
}

/// The median: of an even number of values, the mean of the two in the middle.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().saturating_sub(1) / 2, values.len() / 2);
    values.get(low).zip(values.get(high)).map_or(f64::NAN, |(low, high)| f64::midpoint(*low, *high))
}

/// The value that this share of the values does not exceed.
#[must_use]
pub fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    let at = (values.len() as f64 * share) as usize;
    values.get(at.min(values.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

/// A time as text, with a suitable unit.
#[must_use]
pub fn show(seconds: f64) -> String {
    match seconds {
        s if s < 1e-6 => format!("{:.0} ns", s * 1e9),
        s if s < 1e-3 => format!("{:.2} µs", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

/// A whole number with a comma after each three digits.
pub(crate) fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 && !grouped.ends_with('-') {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// CPU time of this process.
#[must_use]
pub fn processor_time() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(used.tv_sec.unsigned_abs(), u32::try_from(used.tv_nsec).unwrap_or(0))
}

/// A single-threaded runtime.
///
/// # Panics
///
/// If the system provides none.
#[must_use]
pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_of_an_even_number_of_values_is_the_mean_of_the_middle_two() {
        assert_eq!(
            [median(vec![4.0, 1.0]), median(vec![3.0, 9.0, 1.0, 5.0]), median(vec![2.0, 9.0, 1.0])],
            [2.5, 4.0, 2.0]
        );
        assert!(median(Vec::new()).is_nan());
    }
}
