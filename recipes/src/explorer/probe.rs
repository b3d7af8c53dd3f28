//! What would happen if only one client continued. This shows whose a lock is without knowing how a recipe stores that.

use std::rc::Rc;

use super::event::Event;
use super::sandbox::Sandbox;
use super::scenario::PROBE;
use super::state::{Exploration, Phase, State, Tokens};
use crate::redis::Op;

impl Exploration<'_> {
    /// Whether a new client would acquire the lock at once, and its steps. The other clients are paused.
    pub(super) fn probe(&self, sandbox: &mut Sandbox, state: &State) -> (bool, Vec<Event>) {
        let mut state = state.clone();
        state.last_tokens = Tokens::default();
        while state.clients.len() <= PROBE {
            let mut client = self.client(PROBE, state.now);
            client.state.next = client.state.next.filter(|_| state.clients.len() == PROBE);
            state.clients.push(Rc::new(client));
        }
        let mut events = Vec::new();
        while state.clients[PROBE].state.next.is_some() {
            let (next, event, _) = self.step(sandbox, state, PROBE);
            state = next;
            events.push(event);
            if matches!(state.clients[PROBE].phase, Phase::Inside { .. }) {
                return (true, events);
            }
        }
        (false, events)
    }

    /// Whether this client's present attempt succeeds if the other clients are paused.
    pub(super) fn will_hold(&self, sandbox: &mut Sandbox, state: &State, who: usize) -> bool {
        let attempted = state.clients[who].attempted;
        let was_outside = state.clients[who].phase == Phase::Outside;
        let mut state = state.clone();
        while state.clients[who].phase == Phase::Outside && !state.clients[who].is_done() {
            let waits = matches!(state.clients[who].state.next, Some(Op::Receive(_)));
            if waits && state.clients[who].inbox.is_empty() {
                return false;
            }
            (state, _, _) = self.step(sandbox, state, who);
        }
        was_outside && matches!(state.clients[who].phase, Phase::Inside { since, .. } if since == attempted)
    }
}
