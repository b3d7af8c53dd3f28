//! Sessions: the leases of one caller, which the server renews while the caller lives.
//!
//! A session lives until its deadline. A heartbeat moves the deadline; so does every open request of the session, such as a
//! long poll or the stream of its events. A caller that crashes closes its connections and sends no heartbeat.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::leases::{Endings, Id};
use crate::problem::{Code, Problem};

/// How many losses that it has reported a session repeats: the last ones.
const MAX_REPORTED: usize = 1000;

/// How many losses a session keeps for a caller that does not ask. A server has no more leases at a time by default.
const MAX_LOSSES: usize = 100_000;

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
    /// How many leases it has lost, for the streams of its events.
    pub(crate) lost: watch::Sender<u64>,
    state: Mutex<State>,
}

struct State {
    deadline: Instant,
    /// Open requests, which keep the session alive.
    requests: usize,
    /// Under the same lock as the deadline and the leases: what comes later is refused, and nothing is left behind.
    has_ended: bool,
    leases: HashSet<Id>,
    losses: VecDeque<Loss>,
}

impl State {
    fn is_overdue(&self, now: Instant) -> bool {
        !self.has_ended && self.requests == 0 && self.deadline <= now
    }
}

/// A loss that the caller may not have heard of.
struct Loss {
    number: u64,
    lost: LostLease,
    reported: Option<Instant>,
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
    /// The time until the session ends without a heartbeat.
    pub(crate) fn remaining(&self) -> Duration {
        let state = self.state();
        if state.requests > 0 {
            self.heartbeat
        } else {
            state.deadline.saturating_duration_since(Instant::now())
        }
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
        let number = *self.lost.borrow() + 1;
        let loss = Loss { number, lost, reported: None };
        state.losses.push_back(loss);
        if state.losses.len() > MAX_LOSSES {
            state.losses.pop_front();
        }
        self.lost.send_replace(number);
    }

    /// The losses after this number, with their own numbers, for an answer at this time.
    ///
    /// An answer may not arrive. A loss is therefore repeated until an answer that is a heartbeat later than the first one with
    /// this loss: a caller that hears no answer for so long must stop its work anyway.
    pub(crate) fn report_losses(&self, now: Instant, after: u64) -> Vec<(u64, LostLease)> {
        let mut state = self.state();
        let wanted = state.losses.iter().filter(|loss| loss.number > after);
        let reported = wanted.map(|loss| (loss.number, loss.lost.clone())).collect();
        state.losses.retain(|loss| loss.reported.is_none_or(|first| now < first + self.heartbeat));
        for loss in &mut state.losses {
            loss.reported.get_or_insert(now);
        }
        // Of those that are reported, the last ones are repeated.
        let excess = state.losses.len().saturating_sub(MAX_REPORTED);
        state.losses.drain(..excess);
        reported
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
            has_ended: false,
            leases: HashSet::new(),
            losses: VecDeque::new(),
        };
        let session = Arc::new(Session {
            id: id.clone(),
            heartbeat,
            label,
            ended: CancellationToken::new(),
            lost: watch::Sender::new(0),
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
        self.change(&session, |state| state.requests += 1)?;
        Ok(OpenRequest(session))
    }

    /// Moves the deadline of a session.
    pub(crate) fn beat(&self, id: &Id) -> Result<Arc<Session>, Problem> {
        let session = self.get(id)?;
        let deadline = Instant::now() + session.heartbeat;
        self.change(&session, |state| state.deadline = state.deadline.max(deadline))?;
        Ok(session)
    }

    /// Adds a lease to a session that has not ended.
    pub(crate) fn add_lease(&self, session: &Session, lease: &Id) -> Result<(), Problem> {
        self.change(session, |state| {
            state.leases.insert(lease.clone());
        })
    }

    /// Changes a session that has not ended.
    fn change(&self, session: &Session, change: impl FnOnce(&mut State)) -> Result<(), Problem> {
        let mut state = session.state();
        if state.has_ended {
            drop(state);
            return Err(self.ended_problem(session));
        }
        change(&mut state);
        Ok(())
    }

    fn ended_problem(&self, session: &Session) -> Problem {
        // It is in the table, because `end_if` changes both under the lock of the table.
        let known = self.get(&session.id).err();
        known.unwrap_or_else(|| Problem::new(Code::SessionEnded, "the session has ended"))
    }

    /// Ends a session: the leases that it leaves behind.
    pub(crate) fn end(&self, session: &Session, why: &str) -> Result<Vec<Id>, Problem> {
        self.end_if(session, why, |_| true).ok_or_else(|| self.ended_problem(session))
    }

    /// Ends a session if its deadline has passed at this time: the leases that it leaves behind.
    pub(crate) fn end_overdue(&self, session: &Session, now: Instant, why: &str) -> Option<Vec<Id>> {
        self.end_if(session, why, |state| state.is_overdue(now))
    }

    fn end_if(&self, session: &Session, why: &str, is_due: impl FnOnce(&State) -> bool) -> Option<Vec<Id>> {
        let mut table = self.table();
        let mut state = session.state();
        if state.has_ended || !is_due(&state) {
            return None;
        }
        state.has_ended = true;
        table.live.remove(&session.id);
        table.ended.insert(&session.id, why.to_owned());
        let leases = std::mem::take(&mut state.leases);
        drop(state);
        drop(table);
        session.ended.cancel();
        Some(leases.into_iter().collect())
    }

    /// Whether the session has ended for this reason.
    pub(crate) fn ended_by(&self, id: &Id, why: &str) -> bool {
        self.table().ended.get(id).is_some_and(|known| known == why)
    }

    /// The sessions whose deadline has passed at this time.
    pub(crate) fn overdue(&self, now: Instant) -> Vec<Arc<Session>> {
        self.table().live.values().filter(|session| session.state().is_overdue(now)).cloned().collect()
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
        sessions.end(&session, "no heartbeat").unwrap();
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
        sessions.end(&first, "closed").unwrap();
        assert_eq!(sessions.end(&first, "closed").err().unwrap().code, Code::SessionEnded);
        assert!(sessions.open(Duration::from_secs(10), None).is_ok());
    }

    #[test]
    fn heartbeat_keeps_an_overdue_session_or_gets_its_end() {
        let sessions = Sessions::new(1);
        let session = sessions.open(Duration::from_secs(10), None).unwrap();
        let later = Instant::now() + Duration::from_secs(10);
        assert_eq!(sessions.overdue(later).len(), 1);
        // The sweep has seen it overdue, and then the heartbeat comes.
        sessions.beat(&session.id).unwrap();
        assert!(sessions.end_overdue(&session, later, "no heartbeat").is_none());
        let open = sessions.enter(&session.id).unwrap();
        assert!(sessions.end_overdue(&session, later + Duration::from_secs(60), "no heartbeat").is_none());
        assert!(!session.ended.is_cancelled() && sessions.get(&session.id).is_ok());
        drop(open);
        // A handler has found the session, and then the sweep ends it.
        assert!(sessions.end_overdue(&session, later + Duration::from_secs(60), "no heartbeat").is_some());
        for refused in [
            sessions.change(&session, |state| state.requests += 1),
            sessions.beat(&session.id).map(drop),
            sessions.enter(&session.id).map(drop),
        ] {
            let problem = refused.unwrap_err();
            assert_eq!((problem.code, problem.detail.as_str()), (Code::SessionEnded, "no heartbeat"));
        }
    }

    #[test]
    fn lease_is_in_its_session_or_refused_by_its_end() {
        let sessions = Sessions::new(1);
        let session = sessions.open(Duration::from_secs(10), None).unwrap();
        let (before, after) = (Id::from("before"), Id::from("after"));
        sessions.add_lease(&session, &before).unwrap();
        assert!(session.leases() == [before.clone()]);
        let left = sessions.end(&session, "closed").unwrap();
        assert!(left == [before]);
        assert_eq!(sessions.add_lease(&session, &after).unwrap_err().code, Code::SessionEnded);
        assert!(session.leases().is_empty());
    }

    #[test]
    fn loss_is_reported_until_an_answer_a_heartbeat_later() {
        let sessions = Sessions::new(1);
        let session = sessions.open(Duration::from_secs(10), None).unwrap();
        let lose = |name: &str| {
            let (lease, kind, name) = (format!("lease {name}"), "mutex".to_owned(), name.to_owned());
            session.lose(LostLease { lease, kind, name, token: 1, reason: String::new() });
        };
        let begin = Instant::now();
        let reported = |seconds, after| -> Vec<String> {
            let losses = session.report_losses(begin + Duration::from_secs(seconds), after);
            losses.into_iter().map(|(number, lost)| format!("{number} {}", lost.name)).collect()
        };
        assert!(reported(0, 0).is_empty());
        lose("a");
        assert_eq!(reported(5, 0), ["1 a"]);
        lose("b");
        assert_eq!(reported(14, 0), ["1 a", "2 b"]);
        // A stream does not repeat what it has sent.
        assert_eq!(reported(14, 1), ["2 b"]);
        assert_eq!(reported(15, 0), ["1 a", "2 b"]);
        assert_eq!(reported(23, 0), ["2 b"]);
        assert_eq!(reported(60, 0), ["2 b"]);
        assert!(reported(60, 0).is_empty());
        // All of them are reported once, and the last ones are repeated.
        for number in 0..=MAX_REPORTED {
            lose(&number.to_string());
        }
        let all = reported(61, 0);
        assert_eq!((all.len(), all[0].as_str()), (MAX_REPORTED + 1, "3 0"));
        let repeated = reported(62, 0);
        assert_eq!((repeated.len(), repeated[0].as_str()), (MAX_REPORTED, "4 1"));
        lose("c");
        let repeated = reported(62, 0);
        assert_eq!((repeated.len(), repeated[0].as_str()), (MAX_REPORTED + 1, "4 1"));
        for number in 0..=MAX_LOSSES {
            lose(&number.to_string());
        }
        assert_eq!(reported(63, 0).len(), MAX_LOSSES);
    }
}
