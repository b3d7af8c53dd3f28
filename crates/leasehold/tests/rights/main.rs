//! What a client can do that lacks one of the documented rights, on each server: docs/rights.md.
//!
//! Each right is taken away from a user of its own, before it connects and while it is connected, and every command is tried. There are never two
//! holders, the error of each refused command names the right, every other client goes on, and nothing stays without an expiry.

mod commands;
mod page;
mod postgres;
mod redis;

use futures_util::{StreamExt as _, stream};
use leasehold::Client;

use crate::commands::{Outcome, Trial};

/// What is known of one right on one server.
struct Row {
    right: String,
    outcomes: Vec<Outcome>,
}

/// Tries all rights, some at a time. The rows are in their order.
async fn try_all(healthy: &Client, trials: Vec<Trial>, at_a_time: usize) -> Vec<Row> {
    let mut lists = Vec::new();
    for trial in &trials {
        lists.push(trial.list(healthy).await);
    }
    let rows = trials.into_iter().zip(lists).map(async |(trial, list)| {
        let outcomes = trial.run(healthy, list).await;
        (Row { right: trial.right, outcomes }, trial.faults.into_inner())
    });
    let (rows, faults): (Vec<_>, Vec<_>) = stream::iter(rows).buffered(at_a_time).unzip().await;
    let faults = faults.concat();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    rows
}
