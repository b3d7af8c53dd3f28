//! A command in a transaction of two round trips.
//!
//! The first round trip begins the transaction, locks the rows of the resources, reads the clock and what the model usually asks
//! for. Then the model runs. The second one has its changes, the notifications and COMMIT. While the model lacks rows, a round trip
//! between the two reads them. The lock is held for as long as that takes, and the server ends a transaction whose client has
//! stopped.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold_core::model::{CommandContext, Lease, Waiter};
use leasehold_core::{ClientId, Failure, Now, Push, PushKind, Resource, StoreTime};
use leasehold_store::{Inbox, StoreError};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Error, Row};

use super::answers::keep;
use super::base::ResourceRow;
use super::cache::{CachedRows, Missing};
use super::conn::{Conn, Frame, is_transient};
use super::error;
use super::limits::MAX_READS;
use super::mailbox::Mailbox;
use super::params::{Param, Reader, Request, of_key, of_lease, of_resource, of_resource_row, of_waiter};
use super::push;
use super::query::{Query, WINDOW};
use super::sql::Sql;

/// What a transaction needs to know of its client.
pub(super) struct Session {
    pub(super) sql: Sql,
    pub(super) client: ClientId,
    pub(super) inbox: Weak<dyn Inbox>,
    /// Whether this client gets no notifications, and polls for pushes.
    pub(super) mailbox: Arc<Mailbox>,
    /// A crash loses no token, so tokens may be reserved.
    pub(super) may_reserve: bool,
}

/// Whether a command may have taken effect, for the case that its answer never comes.
#[derive(Default)]
pub(super) struct Progress(AtomicBool);

impl Progress {
    pub(super) fn set(&self, may_be_done: bool) {
        self.0.store(may_be_done, Ordering::Relaxed);
    }

    pub(super) fn may_be_done(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Why a transaction has no result.
pub(super) enum Failed {
    /// It was rolled back, and can be run again.
    Transient(StoreError),
    /// The connection ended before COMMIT was sent, so it was rolled back.
    Cut(StoreError),
    /// It was rolled back at its end, because too many notifications wait for clients that do not read theirs.
    QueueFull(StoreError),
    Final(StoreError),
}

/// How a transaction begins.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// It locks the rows.
    Write,
    /// The same, and waits for each of them so long at most. The others of the client would wait, too.
    Renew(Duration),
    /// It reads a snapshot, without locks. `run` returns `None` if the model would change anything.
    Read,
}

/// The resources of a transaction, in the order in which they are locked, each with what to read.
pub(super) type Plan<'p> = [(&'p Resource, Vec<Query>)];

/// What the model does with the rows.
pub(super) trait Step<T>:
    Fn(&mut [CachedRows], CommandContext<'_>) -> Result<T, Missing> + Send + Sync
{
}

impl<T, F> Step<T> for F where F: Fn(&mut [CachedRows], CommandContext<'_>) -> Result<T, Missing> + Send + Sync
{}

/// One transaction in progress.
pub(super) struct Transaction<'s> {
    session: &'s Session,
    conn: &'s Conn,
    now: StoreTime,
    rows: Vec<CachedRows>,
    /// Which clients listen.
    present: HashMap<ClientId, bool>,
    /// Whether COMMIT was sent.
    progress: &'s Progress,
    /// Whether notifications were sent with it.
    has_notified: bool,
}

impl<'s> Transaction<'s> {
    pub(super) fn new(session: &'s Session, conn: &'s Conn, progress: &'s Progress) -> Self {
        let (now, rows, present) = (StoreTime::ZERO, Vec::new(), HashMap::new());
        Self { session, conn, now, rows, present, progress, has_notified: false }
    }

    /// Runs it. `notifies` is false if the notifications are to be left out.
    pub(super) async fn run<T>(
        &mut self,
        access: Access,
        plan: &Plan<'_>,
        step: &impl Step<T>,
        notifies: bool,
    ) -> Result<Option<(T, Vec<Push>)>, Failed> {
        self.begin(access, plan).await?;
        for _ in 0..MAX_READS {
            // Rows that contradict each other were not written by leasehold, and the model refuses them by a panic, which would end the client.
            let attempted = catch_unwind(AssertUnwindSafe(|| self.attempt(step)));
            match attempted.map_err(|_| Failed::Final(error::contradictory()))? {
                Ok(_) if access == Access::Read && self.rows.iter().any(|rows| !rows.changes.is_empty()) => {
                    return Ok(None);
                }
                Ok(done) if access == Access::Read => return Ok(Some(done)),
                Ok((result, pushes)) => {
                    let own = self.end(pushes, notifies).await?;
                    return Ok(Some((result, own)));
                }
                // A snapshot has everything that an inspection asks for.
                Err(_) if access == Access::Read => return Ok(None),
                Err(missing) => self.read(plan, missing).await?,
            }
        }
        Err(Failed::Final(StoreError::new(Failure::NotSent, "a transaction lacked rows again and again")))
    }

    async fn begin(&mut self, access: Access, plan: &Plan<'_>) -> Result<(), Failed> {
        let sql = &self.session.sql;
        let (lock, frame) = match access {
            Access::Write | Access::Renew(_) => (&sql.lock, Frame::Begin),
            Access::Read => (&sql.peek, Frame::Snapshot),
        };
        let mut requests = Vec::new();
        // Missing rows of a set are inserted together, before any lock and in the order of the locks.
        let creates = access == Access::Write && plan.len() > 1;
        if creates {
            let texts = |text: fn(&Resource) -> &str| {
                Param::Texts(plan.iter().map(|(resource, _)| text(resource).to_owned()).collect())
            };
            let names = texts(|resource| resource.name.as_str());
            requests
                .push(Request::new(&sql.create_all, vec![names, texts(|resource| resource.kind.as_str())]));
        }
        if let Access::Renew(wait) = access {
            let limit = wait.as_millis().to_string();
            requests.push(Request::new(&sql.limit_waits, vec![limit.as_str().into()]));
        }
        let skipped = requests.len();
        requests.extend(plan.iter().map(|(resource, _)| Request::new(lock, of_resource(resource))));
        for (resource, queries) in plan {
            requests.extend(queries.iter().map(|query| self.request(resource, query)));
        }
        let answers = self.conn.pipeline(frame, &requests).await.map_err(|error| self.failed(error))?;
        let mut answers = answers.into_iter().skip(skipped);
        self.rows = plan.iter().map(|_| CachedRows::new()).collect();
        for (rows, answer) in self.rows.iter_mut().zip(answers.by_ref()) {
            let mut reader = Reader::new(first(&answer)?);
            // The clock of the last lock, which is the latest.
            self.now = reader.time().map_err(Failed::Final)?;
            rows.base.resource = reader.resource().map_err(Failed::Final)?;
        }
        let queries = plan
            .iter()
            .enumerate()
            .flat_map(|(at, (_, queries))| queries.iter().map(move |query| (at, query)));
        for ((at, query), answer) in queries.zip(answers) {
            self.keep(at, query, &answer)?;
        }
        Ok(())
    }

    /// Applies the model to the rows read so far. `Err(query)`: it needs this query first.
    fn attempt<T>(&mut self, step: &impl Step<T>) -> Result<(T, Vec<Push>), (usize, Query)> {
        let now = self.now;
        self.rows.iter_mut().for_each(CachedRows::begin);
        // Tokens that are ahead of the clock may be given again by a standby that did not receive the last ones.
        let is_behind = self.rows.iter().all(|rows| rows.last_token() <= now.as_micros());
        let now = Now { may_reserve: self.session.may_reserve && is_behind, ..Now::same(now) };
        let polling: Vec<_> = self.rows.iter().flat_map(|rows| rows.base.polling.iter().copied()).collect();
        let unknown = RefCell::new(None);
        let mut is_reachable = |client: ClientId| {
            if client == self.session.client {
                return self.session.inbox.strong_count() > 0;
            }
            let known = polling.contains(&client).then_some(true);
            known.or_else(|| self.present.get(&client).copied()).unwrap_or_else(|| {
                unknown.borrow_mut().get_or_insert(client);
                true
            })
        };
        let mut pushes = Vec::new();
        let context = CommandContext { now, is_reachable: &mut is_reachable, pushes: &mut pushes };
        let done = step(&mut self.rows, context);
        if let Some(client) = unknown.into_inner() {
            return Err((0, Query::Present(client)));
        }
        match done {
            Ok(result) => Ok((result, pushes)),
            Err(Missing) => {
                let lacking =
                    self.rows.iter().enumerate().find_map(|(at, rows)| Some((at, rows.missing.clone()?)));
                Err(lacking.unwrap_or_else(|| unreachable!("a failed run names what it lacks")))
            }
        }
    }

    async fn read(&mut self, plan: &Plan<'_>, (at, query): (usize, Query)) -> Result<(), Failed> {
        let queries = with_next(&self.rows[at], &self.present, query);
        let requests: Vec<_> = queries.iter().map(|query| self.request(plan[at].0, query)).collect();
        let answers =
            self.conn.pipeline(Frame::Within, &requests).await.map_err(|error| self.failed(error))?;
        queries.iter().zip(&answers).try_for_each(|(query, answer)| self.keep(at, query, answer))
    }

    fn request(&self, resource: &Resource, query: &Query) -> Request<'s> {
        let mut params = match query {
            Query::Present(_) => Vec::new(),
            _ => of_resource(resource),
        };
        match query {
            Query::Lease(key) | Query::Waiter(key) | Query::Tombstone(key) => params.extend(of_key(*key)),
            Query::Expiring(limit) | Query::Ready(limit) | Query::Deadlines(limit) => {
                params.push((*limit).into());
            }
            Query::OfOwner(owner, limit) => params.extend([Some(owner).into(), (*limit).into()]),
            Query::OfClient(client, limit) => params.extend([(*client).into(), (*limit).into()]),
            Query::CountOf(client) | Query::Present(client) => params.push((*client).into()),
            Query::AllLeases
            | Query::ReadyClients
            | Query::AllWaiters
            | Query::AllTombstones
            | Query::Create => {}
        }
        Request::new(self.session.sql.of(query), params)
    }

    /// Keeps the answer to a look-up.
    fn keep(&mut self, at: usize, query: &Query, rows: &[Row]) -> Result<(), Failed> {
        let base = &mut self.rows[at].base;
        keep(base, &mut self.present, query, rows).map_err(Failed::Final)
    }

    /// Sends the changes and COMMIT. Returns the pushes of this client.
    async fn end(&mut self, pushes: Vec<Push>, notifies: bool) -> Result<Vec<Push>, Failed> {
        let (own, others): (Vec<_>, Vec<_>) =
            pushes.into_iter().partition(|push| push.inbox == self.session.client);
        let is_unchanged = self.rows.iter().all(|rows| rows.changes.is_empty());
        if is_unchanged && others.is_empty() {
            // There is nothing to make durable.
            self.conn.roll_back().await.map_err(|error| self.failed(error))?;
            return Ok(own);
        }
        let mut requests = Vec::new();
        for rows in &self.rows {
            self.write(rows, &mut requests);
        }
        self.has_notified = self.send(&others, notifies, &mut requests);
        self.progress.set(true);
        self.conn.pipeline(Frame::Commit, &requests).await.map_err(|error| self.failed(error))?;
        Ok(own)
    }

    /// Notifies other clients, and leaves pushes in the table for those that do not listen. The queue says of waiters whether they do; of holders
    /// nothing does.
    ///
    /// Returns whether it notifies.
    fn send<'r>(&self, pushes: &[Push], notifies: bool, requests: &mut Vec<Request<'r>>) -> bool
    where
        's: 'r,
    {
        let sql = &self.session.sql;
        let polls = |push: &Push| self.rows.iter().any(|rows| rows.base.polling.contains(&push.inbox));
        let is_for_holder = |push: &Push| matches!(push.kind, PushKind::Contended | PushKind::Revoked);
        let texts = |pushes: &[&Push], text: fn(&Push) -> String| {
            Param::Texts(pushes.iter().map(|push| text(push)).collect())
        };
        let notified: Vec<_> = pushes.iter().filter(|push| !polls(push)).collect();
        let notifies = notifies && !notified.is_empty();
        if notifies {
            let channels = texts(&notified, |push| push::channel(push.inbox));
            requests.push(Request::new(&sql.notify, vec![channels, texts(&notified, push::encode)]));
        }
        let posted: Vec<_> = pushes.iter().filter(|push| polls(push) || is_for_holder(push)).collect();
        if !posted.is_empty() {
            let clients = posted.iter().map(|push| push.inbox.get().to_be_bytes().to_vec()).collect();
            let polling = posted.iter().map(|push| i64::from(polls(push))).collect();
            let params = vec![Param::ByteLists(clients), texts(&posted, push::encode), Param::Ints(polling)];
            requests.push(Request::new(&sql.post, params));
        }
        notifies
    }

    fn write<'r>(&self, rows: &CachedRows, requests: &mut Vec<Request<'r>>)
    where
        's: 'r,
    {
        let sql = &self.session.sql;
        let (Some(stored), changes) = (rows.stored(), &rows.changes) else { return };
        let with_id = |params: Vec<Param>| {
            let mut all = vec![Param::from(stored.id)];
            all.extend(params);
            all
        };
        if let Some(until) = changes.tombstones_until.filter(|_| stored.header.tombstones > 0) {
            let params = with_id(vec![leasehold_store::sql::stored_time(until).into()]);
            requests.push(Request::new(&sql.remove_tombstones, params));
        }
        for (client, parked) in &changes.parked {
            requests.push(Request::new(&sql.set_parked, with_id(vec![(*client).into(), (*parked).into()])));
        }
        for (key, lease) in &changes.leases {
            requests.push(match lease {
                None => Request::new(&sql.remove_lease, with_id(of_key(*key).into())),
                Some(lease) => Request::new(&sql.put_lease, with_id(of_lease(lease))),
            });
        }
        // Before the new entries: a queue that has become empty begins with the first place again.
        for (key, changed) in &changes.waiters {
            let place = changed.now.as_ref().map(|waiter| waiter.place);
            let has_other_place =
                rows.base.waiter(*key).flatten().is_some_and(|stored| Some(stored.place) != place);
            if place.is_none() || has_other_place {
                requests.push(Request::new(&sql.remove_waiter, with_id(of_key(*key).into())));
            }
        }
        for waiter in changes.waiters.values().filter_map(|changed| changed.now.as_ref()) {
            let polls = match waiter.inbox() == self.session.client {
                true => self.session.mailbox.polls(),
                false => rows.base.polling.contains(&waiter.inbox()),
            };
            requests.push(Request::new(&sql.put_waiter, with_id(of_waiter(waiter, polls))));
        }
        for (key, until) in &changes.tombstones {
            let mut params = with_id(of_key(*key).into());
            params.push(leasehold_store::sql::stored_time(*until).into());
            requests.push(Request::new(&sql.put_tombstone, params));
        }
        if changes.header.is_some() || changes.slot.is_some() {
            let row = ResourceRow {
                id: stored.id,
                header: changes.header.clone().unwrap_or_else(|| stored.header.clone()),
                slot: changes.slot.clone().unwrap_or_else(|| stored.slot.clone()),
            };
            requests.push(Request::new(&sql.put_resource, of_resource_row(&row)));
        }
    }

    fn failed(&self, error: Error) -> Failed {
        let has_rolled_back = self.conn.has_rolled_back(&error);
        let may_be_done = self.progress.may_be_done() && !has_rolled_back;
        let is_full = self.has_notified && error.code() == Some(&SqlState::PROGRAM_LIMIT_EXCEEDED);
        let is_transient = has_rolled_back || is_transient(&error);
        let is_cut = !may_be_done && error::is_fatal(&error);
        let error = error::explain(error, may_be_done);
        match error {
            error if is_full => Failed::QueueFull(error),
            error if is_transient => Failed::Transient(error),
            error if is_cut => Failed::Cut(error),
            error => Failed::Final(error),
        }
    }
}

/// A look-up of the model, and those that follow if it asks the same of other clients or owners: it takes the waiters, and the leases
/// that have expired, one after the other, and each look-up by itself would be a round trip.
fn with_next(rows: &CachedRows, present: &HashMap<ClientId, bool>, query: Query) -> Vec<Query> {
    let base = &rows.base;
    let ready = || base.ready.iter().flat_map(|window| &window.rows);
    let expiring = || base.expiring.iter().flat_map(|window| &window.rows).chain(base.slot());
    let next: Vec<Query> = match &query {
        Query::CountOf(_) => {
            // Those that will be parked, and those of which the clients that wait are counted.
            let absent = ready().map(Waiter::inbox).filter(|client| present.get(client) == Some(&false));
            let changed = rows.changes.clients_of_waiters();
            // The clients of leases that expire unclaimed are parked too.
            let unclaimed = expiring().filter(|lease| !lease.claimed).map(Lease::inbox);
            let clients: BTreeSet<_> = absent.chain(changed).chain(unclaimed).collect();
            let unknown = clients.into_iter().filter(|client| !base.counts.contains_key(client));
            unknown.map(Query::CountOf).collect()
        }
        Query::OfOwner(..) => {
            let of_leases = expiring().filter_map(|lease| lease.owner.clone());
            let owners: BTreeSet<_> =
                ready().filter_map(|waiter| waiter.owner.clone()).chain(of_leases).collect();
            let unknown = owners.into_iter().filter(|owner| !base.owned.contains_key(owner));
            unknown.map(|owner| Query::OfOwner(owner, WINDOW)).collect()
        }
        _ => Vec::new(),
    };
    let next = next.into_iter().filter(|other| *other != query).collect::<Vec<_>>();
    std::iter::once(query).chain(next).collect()
}

fn first(rows: &[Row]) -> Result<&Row, Failed> {
    rows.first().ok_or_else(|| Failed::Final(error::damaged("an empty answer")))
}
