//! The books follow the commands that the servers run.

use leasehold_core::{
    Acquire, Acquisition, ClientId, Command, Grant, Push, PushKind, Reply, StoreTime, TOMBSTONE_TTL, Token,
};

use std::time::Duration;

use super::shadow::{ShadowEntry, Unclaimed};
use super::{Attempt, Books, Promise, Shadow, Step, TokensOfGrant, micros};
use crate::plan::{MS, Micros, SECOND};

/// The lease that an attempt exchanges.
fn replaced(acquire: &Acquire) -> Option<Acquisition> {
    let client = acquire.acquisition.client;
    acquire.replaces.map(|sequence| Acquisition { client, sequence })
}

impl Books {
    /// Before the server runs a command. `is_batch`: it may be left out.
    pub fn before(&mut self, step: Step<'_>, shadow: &mut Shadow, is_batch: bool) {
        let Step { now, resource, clock, command, epoch, .. } = step;
        shadow.queue.retain(|entry| entry.deadline > clock);
        shadow.note_lapses(clock);
        if clock >= shadow.retained_until {
            // A clock that is set back later does not bring it back.
            shadow.retained_until = StoreTime::default();
        }
        let (acquisition, is_sign_of_life) = match command {
            Command::Acquire(acquire) => (acquire.acquisition, true),
            Command::Renew(renew) => (renew.acquisition, true),
            Command::Release(release) => (release.acquisition, false),
            Command::Inspect | Command::ForceRelease => return,
        };
        if !matches!(command, Command::Acquire(_)) {
            shadow.unclaimed.retain(|grant| grant.acquisition != acquisition);
        }
        // Of several attempts as one command, those behind a refused one are not made.
        if is_sign_of_life && !is_batch {
            shadow.excuse(acquisition.client, false);
        }
        if let Command::Acquire(acquire) = command {
            let is_forced = self.is_forcing(resource, acquire.owner.as_ref());
            let attempt = self.attempts.entry(acquisition).or_insert_with(|| Attempt {
                resource,
                epoch,
                trust: epoch,
                shown: epoch,
                anchor: epoch,
                begun: epoch,
                order: 0,
                ranges: Vec::new(),
                is_detached: false,
                is_late_repeat: false,
                first_command: now,
                queued: false,
                granted_at: None,
                granted_clock: StoreTime::default(),
                released_at: None,
                is_forced,
                commands: 0,
                ttl: micros(acquire.ttl),
                owner: acquire.owner.clone(),
                is_contended: false,
                contended_at: None,
                handoffs: 0,
                has_begun: false,
                replaces: acquire.replaces.is_some(),
            });
            attempt.anchor = epoch;
        }
        // A renewal that fetches tokens for hand-offs within the client serves many sections.
        let is_counted = !matches!(command, Command::Renew(renew) if renew.reserve > 0);
        if let Some(attempt) = self.attempts.get_mut(&acquisition).filter(|_| is_counted) {
            attempt.commands += 1;
        }
    }

    /// After the server has run a command. `unreachable`: the clients that it could not reach.
    pub fn after(
        &mut self,
        step: Step<'_>,
        shadow: &mut Shadow,
        reply: &Reply,
        pushes: &[Push],
        unreachable: &[ClientId],
    ) {
        for client in unreachable {
            shadow.excuse(*client, true);
        }
        self.note_removals(step, shadow, pushes);
        self.note_retention(step, shadow, reply);
        // A replica that is behind may grant once more what was granted before.
        let waited: Vec<Acquisition> = shadow.queue.iter().map(|entry| entry.acquisition).collect();
        self.check_order(step, shadow, reply, pushes, &waited);
        self.note_grants(step, shadow, reply, pushes, &waited);
        self.note_reply(step, shadow, reply);
        // Also what this command enqueued: a client may send commands before its other connection receives pushes again.
        for client in unreachable {
            shadow.excuse(*client, true);
        }
    }

    /// What the command has revoked or removed, and which holders it has told of waiters.
    fn note_removals(&mut self, step: Step<'_>, shadow: &mut Shadow, pushes: &[Push]) {
        let Step { now, resource, command, .. } = step;
        if let Command::Release(release) = command {
            shadow.queue.retain(|entry| entry.acquisition != release.acquisition);
        }
        if let Command::ForceRelease = command {
            for attempt in self.attempts.values_mut().filter(|attempt| attempt.resource == resource) {
                attempt.is_forced |= attempt.granted_at.is_some() && attempt.released_at.is_none();
            }
        }
        for push in pushes {
            if push.kind == PushKind::Contended
                && let Some(attempt) = self.attempts.get_mut(&push.acquisition)
            {
                attempt.is_contended = true;
                attempt.contended_at = Some(now);
                attempt.handoffs = 0;
            }
            // The lease was revoked by force, or the lease that a waiter wanted to replace is gone.
            if push.kind == PushKind::Revoked {
                if let (Command::ForceRelease, Some(attempt)) =
                    (command, self.attempts.get_mut(&push.acquisition))
                {
                    attempt.is_forced = true;
                }
                shadow.queue.retain(|entry| entry.acquisition != push.acquisition);
            }
        }
    }

    /// A lease that is released with a minimum hold keeps an exclusive lock from others until that is over.
    fn note_retention(&self, step: Step<'_>, shadow: &mut Shadow, reply: &Reply) {
        let Step { now, resource, clock, command, .. } = step;
        match (command, reply) {
            (Command::Release(release), Reply::Released) if self.locks[resource].kind.is_exclusive() => {
                let Some(attempt) = self.attempts.get(&release.acquisition) else { return };
                let Some(held) = attempt.granted_at.map(|at| now - at) else { return };
                // The server's clock may be slower or faster than true time, or that of a new master may be ahead.
                let held = held.max(micros(clock.since(attempt.granted_clock)));
                let left = micros(release.min_hold).saturating_sub(held + held / 100 + MS);
                if left > 0 {
                    shadow.retained_until = clock + Duration::from_micros(left);
                }
            }
            (Command::ForceRelease, _) => shadow.retained_until = StoreTime::default(),
            _ => {}
        }
    }

    /// Checks that no grant of this step overtook a waiter, and takes what was granted out of the queue.
    fn check_order(
        &mut self,
        step: Step<'_>,
        shadow: &mut Shadow,
        reply: &Reply,
        pushes: &[Push],
        waited: &[Acquisition],
    ) {
        let Step { now, command, epoch, .. } = step;
        let asked = match (command, reply) {
            (Command::Acquire(acquire), Reply::Granted(_)) => Some(acquire),
            _ => None,
        };
        // A lease may be granted and exchanged in one step. A repeat exchanges nothing, unless a master took over in between.
        let is_repeat = |acquire: &&std::sync::Arc<Acquire>| {
            let attempt = self.attempts.get(&acquire.acquisition);
            attempt.is_some_and(|attempt| attempt.granted_at.is_some() && attempt.epoch == epoch)
        };
        let exchanged = asked.filter(|acquire| !is_repeat(acquire)).and_then(|acquire| replaced(acquire));
        let granted: Vec<Acquisition> = pushes
            .iter()
            .filter(|push| matches!(push.kind, PushKind::Granted(..)))
            .map(|push| push.acquisition)
            .chain(exchanged)
            .chain(asked.map(|acquire| acquire.acquisition))
            .collect();
        let is_new = |acquisition: &Acquisition| {
            self.attempts.get(acquisition).is_none_or(|attempt| {
                (attempt.granted_at.is_none() || waited.contains(acquisition)) && !attempt.replaces
            })
        };
        // What was granted and released in one step overtook no waiter.
        let is_released = |acquisition: &Acquisition| {
            matches!(command, Command::Release(release) if release.acquisition == *acquisition)
                || pushes
                    .iter()
                    .any(|push| push.acquisition == *acquisition && push.kind == PushKind::Revoked)
        };
        let re_enters = |acquisition: &Acquisition| {
            let mut entries = self.entries_beside(*acquisition);
            entries.any(|(other, attempt)| granted.contains(other) || self.is_held(*other, attempt, epoch))
        };
        let new: Vec<Acquisition> = granted
            .iter()
            .copied()
            .filter(|acquisition| {
                is_new(acquisition)
                    && !is_released(acquisition)
                    && !re_enters(acquisition)
                    && exchanged != Some(*acquisition)
            })
            .collect();
        if let Some((late, early)) = shadow.overtaken(&new, &granted) {
            self.broken(now, Promise::Fifo, || {
                format!("{late} was granted before {early}, which came earlier")
            });
        }
        shadow.queue.retain(|entry| !granted.contains(&entry.acquisition));
    }

    /// Books the grants of this step, in the order of their tokens.
    fn note_grants(
        &mut self,
        step: Step<'_>,
        shadow: &mut Shadow,
        reply: &Reply,
        pushes: &[Push],
        waited: &[Acquisition],
    ) {
        let Step { now, resource, clock, command, epoch, .. } = step;
        let mut grants: Vec<_> = pushes
            .iter()
            .filter_map(|push| match push.kind {
                PushKind::Granted(grant, _) => Some((grant, push.acquisition, None)),
                _ => None,
            })
            .collect();
        if let (Command::Acquire(acquire), Reply::Granted(grant)) = (command, reply) {
            grants.push((*grant, acquire.acquisition, Some(&**acquire)));
        }
        for (grant, acquisition, _) in &grants {
            if waited.contains(acquisition) {
                let until = clock + grant.valid_for;
                shadow.unclaimed.push(Unclaimed { acquisition: *acquisition, until, has_lapsed: false });
            }
        }
        // One command may grant to several.
        grants.sort_by_key(|(grant, ..)| grant.tokens.first.get());
        for (grant, acquisition, acquire) in grants {
            let is_new = self.attempts.get(&acquisition).is_none_or(|attempt| attempt.granted_at.is_none());
            if is_new && clock < shadow.retained_until {
                self.broken(now, Promise::Retained, || {
                    format!("r{resource} was granted to {acquisition} within the minimum hold of another")
                });
            }
            if self.gone.get(&acquisition).is_some_and(|(_, of)| *of != epoch) {
                self.stale_grants.insert(resource, now);
            }
            let begun = self.attempts.get(&acquisition).map_or(epoch, |attempt| attempt.begun);
            self.granted(now, resource, clock, acquisition, grant, (epoch, begun), acquire);
            // It knows from its own wait that others may wait.
            let others =
                |entry: &ShadowEntry| !entry.is_excused && entry.acquisition.client != acquisition.client;
            if waited.contains(&acquisition)
                && shadow.queue.iter().any(others)
                && let Some(attempt) = self.attempts.get_mut(&acquisition)
            {
                (attempt.contended_at, attempt.handoffs) = (Some(now), 0);
            }
        }
    }

    /// Books what the reply says, apart from grants.
    fn note_reply(&mut self, step: Step<'_>, shadow: &mut Shadow, reply: &Reply) {
        let Step { now, resource, clock, command, epoch, .. } = step;
        match (command, reply) {
            (Command::Acquire(_), Reply::Granted(_)) => {}
            (Command::Acquire(acquire), Reply::Queued(_)) => {
                // The server may have lost what kept the command out.
                let is_forgotten = self.gone.get(&acquire.acquisition).is_some_and(|(_, of)| *of != epoch);
                if let Some(attempt) = self.attempts.get_mut(&acquire.acquisition) {
                    attempt.queued = true;
                    attempt.is_late_repeat |= attempt.is_detached || is_forgotten;
                    // It holds no lease any more.
                    attempt.contended_at = None;
                    self.check_ghost(now, clock, acquire.acquisition, epoch, "queued");
                }
                shadow.enqueue(acquire, clock);
            }
            (Command::Acquire(acquire), _) => {
                shadow.queue.retain(|entry| entry.acquisition != acquire.acquisition);
            }
            (Command::Renew(renew), Reply::Renewed { tokens, contended, .. }) => {
                if let Some(attempt) = self.attempts.get_mut(&renew.acquisition) {
                    // A look extends no trust, nor does a renewal that no replica has.
                    if !renew.ttl.is_zero() && step.is_durable {
                        (attempt.epoch, attempt.trust, attempt.shown) = (epoch, epoch, epoch);
                    }
                    attempt.contended_at = contended.then(|| attempt.contended_at.unwrap_or(now));
                    if let Some(tokens) = tokens {
                        let (first, last, order) = (tokens.first.get(), tokens.last.get(), attempt.order);
                        attempt.ranges.push(TokensOfGrant { first, last, epoch, at: now, order });
                        self.note_token(now, resource, clock, (first, last), epoch);
                    }
                }
            }
            (Command::Release(release), _) => {
                if *reply == Reply::NotHeld && !release.min_hold.is_zero() {
                    self.not_retained.insert(release.acquisition.client, now);
                }
                self.released(now, clock, release, reply, epoch);
            }
            (Command::Inspect, Reply::View(view)) => {
                for holder in &view.holders {
                    if let Some(attempt) = self.attempts.get_mut(&holder.acquisition) {
                        attempt.shown = epoch;
                    }
                }
            }
            _ => {}
        }
    }

    /// Whether this has ended a lease because all that an owner has is being released, and the attempt of the lease waits still: its
    /// client has not given it up, and so leaves no tombstone.
    fn asks_again(&self, release: &leasehold_core::Release, reply: &Reply) -> bool {
        let attempt = self.attempts.get(&release.acquisition);
        let is_forcing = |attempt: &Attempt| self.is_forcing(attempt.resource, attempt.owner.as_ref());
        *reply == Reply::Released
            && release.tombstone.is_zero()
            && attempt.is_some_and(|attempt| !attempt.has_begun && is_forcing(attempt))
    }

    fn released(
        &mut self,
        now: Micros,
        clock: StoreTime,
        release: &leasehold_core::Release,
        reply: &Reply,
        epoch: (usize, u32),
    ) {
        let healthy_from = self.healthy_from;
        if !self.asks_again(release, reply) {
            self.gone.insert(release.acquisition, (clock, epoch));
        }
        let Some(attempt) = self.attempts.get_mut(&release.acquisition) else { return };
        if attempt.released_at.is_some() {
            return;
        }
        attempt.released_at = Some(now);
        let Some(granted_at) = attempt.granted_at else { return };
        if attempt.first_command < healthy_from || attempt.owner.is_some() || attempt.is_forced {
            return;
        }
        // One command to acquire, one to release; a renewal for each third of the ttl, and one to claim; a re-check when the
        // holder's lease may have ended.
        let waited = granted_at - attempt.first_command;
        let held = now - granted_at;
        // Renewals count from when the attempt was sent. One is due after a third of the ttl, and is sent a twentieth earlier together
        // with another lease's: 17 parts of 60.
        let renewals = (held + 2 * self.slowest) * 60 / (attempt.ttl.min(3 * SECOND) * 17).max(1);
        // Of several holders, or of leases that are retained, each may end at a time of its own. A renewal comes after a third.
        let min_hold = Some(micros(release.min_hold)).filter(|min_hold| *min_hold > 0);
        let shortest = attempt.ttl.min(3 * SECOND).min(min_hold.unwrap_or(Micros::MAX)) * 2 / 3;
        let rechecks = if attempt.queued { 8 + waited / shortest.max(1) } else { 0 };
        // A push that another client waits may overtake the grant's answer: one renewal asks whether it is so. A look is sent up to half a
        // second early, together with another lease's renewal.
        let looks = if self.has_stranger { 1 + (waited + held) * 2 / SECOND } else { 0 };
        let asks = u64::from(attempt.is_contended) + looks;
        let allowed = 2 + renewals + rechecks + asks;
        let sent = attempt.commands;
        if sent > allowed {
            self.broken(now, Promise::FewCommands, || {
                format!(
                    "{} took {sent} commands; {allowed} are enough for waiting {waited} µs and holding {held} µs",
                    release.acquisition
                )
            });
        }
    }

    /// A lease was granted, by an answer or a push.
    #[allow(clippy::too_many_arguments)]
    fn granted(
        &mut self,
        now: Micros,
        resource: usize,
        clock: StoreTime,
        acquisition: Acquisition,
        grant: Grant,
        (epoch, trusted_epoch): ((usize, u32), (usize, u32)),
        acquire: Option<&Acquire>,
    ) {
        let (first, last) = (grant.tokens.first.get(), grant.tokens.last.get());
        let is_repeat = self.attempts.get(&acquisition).is_some_and(|attempt| {
            attempt.granted_at.is_some() && attempt.ranges.iter().any(|range| range.first == first)
        });
        self.check_ghost(now, clock, acquisition, epoch, "granted");
        if let Some(attempt) = self.attempts.get_mut(&acquisition) {
            (attempt.epoch, attempt.trust) = (epoch, trusted_epoch);
        }
        if is_repeat {
            return;
        }
        if !self.is_same_section(acquisition, acquire, first, epoch) {
            self.note_token(now, resource, clock, (first, last), epoch);
        }
        self.grants += 1;
        let order = self.grants;
        if let Some(attempt) = self.attempts.get_mut(&acquisition) {
            attempt.order = order;
            attempt.ranges.push(TokensOfGrant { first, last, epoch, at: now, order });
            (attempt.granted_at, attempt.granted_clock) = (Some(now), clock);
        }
    }

    /// A re-entry and a downgrade continue a critical section, with its token.
    fn is_same_section(
        &self,
        acquisition: Acquisition,
        acquire: Option<&Acquire>,
        token: u64,
        epoch: (usize, u32),
    ) -> bool {
        let has_token = |attempt: &Attempt| attempt.ranges.iter().any(|range| range.first == token);
        let downgrade = acquire.filter(|acquire| acquire.weight < acquire.capacity);
        let downgraded = downgrade.and_then(replaced).and_then(|replaced| self.attempts.get(&replaced));
        downgraded.is_some_and(has_token)
            || self
                .entries_beside(acquisition)
                .any(|(other, attempt)| has_token(attempt) && self.is_held(*other, attempt, epoch))
    }

    /// The token of the lock's last grant to a named owner, or of the lease that an attempt exchanges. Planted bugs repeat it.
    pub(crate) fn earlier_token(&self, resource: usize, command: &Command) -> Option<Token> {
        let Command::Acquire(acquire) = command else { return None };
        let token = match replaced(acquire) {
            Some(replaced) => self.attempts.get(&replaced)?.ranges.last()?.first,
            None if acquire.owner.is_some() => self.locks[resource].last_token,
            None => return None,
        };
        Token::new(token)
    }

    /// The first token that an attempt was granted, which a planted bug repeats.
    pub(crate) fn first_token(&self, acquisition: Acquisition) -> Option<u64> {
        self.attempts.get(&acquisition)?.ranges.first().map(|range| range.first)
    }

    /// The other attempts for the lock by the named owner of this one.
    fn entries_beside(&self, acquisition: Acquisition) -> impl Iterator<Item = (&Acquisition, &Attempt)> {
        let owned = self.attempts.get(&acquisition).filter(|attempt| attempt.owner.is_some());
        owned.into_iter().flat_map(move |this| {
            self.attempts.iter().filter(move |(other, attempt)| {
                **other != acquisition && attempt.resource == this.resource && attempt.owner == this.owner
            })
        })
    }

    /// Whether an attempt was granted and, at this server, not released.
    fn is_held(&self, acquisition: Acquisition, attempt: &Attempt, epoch: (usize, u32)) -> bool {
        attempt.granted_at.is_some() && self.gone.get(&acquisition).is_none_or(|(_, of)| *of != epoch)
    }

    /// Section "A command arrives after its attempt was given up: it acquires nothing".
    fn check_ghost(
        &mut self,
        now: Micros,
        clock: StoreTime,
        acquisition: Acquisition,
        epoch: (usize, u32),
        what: &str,
    ) {
        let Some(&(at, of)) = self.gone.get(&acquisition) else { return };
        if of == epoch && clock.since(at) < TOMBSTONE_TTL {
            self.broken(now, Promise::NoGhost, || {
                format!("{acquisition} was {what} after it had been given up")
            });
        }
    }

    fn note_token(
        &mut self,
        now: Micros,
        resource: usize,
        wall: StoreTime,
        (first, last): (u64, u64),
        epoch: (usize, u32),
    ) {
        let book = &mut self.locks[resource];
        // Section "Tokens and the wall clock": if the last token is forgotten, only the clock keeps tokens rising.
        let is_forgotten = book.last_token_epoch != epoch && book.last_token >= wall.as_micros();
        let known = if is_forgotten { 0 } else { book.last_token };
        let before = book.tokens.get(&epoch).copied().unwrap_or(0).max(known);
        book.last_token = before.max(last);
        book.last_token_epoch = epoch;
        book.tokens.insert(epoch, before.max(last));
        if first <= before {
            self.broken(now, Promise::TokensRise, || {
                format!("token {first} was granted after {before} on r{resource}")
            });
        }
    }
}
