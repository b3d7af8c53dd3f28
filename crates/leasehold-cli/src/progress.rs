//! The status line while a lock is waited for.

use std::convert::Infallible;
use std::io::{self, IsTerminal as _};
use std::time::Duration;

use leasehold::{HolderInfo, LockInfo, Token};
use nix::unistd::{getpgrp, tcgetpgrp};

use crate::duration::show as span;
use crate::inspect::identity;
use crate::lock::Lock;
use crate::output::{is_json, message, write_stderr};
use crate::text::printable;

/// How often the status line is refreshed.
const REFRESH: Duration = Duration::from_secs(1);

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

/// Reports the wait until it is dropped. On a terminal it updates one line. Otherwise, if `is_verbose`, it prints a line when the
/// place in the queue or the holder changes.
pub(crate) async fn show(lock: &Lock, is_verbose: bool) -> Infallible {
    let is_live = io::stderr().is_terminal() && !is_json();
    if is_live || is_verbose {
        tokio::time::sleep(PROGRESS_DELAY).await;
        let mut line = is_live.then(StatusLine::default);
        let mut told = None;
        loop {
            // A store that does not answer may be why it waits.
            let view = lock.inspect().await;
            match &mut line {
                Some(line) => line.write(&view.map_or_else(
                    |error| error.to_string().chars().take(room()).collect(),
                    |view| describe_within(&view, room()),
                )),
                None => {
                    let now = view.as_ref().map(state).map_err(ToString::to_string);
                    if told.as_ref() != Some(&now) {
                        message(
                            view.map_or_else(
                                |error| error.to_string(),
                                |view| describe(&view, describe_fully),
                            ),
                        );
                        told = Some(now);
                    }
                }
            }
            tokio::time::sleep(REFRESH).await;
        }
    }
    std::future::pending().await
}

/// What is reported again when it changes: the own position in the queue, and the first holder's token.
fn state(view: &LockInfo) -> (Option<usize>, Option<Token>) {
    let own = view.waiters.iter().find(|waiter| waiter.is_own);
    (own.map(|waiter| waiter.position), view.holders.first().map(|holder| holder.token))
}

/// Reports, if verbose, why the lock was not acquired.
pub(crate) async fn explain_conflict(lock: &Lock, is_verbose: bool) {
    if is_verbose && let Ok(view) = lock.inspect().await {
        let name = printable(&view.name);
        match view.holders.first() {
            Some(holder) => message(format_args!("\"{name}\" not acquired: {}", describe_fully(holder))),
            None => message(format_args!("\"{name}\" not acquired; it is free now")),
        }
    }
}

/// In one line of a terminal. On a narrow one the end of the lease is left out, and then what the holder does is cut, so
/// that the place in the queue and the time it takes are always seen.
fn describe_within(view: &LockInfo, room: usize) -> String {
    let whole = describe(view, describe_fully);
    if whole.chars().count() <= room {
        return whole;
    }
    let mut view = view.clone();
    let excess = describe(&view, describe_briefly).chars().count().saturating_sub(room);
    if let Some(label) = view.holders.first_mut().and_then(|holder| holder.metadata.label.as_mut())
        && excess > 0
    {
        let rest = label.chars().count().saturating_sub(excess + 1);
        *label = label.chars().take(rest).chain(['…']).collect();
    }
    describe(&view, describe_briefly).chars().take(room).collect()
}

fn describe(view: &LockInfo, describe_holder: fn(&HolderInfo) -> String) -> String {
    let mut text = format!("waiting for \"{}\"", printable(&view.name));
    if let Some(own) = view.waiters.iter().find(|waiter| waiter.is_own) {
        text += &format!(": {} in the queue", ordinal(own.position));
    }
    if let Some(holder) = view.holders.first() {
        text += &format!("; {}", describe_holder(holder));
    }
    text
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
        return text;
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
