//! Keeps the books of the checks, and compares them with the promises.

use super::books::Record;
use super::planted::Planted;
use super::world::World;
use crate::checks::Promise;
use crate::plan::{MS, SECOND};
use crate::server::EPOCH;

use super::node::TOKENS_PER_MS;

impl World {
    /// A guard exists from now on. `others`: the guards of the lock that are trusted now. Returns its number.
    pub(super) fn guard_created(&mut self, mut record: Record, is_trusted: bool, others: &[u64]) -> u64 {
        self.books.guards += 1;
        *self.books.by_second.entry(self.now / SECOND).or_default() += 1;
        record.order = self.books.guards;
        let (lock, process, token) = (record.lock, record.process, record.token);
        if let Some(other) = others.first().filter(|_| is_trusted) {
            let known = &self.books.records[other];
            let (other, its) = (known.process, known.token);
            self.broken(Promise::OneHolder, || {
                format!(
                    "process {process} holds r{lock} with token {token} beside process {other} with token {its}"
                )
            });
        }
        let last = self.books.locks[lock].last_token;
        if is_trusted && token <= last {
            self.broken(Promise::TokensRise, || format!("a guard has token {token} after {last} on r{lock}"));
        }
        let most = self.highest_token();
        if token > most {
            self.broken(Promise::TokensRise, || {
                format!("a guard has token {token} on r{lock}, which is far ahead of the time; {most} is not")
            });
        }
        self.books.locks[lock].last_token = last.max(token);
        let number = self.number();
        self.books.records.insert(number, record);
        number
    }

    /// The highest token that a guard may have now. Those of a node whose clock or tokens are further ahead count nowhere.
    fn highest_token(&self) -> u64 {
        let latest = (EPOCH + self.now + 17 * 3_600 * SECOND) / 1_000;
        latest * TOKENS_PER_MS
    }

    /// A write with a guard's token reaches the fenced resource, which compares tokens.
    pub(super) fn write(&mut self, number: u64) {
        let Some(record) = self.books.records.get(&number) else { return };
        let (lock, token, order) = (record.lock, record.token, record.order);
        let book = &mut self.books.locks[lock];
        if token < book.fence && self.planted != Some(Planted::Unfenced) {
            return;
        }
        book.fence = book.fence.max(token);
        let written = book.written;
        book.written = written.max(order);
        if order < written {
            self.broken(Promise::Fenced, || {
                format!(
                    "r{lock} accepted the write with token {token} of guard {order} after one of guard {written}"
                )
            });
        }
    }

    /// Another guard exists, so the loss of this one must have been reported.
    pub(super) fn check_reported(&mut self, number: u64) {
        let Some(record) = self.books.records.get(&number).filter(|record| record.is_watched) else { return };
        let (process, lock) = (record.process, record.lock);
        let known = &self.processes[process];
        if known.is_alive && known.stalls == [0, 0] && known.resumed_at + MS < self.now {
            self.broken(Promise::LossReported, || {
                format!(
                    "r{lock} has a new holder, and the loss of guard {number} of process {process} was not reported"
                )
            });
        }
    }

    /// What is wrong with the time that the lock was free while this task waited for it.
    pub(super) fn overdue(&self, lock: usize, task: usize) -> Option<String> {
        let since = *self.demand[lock].waiting.get(&task)?;
        let free = self.demand[lock].busy_at.max(since).max(self.plan.faults_end());
        let stall = self.now.saturating_sub(free);
        let bound = if free < self.calm_from {
            self.takeover_bound()
        } else {
            // A hand-over, with conflicting rounds.
            SECOND + 40 * (self.plan.base + 20 * self.plan.jitter)
        };
        (stall > bound).then(|| {
            format!("r{lock} was free for {stall} µs while task {task} waited; the bound is {bound} µs")
        })
    }
}
