//! What goes wrong in a run, and how often.

use super::{Drawing, MS, Micros, SECOND};

/// Something that goes wrong.
#[derive(Clone, Debug)]
pub struct FaultPlan {
    /// When.
    pub at: Micros,
    /// What.
    pub fault: Fault,
}

impl FaultPlan {
    /// Whether a client's threads stand still, and nothing else goes wrong.
    #[must_use]
    pub fn is_pause(&self) -> bool {
        matches!(self.fault, Fault::Pause { .. })
    }
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each line above says what the names of a fault mean")]
pub enum Fault {
    /// A client's threads stand still: the callers' runtime, the driver, or both.
    Pause { client: usize, callers: bool, driver: bool, lasts: Micros },
    /// A client's machine stands still, and its clock too (section "A holder that does not know that it was stopped").
    Suspend { client: usize, lasts: Micros },
    /// A client's process is killed, and started again. Its connections are closed after a while only, if its host is gone.
    Crash { client: usize, restarts_after: Micros, closes_after: Micros },
    /// A client's connections are cut. What was in flight is lost or, if `late`, arrives after that time.
    Cut { client: usize, callers: bool, driver: bool, late: Option<Micros> },
    /// The connection of a client's bridges, or of a program with another library, is cut. What was in flight is lost or, if `late`, arrives
    /// after that time.
    CutKeys { client: usize, late: Option<Micros> },
    /// Nothing gets through over the connection of a client's bridges, or of a program, and it can't be made again.
    SilenceKeys { client: usize, lasts: Micros },
    /// Answers over that connection come this much later for a while. After that nothing gets through.
    LateKeys { client: usize, by: Micros, during: Micros, lasts: Micros },
    /// That connection is cut as soon as the next command to take a lock has been sent over it, which arrives after `late`. Before, the key
    /// is deleted by hand if a later command has taken it.
    LateTake { client: usize, late: Micros, deleted_after: Micros },
    /// Nothing gets through to the server, or back, and no side is told.
    Silence { client: usize, up: bool, down: bool, lasts: Micros },
    /// A client can't connect to any server, and its connections are silent.
    Partition { client: usize, lasts: Micros },
    /// Single answers and pushes are lost.
    Loss { thousandths: u64, pushes_only: bool, lasts: Micros },
    /// All messages take this much longer.
    Delay { by: Micros, lasts: Micros },
    /// A client reads its connections late.
    SlowConsumer { client: usize, lasts: Micros },
    /// The server does not run.
    ServerPause { lasts: Micros },
    /// The server's process ends and comes back, with or without its data.
    ServerRestart { lasts: Micros, keeps_data: bool },
    /// A replica that is behind by `lag` takes over, with another clock. The old master goes on for `overlaps` for those that
    /// are connected to it.
    Failover { lag: Micros, skew: i64, overlaps: Micros },
    /// The server's memory is full.
    Full { lasts: Micros },
    /// The user of all clients lacks a right, and the server refuses attempts.
    Deny { lasts: Micros },
    /// The server's clock is set.
    ClockStep { by: i64 },
    /// A client's clock runs slower than the stated bound allows (section "Clocks").
    SlowClock { client: usize, ppm: i64 },
}

impl Drawing {
    pub(super) fn faults(&mut self, clients: usize, heal_at: Micros) -> Vec<FaultPlan> {
        let count = self.rng.pick(&[0, 1, 2, 4, 8, 12]);
        let mut faults: Vec<FaultPlan> = (0..count)
            .map(|_| FaultPlan { at: self.rng.below(heal_at), fault: self.fault(clients) })
            .collect();
        faults.sort_by_key(|fault| fault.at);
        faults
    }

    fn fault(&mut self, clients: usize) -> Fault {
        let client = self.rng.index(clients);
        let lasts = self.rng.scaled(MS, 20 * SECOND);
        let (one, other) = self.rng.pick(&[(true, true), (true, false), (false, true)]);
        match self.rng.below(32) {
            0..5 => Fault::Pause { client, callers: one, driver: other, lasts },
            5..9 => Fault::Crash {
                client,
                restarts_after: lasts,
                closes_after: if self.rng.chance(500) { 0 } else { self.rng.scaled(SECOND, 40 * SECOND) },
            },
            9..13 => {
                let late = self.rng.chance(300).then(|| self.rng.scaled(MS, 20 * SECOND));
                Fault::Cut { client, callers: one, driver: other, late }
            }
            13..16 => Fault::Silence { client, up: one, down: other, lasts },
            16 | 17 => Fault::Partition { client, lasts },
            18 | 19 => Fault::Loss {
                thousandths: self.rng.pick(&[20, 100, 400]),
                pushes_only: self.rng.chance(500),
                lasts,
            },
            20 | 21 => Fault::Delay { by: self.rng.scaled(MS, 3 * SECOND), lasts },
            22 => Fault::SlowConsumer { client, lasts },
            23 | 24 => Fault::ServerPause { lasts },
            25 | 26 => Fault::ServerRestart { lasts: lasts / 4, keeps_data: self.rng.chance(600) },
            27 | 28 => Fault::Failover {
                lag: if self.rng.chance(300) { 0 } else { self.rng.scaled(MS, 3 * SECOND) },
                skew: self.signed(SECOND),
                overlaps: if self.rng.chance(600) { 0 } else { lasts },
            },
            29 if lasts.is_multiple_of(2) => Fault::Full { lasts },
            29 => Fault::Deny { lasts },
            30 => Fault::ClockStep { by: self.signed(20 * SECOND) },
            _ if self.rng.chance(500) => Fault::Suspend { client, lasts },
            _ => Fault::SlowClock {
                client,
                ppm: -i64::try_from(self.rng.between(15_000, 60_000)).unwrap_or(0),
            },
        }
    }

    fn signed(&mut self, most: Micros) -> i64 {
        let by = i64::try_from(self.rng.scaled(MS, most)).unwrap_or(0);
        if self.rng.chance(500) { by } else { -by }
    }
}
