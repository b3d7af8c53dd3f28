//! What the driver and its peers say to each other: a line of JSON each, and an answer to every order.

use serde::{Deserialize, Serialize};

/// The first line of a peer, before any order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The library with its version.
    pub library: String,
    /// What it runs on.
    pub runtime: String,
}

/// What a peer is told to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "lowercase")]
pub enum Order {
    /// Connect.
    Open(Open),
    /// Acquire and release for a while.
    Run(Run),
    /// Take locks and keep them.
    Hold(Hold),
    /// How many of those are still held, as far as the library knows?
    Held,
    /// Take a lock again and again, and report every section to a resource.
    Contend(Contend),
    /// How many locks and waiters are left in the store, as far as the library can list them?
    Left,
    /// Disconnect.
    Close,
}

/// `open`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// One server, or the independent servers of a quorum.
    pub urls: Vec<String>,
    /// How many clients of the library, each with connections of its own.
    pub clients: u32,
    /// What every lease is given.
    pub ttl_ms: u64,
}

/// `run`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Which kind of lock.
    pub lock: String,
    /// With the settings that suit it best, instead of those that it comes with.
    pub is_tuned: bool,
    /// The lock's name; with `own_names`, what the names begin with.
    pub name: String,
    /// Whether every task has a lock of its own.
    pub own_names: bool,
    /// How many tasks, or threads, this process has.
    pub tasks: u32,
    /// The number of the first of them.
    pub first_task: u32,
    /// How many tasks all processes have together.
    pub all_tasks: u32,
    /// How long a critical section takes.
    pub hold_us: u64,
    /// When they begin, by the machine's monotonic clock.
    pub start_ns: u64,
    /// End of the last attempt.
    pub end_ns: u64,
    /// Max acquisitions of a task; zero for no limit.
    pub max_acquisitions: u32,
    /// Percentage of acquisitions that are reads.
    pub reads_percent: u32,
    /// How many may be inside a semaphore.
    pub permits: u32,
    /// The counter that an exclusive lock protects; empty where there is none.
    pub counter: String,
    /// The log of the acquisitions.
    pub log: String,
    /// Pause after a failure; zero: 1 ms.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub retry_ms: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes it so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// `hold`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// Which kind of lock.
    pub lock: String,
    /// As in [`Run`].
    pub is_tuned: bool,
    /// With one lock its name; otherwise what the names begin with, followed by a colon and a number from zero.
    pub name: String,
    /// How many.
    pub count: u32,
}

/// `contend`. A section's length and its pauses follow from its number, so that a seed repeats them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contend {
    /// Which kind of lock.
    pub lock: String,
    /// The lock's name.
    pub name: String,
    /// The path of the resource's Unix socket.
    pub resource: String,
    /// How many tasks, or threads, this process has.
    pub tasks: u32,
    /// The number of the first of them.
    pub first_task: u32,
    /// The longest usual section.
    pub hold_us: u64,
    /// The length of a long section.
    pub long_us: u64,
    /// How many of a hundred sections are long.
    pub long_percent: u64,
    /// How long a write is on its way to the resource.
    pub write_us: u64,
    /// The longest time between two checks of the lock within a section.
    pub step_us: u64,
    /// No attempt starts later than this, by the machine's monotonic clock. Earlier ones are not cancelled.
    pub end_ns: u64,
    /// Shifts the lengths.
    pub seed: u64,
}

/// What a peer answers to an order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Answer {
    /// Why the order could not be carried out; absent if it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// How many attempts or releases failed in a run.
    pub failures: u64,
    /// The first of those failures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// `held`: so many.
    pub held: u32,
    /// `left`: so many, if the library can list them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left: Option<u32>,
    /// Tasks that still wait could not be called back: the process is to be ended, and started again.
    pub is_spent: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_names_itself() {
        let order = Order::Open(Open { urls: vec!["redis://a".into()], clients: 2, ttl_ms: 10_000 });
        let line = serde_json::to_string(&order).unwrap();
        assert_eq!(line, r#"{"order":"open","urls":["redis://a"],"clients":2,"ttl_ms":10000}"#);
        assert_eq!(serde_json::from_str::<Order>(&line).unwrap(), order);
        assert_eq!(serde_json::from_str::<Order>(r#"{"order":"held"}"#).unwrap(), Order::Held);
    }

    #[test]
    fn an_answer_says_only_what_there_is_to_say() {
        let answer: Answer = serde_json::from_str("{}").unwrap();
        assert_eq!(answer, Answer::default());
        let answer: Answer = serde_json::from_str(r#"{"error":"no such lock","extra":1}"#).unwrap();
        assert_eq!(answer.error.as_deref(), Some("no such lock"));
    }

    #[test]
    fn an_unknown_order_is_an_error() {
        assert!(serde_json::from_str::<Order>(r#"{"order":"dance"}"#).is_err());
    }
}
