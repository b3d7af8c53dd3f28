//! The status line while a lock is waited for.

use std::convert::Infallible;
use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant, SystemTime};

use leasehold::bridge::Foreign;
use leasehold::{Error, HolderInfo, LockInfo, Token};
use nix::unistd::{getpgrp, tcgetpgrp};

use crate::duration::show as span;
use crate::inspect::identity;
use crate::lock::Lock;
use crate::output::{Level, is_json, message, write_stderr};
use crate::text::printable;

/// How often the status line is refreshed.
const REFRESH: Duration = Duration::from_secs(1);

/// How often it is looked whether a lock is retained, by a program that reports nothing else. Each look is a command.
const RETENTION_REFRESH: Duration = Duration::from_secs(60);

/// A shorter wait is not reported.
const PROGRESS_DELAY: Duration = Duration::from_millis(300);

/// The status line on a terminal. Dropping it clears the line.
#[derive(Default)]
struct StatusLine {
    is_shown: bool,
}

impl StatusLine {
    /// Replaces the line. A background job writes nothing, because it would overwrite the shell's line.
    fn write(&mut self, text: &str) {
        if !is_in_foreground() {
            return;
        }
        write_stderr(format!("\r\x1b[K{}", printable(text)));
        self.is_shown = true;
    }
}

impl Drop for StatusLine {
    fn drop(&mut self) {
        if self.is_shown && is_in_foreground() {
            write_stderr("\r\x1b[K".to_owned());
        }
    }
}

/// The width of a line, in characters.
fn room() -> usize {
    let width = terminal_size::terminal_size_of(io::stderr()).map_or(80, |(width, _)| usize::from(width.0));
    width.saturating_sub(1)
}

/// A terminal that is not the one which controls us has no foreground of ours.
fn is_in_foreground() -> bool {
    tcgetpgrp(io::stderr()).is_ok_and(|foreground| foreground == getpgrp())
}

/// Where the wait is reported.
enum Audience {
    /// One line of a terminal, which is updated.
    Terminal(StatusLine),
    /// A line when the place in the queue or the holder changes.
    Log { last_reported: Option<Result<State, String>> },
    /// A line for a lock that no program holds any more, but that is retained: that may take hours, and nothing else shows why.
    Retention { last_reported: Option<Token> },
}

impl Audience {
    fn new(is_verbose: bool) -> Self {
        match (io::stderr().is_terminal() && !is_json(), is_verbose) {
            (true, _) => Self::Terminal(StatusLine::default()),
            (false, true) => Self::Log { last_reported: None },
            (false, false) => Self::Retention { last_reported: None },
        }
    }

    fn interval(&self) -> Duration {
        if matches!(self, Self::Retention { .. }) { RETENTION_REFRESH } else { REFRESH }
    }

    /// A store that does not answer may be why it waits.
    fn report(&mut self, wait: Result<Wait<'_>, Error>) {
        match self {
            Self::Terminal(line) => line.write(&wait.map_or_else(
                |error| error.to_string().chars().take(room()).collect(),
                |wait| wait.describe_within(room()),
            )),
            Self::Log { last_reported } => {
                let now = wait.as_ref().map(Wait::state).map_err(ToString::to_string);
                if last_reported.as_ref() != Some(&now) {
                    match wait {
                        Ok(wait) => wait.message(),
                        Err(error) => message(Level::Warn, "store_unavailable", error),
                    }
                    *last_reported = Some(now);
                }
            }
            Self::Retention { last_reported } => {
                let Ok(wait) = wait else { return };
                let Some(token) = wait.retained().map(|holder| holder.token) else { return };
                if *last_reported != Some(token) {
                    wait.message();
                    *last_reported = Some(token);
                }
            }
        }
    }
}

/// Reports the wait until it is dropped, and once that the store refuses the waiting attempt.
pub(crate) async fn show(lock: &Lock, is_verbose: bool) -> Infallible {
    tokio::time::sleep(PROGRESS_DELAY).await;
    let mut audience = Audience::new(is_verbose);
    let (mut is_refused, mut next_look) = (false, Instant::now());
    loop {
        let refusal = lock.refusal();
        let was_refused = std::mem::replace(&mut is_refused, refusal.is_some());
        match (refusal, &mut audience) {
            (Some(refusal), Audience::Terminal(line)) => {
                line.write(&refusal.to_string().chars().take(room()).collect::<String>());
            }
            (Some(refusal), _) if !was_refused => {
                message(Level::Warn, "refused", format_args!("{refusal:#}; retrying"));
            }
            (Some(_), _) => {}
            (None, _) if Instant::now() >= next_look => {
                let view = lock.inspect().await;
                audience.report(view.map(|view| Wait { view, bridge: lock.bridge() }));
                next_look = Instant::now() + audience.interval();
            }
            (None, _) => {}
        }
        tokio::time::sleep(REFRESH).await;
    }
}

/// Says, if verbose or on a terminal, why the lock was not acquired.
pub(crate) async fn explain_conflict(lock: &Lock, is_verbose: bool) {
    if !is_verbose && !io::stderr().is_terminal() {
        return;
    }
    if let Ok(view) = lock.inspect().await {
        let wait = Wait { view, bridge: lock.bridge() };
        let what = match (wait.holder(), wait.bridge) {
            (Some(holder), _) => describe_fully(holder),
            (None, Some(foreign)) => format!("another program held {foreign}"),
            (None, None) => "it is free now".to_owned(),
        };
        message(
            Level::Info,
            "not_acquired",
            format_args!("\"{}\" not acquired: {what}", printable(&wait.view.name)),
        );
    }
}

/// A lock that is waited for.
struct Wait<'a> {
    view: LockInfo,
    bridge: Option<&'a Foreign>,
}

/// What is reported again when it changes: the own position in the queue, the first holder's token, and whether the lock of the other
/// library is waited for.
type State = (Option<usize>, Option<Token>, bool);

impl Wait<'_> {
    /// The first holder that is another program.
    fn holder(&self) -> Option<&HolderInfo> {
        self.view.holders.iter().find(|holder| !holder.is_own)
    }

    /// The holder that has released the lock, if no program holds it.
    fn retained(&self) -> Option<&HolderInfo> {
        self.holder().filter(|_| self.view.holders.iter().all(|holder| holder.retained))
    }

    /// The lock of the other library, if this program has its own lease already.
    fn foreign(&self) -> Option<&Foreign> {
        self.bridge.filter(|_| self.view.holders.iter().any(|holder| holder.is_own))
    }

    fn state(&self) -> State {
        let own = self.view.waiters.iter().find(|waiter| waiter.is_own);
        (
            own.map(|waiter| waiter.position),
            self.holder().map(|holder| holder.token),
            self.foreign().is_some(),
        )
    }

    fn message(&self) {
        message(Level::Info, "waiting", self.describe(describe_fully));
    }

    /// In one line of a terminal. On a narrow one the end of the lease is left out, and then what the holder does is cut, so
    /// that the place in the queue and the time it takes are always seen.
    fn describe_within(mut self, room: usize) -> String {
        let whole = self.describe(describe_fully);
        if whole.chars().count() <= room {
            return whole;
        }
        let excess = self.describe(describe_briefly).chars().count().saturating_sub(room);
        let mut holders = self.view.holders.iter_mut().filter(|holder| !holder.is_own);
        if let Some(label) = holders.next().and_then(|holder| holder.metadata.label.as_mut())
            && excess > 0
        {
            let rest = label.chars().count().saturating_sub(excess + 1);
            *label = label.chars().take(rest).chain(['…']).collect();
        }
        self.describe(describe_briefly).chars().take(room).collect()
    }

    fn describe(&self, describe_holder: fn(&HolderInfo) -> String) -> String {
        let mut text = format!("waiting for \"{}\"", printable(&self.view.name));
        if let Some(own) = self.view.waiters.iter().find(|waiter| waiter.is_own) {
            text += &format!(": {} in the queue", ordinal(own.position));
        }
        if let Some(foreign) = self.foreign() {
            text += &format!("; another program holds {foreign}");
        } else if let Some(holder) = self.holder() {
            text += &format!("; {}", describe_holder(holder));
        }
        text
    }
}

fn describe_briefly(holder: &HolderInfo) -> String {
    if holder.retained {
        return format!("released, and retained for {}", span(holder.expires_in));
    }
    format!("held by {} for {}", identity(&holder.metadata, &holder.client), span(holder.held_for))
}

fn describe_fully(holder: &HolderInfo) -> String {
    let text = describe_briefly(holder);
    if holder.retained {
        let until = humantime::format_rfc3339_seconds(SystemTime::now() + holder.expires_in);
        return format!("{text}, until {until} (--once-per or --min-hold)");
    }
    format!("{text}, lease ends in {} unless renewed", span(holder.expires_in))
}

fn ordinal(number: usize) -> String {
    let suffix = match (number % 100, number % 10) {
        (11..=13, _) => "th",
        (_, 1) => "st",
        (_, 2) => "nd",
        (_, 3) => "rd",
        _ => "th",
    };
    format!("{number}{suffix}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_positions_are_ordinals() {
        let said: Vec<String> = [1, 2, 3, 4, 11, 12, 13, 21, 102, 111].map(ordinal).to_vec();
        assert_eq!(said.join(" "), "1st 2nd 3rd 4th 11th 12th 13th 21st 102nd 111th");
    }
}
