//! Sessions: the leases of one caller, which the server renews while the caller lives.
//!
//! A session lives until its deadline. A heartbeat moves the deadline; so does every open request of the session, such as a
//! long poll or the stream of its events. A caller that crashes closes its connections and sends no heartbeat.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::leases::{Endings, Id};
use crate::problem::{Code, Problem};

/// How many losses a session keeps for a caller that does not ask.
const MAX_LOSSES: usize = 1000;

/// A lease that a session has lost.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct LostLease {
    pub(crate) lease: String,
    pub(crate) kind: String,
    pub(crate) name: String,
    pub(crate) token: u64,
    pub(crate) reason: String,
}

/// The session of one caller.
pub(crate) struct Session {
    pub(crate) id: Id,
    pub(crate) heartbeat: Duration,
    pub(crate) label: Option<String>,
    /// Cancelled when the session ends.
    pub(crate) ended: CancellationToken,
    /// Notified when a lease is lost.
    pub(crate) news: Notify,
    state: Mutex<State>,
}

struct State {
    deadline: Instant,
    /// Open requests, which keep the session alive.
    requests: usize,
    leases: HashSet<Id>,
    losses: Vec<LostLease>,
}

/// An open request of a session. The session does not end before it is dropped.
pub(crate) struct OpenRequest(pub(crate) Arc<Session>);

impl Drop for OpenRequest {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.requests -= 1;
        state.deadline = state.deadline.max(Instant::now() + self.0.heartbeat);
    }
}

impl Session {
    /// Moves the deadline.
    pub(crate) fn beat(&self) {
        let mut state = self.state();
        state.deadline = state.deadline.max(Instant::now() + self.heartbeat);
    }

    /// The time until the session ends without a heartbeat.
    pub(crate) fn remaining(&self) -> Duration {
        let state = self.state();
        let deadline = if state.requests > 0 { Instant::now() + self.heartbeat } else { state.deadline };
        deadline.saturating_duration_since(Instant::now())
    }

    pub(crate) fn leases(&self) -> Vec<Id> {
        self.state().leases.iter().cloned().collect()
    }

    pub(crate) fn remove_lease(&self, id: &Id) {
        self.state().leases.remove(id);
    }

    pub(crate) fn lose(&self, lost: LostLease) {
        let mut state = self.state();
        state.leases.remove(&Id::from(lost.lease.as_str()));
        if state.losses.len() < MAX_LOSSES {
            state.losses.push(lost);
        }
        drop(state);
        self.news.notify_one();
    }

    /// The losses of which the caller was not told.
    pub(crate) fn take_losses(&self) -> Vec<LostLease> {
        std::mem::take(&mut self.state().losses)
    }

    fn is_over(&self, now: Instant) -> bool {
        let state = self.state();
        state.requests == 0 && state.deadline <= now
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Default)]
struct Table {
    live: HashMap<Id, Arc<Session>>,
    ended: Endings<String>,
}

/// The sessions of all callers.
pub(crate) struct Sessions {
    table: Mutex<Table>,
    limit: usize,
}

impl Sessions {
    pub(crate) fn new(limit: usize) -> Self {
        Self { table: Mutex::default(), limit }
    }

    pub(crate) fn open(&self, heartbeat: Duration, label: Option<String>) -> Result<Arc<Session>, Problem> {
        let id = Id::random()?;
        let mut table = self.table();
        if table.live.len() >= self.limit {
            let what = format!("{} sessions are open, which is the limit", self.limit);
            return Err(Problem::new(Code::LimitReached, what));
        }
        let state = State {
            deadline: Instant::now() + heartbeat,
            requests: 0,
            leases: HashSet::new(),
            losses: Vec::new(),
        };
        let session = Arc::new(Session {
            id: id.clone(),
            heartbeat,
            label,
            ended: CancellationToken::new(),
            news: Notify::new(),
            state: Mutex::new(state),
        });
        table.live.insert(id, session.clone());
        Ok(session)
    }

    pub(crate) fn get(&self, id: &Id) -> Result<Arc<Session>, Problem> {
        let table = self.table();
        match (table.live.get(id), table.ended.get(id)) {
            (Some(session), _) => Ok(session.clone()),
            (None, Some(why)) => Err(Problem::new(Code::SessionEnded, why.clone())),
            (None, None) => Err(Problem::new(Code::UnknownSession, "no session has this id")),
        }
    }

    /// Keeps the session alive while a request is open.
    pub(crate) fn enter(&self, id: &Id) -> Result<OpenRequest, Problem> {
        let session = self.get(id)?;
        session.state().requests += 1;
        let open = OpenRequest(session);
        // It may have ended in between; the request is then dropped.
        self.get(id).map(|_| open)
    }

    /// Adds a lease to a session that has not ended.
    pub(crate) fn add_lease(&self, session: &Session, lease: &Id) -> Result<(), Problem> {
        // `end` cancels before it takes the leases, so one of the two sees the other.
        session.state().leases.insert(lease.clone());
        self.get(&session.id).map(|_| ())
    }

    /// Ends a session: the leases that it leaves behind. Empty if it has ended already.
    pub(crate) fn end(&self, session: &Session, why: &str) -> Vec<Id> {
        let mut table = self.table();
        if table.live.remove(&session.id).is_some() {
            table.ended.insert(&session.id, why.to_owned());
        }
        drop(table);
        session.ended.cancel();
        std::mem::take(&mut session.state().leases).into_iter().collect()
    }

    /// The sessions whose deadline has passed at this time.
    pub(crate) fn overdue(&self, now: Instant) -> Vec<Arc<Session>> {
        self.table().live.values().filter(|session| session.is_over(now)).cloned().collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.table().live.len()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_ends_after_its_heartbeat_unless_a_request_is_open() {
        let sessions = Sessions::new(2);
        let session = sessions.open(Duration::from_secs(10), None).unwrap();
        let is_over_in =
            |seconds| !sessions.overdue(Instant::now() + Duration::from_secs(seconds)).is_empty();
        assert!(!is_over_in(5) && is_over_in(10));
        let open = sessions.enter(&session.id).unwrap();
        assert!(!is_over_in(3600));
        drop(open);
        assert!(!is_over_in(5) && is_over_in(10));
        sessions.end(&session, "no heartbeat");
        assert_eq!(sessions.get(&session.id).err().unwrap().code, Code::SessionEnded);
        assert_eq!(sessions.enter(&session.id).err().unwrap().code, Code::SessionEnded);
        assert!(session.ended.is_cancelled() && !is_over_in(3600));
    }

    #[test]
    fn session_beyond_the_limit_is_refused() {
        let sessions = Sessions::new(1);
        let first = sessions.open(Duration::from_secs(10), None).unwrap();
        let refused = sessions.open(Duration::from_secs(10), None).err().unwrap();
        assert_eq!(refused.code, Code::LimitReached);
        sessions.end(&first, "closed");
        assert!(sessions.open(Duration::from_secs(10), None).is_ok());
    }
}
