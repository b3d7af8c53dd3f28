//! Script calls as the redis crate's commands.

use leasehold_redis_protocol::ScriptCall;

/// The command that runs a script: by its hash, or with its text after NOSCRIPT.
pub(super) fn command(call: &ScriptCall, use_eval: bool) -> redis::Cmd {
    let (word, script) = if use_eval { ("EVAL", call.text()) } else { ("EVALSHA", call.sha1()) };
    let parts = 3 + call.keys().len() + call.args().len();
    let mut command = redis::Cmd::with_capacity(parts, word.len() + script.len() + 8 + call.size());
    command.arg(word).arg(script).arg(call.keys().len());
    for part in call.keys().chain(call.args()) {
        command.arg(part);
    }
    command
}
