//! One command of a caller in flight: sends it, receives the answer, and updates the table.
//!
//! Every command of an attempt or a lease takes this path if its caller polls for the answer. The driver sends batches,
//! `Handle::ask` sends look-ups, and `locks/acquire_all.rs` sends several attempts as one command.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use leasehold_core::{Command, Outcome, Resource};
use leasehold_store::process::Own;
use leasehold_store::{BoxFuture, Call, CallResult, Store, StoreError};

use super::entry::Transmit;
use super::ids::EntryId;
use super::local_queue::Ticket;
use super::releasing::ReleaseOutcome;
use super::session::Session;

/// A command that was sent for an entry of the table. Dropping it lets the driver retry what others depend on: a renewal.
/// Dropping an attempt or a release is the caller's to settle.
#[must_use = "a request does nothing unless it is polled"]
pub(crate) struct Request<'a> {
    session: &'a Session,
    state: State,
    /// The task of a local queue that polls for the answer.
    polled_by: Option<Ticket>,
}

enum State {
    InFlight(Transmit, Own<BoxFuture<CallResult>>),
    /// The table was updated, and the caller has not polled the result.
    Answered(Response),
    Done,
}

/// What an answer came to.
#[derive(Debug, Default)]
pub(crate) struct Response {
    /// How the attempt or the release has ended, if it has.
    pub(crate) end: Option<End>,
    pub(crate) error: Option<StoreError>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Attempt(Outcome),
    Release(ReleaseOutcome),
}

impl<'a> Request<'a> {
    /// Sends the command: inline if the store can, otherwise with the first poll. Without a command there is nothing to poll.
    pub(crate) fn send(
        session: &'a Session,
        store: &dyn Store,
        resource: &Arc<Resource>,
        transmit: Option<Transmit>,
    ) -> Self {
        let state = match transmit {
            None => State::Done,
            Some(transmit) => match store.try_call_inline(resource, &transmit.command) {
                Some(answered) => State::Answered(step(session, &transmit, answered, None)),
                None => {
                    let sent =
                        store.call(Call::new(resource.clone(), transmit.command.clone()), transmit.replicas);
                    State::InFlight(transmit, Own::new(sent))
                }
            },
        };
        Self { session, state, polled_by: None }
    }

    /// Names the task that polls for the answer, and checks its wait in its local queue after each poll.
    pub(crate) fn polled_by(mut self, ticket: Ticket) -> Self {
        self.polled_by = Some(ticket);
        self
    }

    /// Whether the answer is still to come.
    pub(crate) fn is_in_flight(&self) -> bool {
        matches!(self.state, State::InFlight(..))
    }

    /// Polls for the answer and steps the table with it. Returns the response once.
    pub(crate) fn poll_response(&mut self, context: &mut Context<'_>) -> Option<Response> {
        let response = match &mut self.state {
            State::Done => return None,
            State::Answered(response) => std::mem::take(response),
            State::InFlight(transmit, sent) => match Pin::new(sent).poll(context) {
                Poll::Ready(answered) => step(self.session, transmit, answered, self.polled_by),
                Poll::Pending => return None,
            },
        };
        self.state = State::Done;
        Some(response)
    }

    /// No task polls for the answer to an `Acquire` in flight any more: the driver asks again.
    pub(crate) fn abandon(&mut self) {
        if let State::InFlight(transmit, _) = std::mem::replace(&mut self.state, State::Done) {
            self.session.abandon_acquire(transmit.entry, self.session.now());
        }
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        if let State::InFlight(Transmit { entry, command: Command::Renew(_), .. }, _) = self.state {
            self.session.abandon_renewal(entry, self.session.now());
        }
    }
}

/// Steps the table with the answer.
fn step(session: &Session, transmit: &Transmit, answered: CallResult, polled_by: Option<Ticket>) -> Response {
    let end = match transmit.command {
        Command::Release(_) => session.handle_release_response(transmit, &answered).map(End::Release),
        _ => session.handle_polled_response(polled_by, transmit, session.now(), &answered).map(End::Attempt),
    };
    Response { end, error: answered.err() }
}

/// Releases an entry that no future or guard refers to: at once if the store can be called without waiting, otherwise
/// through the driver.
pub(crate) fn release_dropped(session: &Session, store: &dyn Store, resource: &Resource, entry: EntryId) {
    let Some(transmit) = session.release_dropped(entry, session.now()) else { return };
    match store.try_call_inline(resource, &transmit.command) {
        Some(answered) => drop(step(session, &transmit, answered, None)),
        None => session.defer_release(entry, session.now()),
    }
}
