//! What a transaction reads: the questions of the model that the rows read so far do not answer.

use leasehold_core::{Acquire, Acquisition, ClientId, Command, Kind, Owner, ReleaseIf, Resource};

/// One look-up at one resource, which is one statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Query {
    /// The lease of this acquisition among those outside of the resource's row.
    Lease(Acquisition),
    /// So many of these that expire first.
    Expiring(i64),
    /// So many of the heaviest ones of this owner.
    OfOwner(Owner, i64),
    AllLeases,
    /// The queue entry of this acquisition.
    Waiter(Acquisition),
    /// So many of the first entries that are not parked, and whether their clients listen.
    Ready(i64),
    /// So many of the entries whose deadlines come first.
    Deadlines(i64),
    /// So many of the first entries for which this client speaks.
    OfClient(ClientId, i64),
    /// The number of this client's entries, and whether they are parked.
    CountOf(ClientId),
    /// The number of clients with entries that are not parked.
    ReadyClients,
    AllWaiters,
    /// The tombstone of this acquisition.
    Tombstone(Acquisition),
    AllTombstones,
    /// Whether this client listens for notifications.
    Present(ClientId),
    /// Inserts the resource's row, whose key the rows of other tables need.
    Create,
}

/// How many rows are read at first where the model looks for the first one. A grant takes the first waiter, and then looks for the
/// one that is the first now.
pub(super) const WINDOW: i64 = 2;

/// What a command usually reads, so that one round trip suffices. What is missing is read then.
pub(super) fn usual_queries(resource: &Resource, command: &Command) -> Vec<Query> {
    // One holder is in the resource's row.
    let is_shared = !matches!(resource.kind, Kind::Mutex | Kind::Election);
    match command {
        Command::Acquire(acquire) => of_acquire(acquire, is_shared),
        Command::Renew(renew) if is_shared => vec![Query::Lease(renew.acquisition)],
        Command::Renew(_) => Vec::new(),
        Command::Release(release) => {
            let mut queries = vec![Query::Ready(WINDOW)];
            if is_shared {
                queries.extend([Query::Lease(release.acquisition), Query::Expiring(WINDOW)]);
            }
            // Such a release is usually that of a waiter.
            if matches!(release.only_if, Some(ReleaseIf::SpeaksFor(_))) {
                queries.push(Query::Waiter(release.acquisition));
            }
            if !release.tombstone.is_zero() {
                queries.push(Query::Tombstone(release.acquisition));
            }
            queries
        }
        Command::Inspect => vec![Query::AllLeases, Query::AllWaiters],
        Command::ForceRelease => vec![Query::AllLeases, Query::Ready(WINDOW)],
    }
}

/// What commands at one resource read that are run in one transaction.
pub(super) fn together(resource: &Resource, commands: &[&Command]) -> Vec<Query> {
    let mut all = Vec::new();
    for command in commands {
        let mut queries = usual_queries(resource, command);
        // One of them ends the lease, and the others were waiting.
        if let Command::Release(release) = command {
            queries.push(Query::Waiter(release.acquisition));
        }
        for query in queries {
            if !all.contains(&query) {
                all.push(query);
            }
        }
    }
    all
}

fn of_acquire(acquire: &Acquire, is_shared: bool) -> Vec<Query> {
    let mut queries = vec![Query::Waiter(acquire.acquisition), Query::Ready(WINDOW)];
    if is_shared {
        queries.extend([Query::Lease(acquire.acquisition), Query::Expiring(WINDOW)]);
    }
    if let Some(owner) = &acquire.owner {
        queries.push(Query::OfOwner(owner.clone(), WINDOW));
    }
    if acquire.wait.is_some() {
        queries.extend([Query::CountOf(acquire.inbox()), Query::ReadyClients]);
    }
    queries
}
