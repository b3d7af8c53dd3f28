//! One line about the waiting, kept up to date while it lasts.

use std::convert::Infallible;
use std::io::{self, IsTerminal as _, Write as _};
use std::time::Duration;

use leasehold::{LockView, Mutex};

use crate::duration::show as span;
use crate::look::{printable, who};

/// How often the line is brought up to date.
const REFRESH: Duration = Duration::from_secs(1);

/// Waiting for less than this is not worth a word.
const PATIENCE: Duration = Duration::from_millis(300);

/// The line, cleared when it goes.
struct Line;

impl Line {
    fn write(&self, text: &str) {
        let width =
            terminal_size::terminal_size_of(io::stderr()).map_or(80, |(width, _)| usize::from(width.0));
        let shown: String = text.chars().take(width.saturating_sub(1)).collect();
        let _ = write!(io::stderr(), "\r\x1b[K{shown}");
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let _ = write!(io::stderr(), "\r\x1b[K");
    }
}

/// Tells about the waiting until it is dropped: on a terminal live, otherwise once if asked to.
pub(crate) async fn tell(mutex: &Mutex, is_verbose: bool) -> Infallible {
    let is_live = io::stderr().is_terminal();
    if is_live || is_verbose {
        tokio::time::sleep(PATIENCE).await;
        let line = is_live.then_some(Line);
        loop {
            // A store that does not answer is the waiting's own trouble.
            if let Ok(view) = mutex.inspect().await {
                match &line {
                    Some(line) => line.write(&describe(&view)),
                    None => {
                        eprintln!("leasehold: {}", describe(&view));
                        break;
                    }
                }
            }
            tokio::time::sleep(REFRESH).await;
        }
    }
    std::future::pending().await
}

fn describe(view: &LockView) -> String {
    let mut text = format!("waiting for {}", printable(&view.name));
    if let Some(own) = view.waiters.iter().find(|waiter| waiter.is_ours) {
        text += &format!(": {} of {} in the queue", own.place, view.waiters.len());
    }
    match view.holders.first() {
        Some(holder) if holder.kept => text += &format!("; kept for {}", span(holder.expires_in)),
        Some(holder) => {
            let who = who(&holder.about, &holder.client);
            text += &format!(
                "; held by {who} for {}, ends unless renewed in {}",
                span(holder.held_for),
                span(holder.expires_in)
            );
        }
        None => {}
    }
    text
}
