//! Contestants that run in turn, round by round, in one process.

use std::time::Instant;

use futures_util::future::LocalBoxFuture;

use crate::median;

/// A workload to measure.
pub struct Contender<'a> {
    /// Its name.
    pub name: &'a str,
    work: Box<dyn FnMut() -> LocalBoxFuture<'a, ()> + 'a>,
}

impl<'a> Contender<'a> {
    /// Calls `work` once in each round.
    pub fn new<F: Future<Output = ()> + 'a>(name: &'a str, mut work: impl FnMut() -> F + 'a) -> Self {
        Self { name, work: Box::new(move || Box::pin(work())) }
    }
}

/// The use of each contestant in each round by `meter`: seconds of the wall clock, or of a server's CPU.
pub async fn measure_rounds(
    rounds: u32,
    contenders: &mut [Contender<'_>],
    meter: &dyn Fn() -> f64,
) -> Vec<Vec<f64>> {
    let mut used = vec![Vec::new(); contenders.len()];
    // The first round is a warm-up and does not count.
    for round in 0..=rounds {
        for (contender, used) in contenders.iter_mut().zip(&mut used) {
            let before = meter();
            (contender.work)().await;
            if round > 0 {
                used.push(meter() - before);
            }
        }
    }
    used
}

/// The median of the rounds, for each contender.
#[must_use]
pub fn medians(used: &[Vec<f64>]) -> Vec<f64> {
    used.iter().cloned().map(median).collect()
}

/// The median over the rounds of the ratio of two contestants.
#[must_use]
pub fn ratio(used: &[Vec<f64>], of: usize, to: usize) -> f64 {
    let pairs = used[of].iter().zip(&used[to]);
    median(pairs.map(|(of, to)| of / to).collect())
}

/// The wall clock in seconds.
pub fn wall() -> impl Fn() -> f64 {
    let began = Instant::now();
    move || began.elapsed().as_secs_f64()
}
