//! Acquires several resources in one step: all are granted, or none is. The counterpart of the script `acquire_all.lua`.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::{CommandContext, Rows, step};
use crate::command::{Acquire, Answer, Command, Release, Reply};
use crate::token::Token;

/// Applies one attempt to each of several resources: all are granted, or none is. No attempt waits.
///
/// Every attempt runs as if it were alone. If one attempt is not granted, the earlier grants of this step are released,
/// and the later attempts are not made. The answer to the refused attempt names the reason; the others get `Busy`. If an
/// attempt had a lease before this step, it keeps that lease.
///
/// # Errors
///
/// As [`apply`](super::apply), for all of them.
///
/// # Panics
///
/// If an attempt waits or replaces a lease, because that cannot be undone.
pub fn apply_all<R: Rows>(
    context: CommandContext<'_>,
    attempts: &mut [(&mut R, &Arc<Acquire>)],
) -> Result<Vec<Answer>, R::Error> {
    let CommandContext { now, is_reachable, pushes } = context;
    let at = now.time;
    let mut now = now;
    let mut run = |rows: &mut R, command: &Command| {
        // Only this step's own pushes are withdrawn.
        let mut own = Vec::new();
        let answer =
            step(rows, CommandContext { now, is_reachable: &mut *is_reachable, pushes: &mut own }, command)?;
        pushes.append(&mut own);
        // Tokens rise over the whole step, because a store may have one clock for all of them.
        let next = rows.header()?.and_then(|header| Token::new(header.last_token + 1));
        now.floor = now.floor.max(next);
        Ok(answer)
    };
    let mut answers = Vec::new();
    let mut is_new = Vec::new();
    for (rows, acquire) in attempts.iter_mut() {
        assert!(acquire.wait.is_none(), "an attempt of a batch does not wait");
        assert!(acquire.replaces.is_none(), "an attempt of a batch replaces no lease");
        let (answer, is_known) = run(rows, &Command::Acquire(Arc::clone(acquire)))?;
        let is_granted = matches!(answer.reply, Reply::Granted(_));
        answers.push(answer);
        if !is_granted {
            break;
        }
        is_new.push(!is_known);
    }
    if is_new.len() < attempts.len() {
        for (((rows, acquire), answer), is_new) in attempts.iter_mut().zip(&mut answers).zip(is_new) {
            if is_new {
                run(rows, &Command::Release(Release::now(acquire.acquisition)))?;
                answer.reply = Reply::Busy;
            }
        }
        answers.resize(attempts.len(), Answer { at, reply: Reply::Busy });
    }
    Ok(answers)
}
