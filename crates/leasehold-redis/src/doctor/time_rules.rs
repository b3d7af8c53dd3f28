//! The checks of a server's speed and clock, from a snapshot of it. Pure: no server is asked here.

use std::time::Duration;

use leasehold_store::{Check, Component, MAX_VOTED_TOKEN_LEAD};

use super::super::limits::ANSWER_TIMEOUT;
use super::acl_check::{Cost, Source};
use super::probe::{Clock, Snapshot};

/// A clock that differs by more than this may end a lease while its holder works.
const MAX_CLOCK_DIFFERENCE: Duration = Duration::from_millis(500);

/// A clock of tokens that is ahead by less than this follows the server's: reserved tokens alone move it by up to 100 ms.
const MAX_USUAL_LEAD: Duration = Duration::from_secs(1);

/// A clock of tokens that is ahead by more than this never follows the server's again in practice.
const MAX_TOKEN_LEAD: Duration = Duration::from_secs(24 * 3_600);

/// A server that takes longer than this for a lock is busy with something else.
const MAX_LOCK_COST: Duration = Duration::from_millis(1);

pub(super) fn check_speed(snapshot: &Snapshot, component: &mut Component) {
    component.fact("round trip", format_args!("{} (median)", span(snapshot.round_trip)));
    if snapshot.round_trip > ANSWER_TIMEOUT / 4 {
        let what = format!("a round trip takes {}", span(snapshot.round_trip));
        let why = format!("an answer that takes longer than {ANSWER_TIMEOUT:?} counts as lost");
        component.advice(Check::RoundTrip, what, why, None);
    }
    match &snapshot.cost {
        None => {}
        Some(Ok(Cost { pair, source, .. })) => {
            let how = match source {
                Source::Server => "the server's own count",
                Source::RoundTrips => "what it takes longer than two PINGs",
            };
            component.fact("lock and release", format_args!("{} of the server's time ({how})", span(*pair)));
            if *pair > MAX_LOCK_COST {
                let why = "the usual time is below 100 µs: the server or its machine is busy";
                component.advice(
                    Check::LockCost,
                    format!("a lock and its release take it {}", span(*pair)),
                    why,
                    None,
                );
            }
        }
        Some(Err(error)) => {
            component.danger(
                Check::LockTrial,
                "the test lock could not be acquired and released",
                error.as_str(),
                None,
            );
        }
    }
    if let Some((count @ 1.., longest)) = snapshot.slow {
        let what =
            format!("{count} of the slowest commands are leasehold's, the longest took {}", span(longest));
        let why = "while a script runs, the server serves no other client: long queues and lists make it longer, as does a busy machine";
        component.advice(Check::SlowCommands, what, why, Some("SLOWLOG GET 128".to_owned()));
    }
}

/// The stream whose ids are the tokens. In a cluster this is the one of the test lock's slot.
pub(super) fn check_token_clock(snapshot: &Snapshot, component: &mut Component) {
    if snapshot.has_lost_clock {
        let why = "the stream leasehold:4:clock was deleted or evicted, or FLUSHALL has removed it. Tokens follow the server's clock from now on: \
                   if that was set back too, they are lower than earlier ones";
        component.advice(
            Check::TokenClock,
            "the clock of tokens is missing, although there are locks",
            why,
            None,
        );
    }
    let Some(Ok(Cost { token_lead: lead, .. })) = snapshot.cost else { return };
    if lead < MAX_USUAL_LEAD {
        return component.fact("clock of tokens", "follows the server's");
    }
    component.fact("clock of tokens", format_args!("{} ahead of the server's", span(lead)));
    let what = format!("the clock of tokens is {} ahead of the server's", span(lead));
    if snapshot.votes && lead > MAX_VOTED_TOKEN_LEAD {
        let why = "its votes do not count, so that the other nodes do not get such tokens: its clock was far ahead once, or an id from the future was \
                   added to the stream. If the clocks of the other nodes are right, delete the stream leasehold:4:clock at this one";
        return component.danger(Check::TokenClock, what, why, None);
    }
    if snapshot.votes {
        let why = "a quorum's tokens follow the node whose clock is furthest ahead: compare the clocks of the other nodes, of which one is or was \
                   ahead. Tokens keep rising";
        return component.advice(Check::TokenClock, what, why, None);
    }
    if lead < MAX_TOKEN_LEAD {
        let why = "the server's clock was set back, or a failover led to a server whose clock is behind. Tokens keep rising. Until the \
                   server's clock has caught up, no tokens are reserved, and tasks of one client hand the lock over through \
                   the server";
        component.advice(Check::TokenClock, what, why, None);
    } else {
        let why = "the server's clock was far ahead once, or an id from the future was added to the stream. All locks of the server have \
                   such tokens, and no tokens are reserved. Beyond the year 2109 no lock can be acquired. If the protected resources \
                   can forget the tokens that they have seen, make them do so, and delete the stream leasehold:4:clock (in a \
                   cluster leasehold:4:clock:{N})";
        component.danger(Check::TokenClock, what, why, None);
    }
}

pub(super) fn check_clock(clock: Clock, component: &mut Component) {
    let ahead = Duration::from_micros(clock.ahead_micros.unsigned_abs());
    let side = if clock.ahead_micros < 0 { "behind" } else { "ahead of" };
    component.fact("clock", format_args!("{} {side} this machine's (± {})", span(ahead), span(clock.error)));
    if ahead.saturating_sub(clock.error) > MAX_CLOCK_DIFFERENCE {
        let what = format!("its clock is {} {side} this machine's", span(ahead));
        let why = "one of the two is wrong. Leases use the server's clock: if it is set forward, they end while their holders \
                   still work";
        component.danger(Check::Clock, what, why, Some("timedatectl set-ntp true".to_owned()));
    }
}

/// The difference of two clocks, if it is too large even after subtracting the error of the measurement.
pub(super) fn differ(one: Clock, other: Clock) -> Option<Duration> {
    let apart = Duration::from_micros(one.ahead_micros.abs_diff(other.ahead_micros));
    (apart.saturating_sub(one.error + other.error) > MAX_CLOCK_DIFFERENCE).then_some(apart)
}

/// A span with three digits or so.
pub(super) fn span(span: Duration) -> String {
    let micros = span.as_secs_f64() * 1e6;
    match micros {
        ..1e3 => format!("{micros:.0} µs"),
        1e3..1e6 => format!("{:.1} ms", micros / 1e3),
        _ => format!("{:.1} s", micros / 1e6),
    }
}
