//! What is wrong with the arguments.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::text::printable;

/// What is wrong with the arguments, in one line.
pub(crate) fn complaint(mut error: clap::Error) -> String {
    hide_addresses(&mut error);
    let rendered = error.render().to_string();
    // The usage that follows is for a screen of its own.
    let (what, usage) = rendered.split_once("Usage:").unwrap_or((&rendered, ""));
    let what = what.split("For more information").next();
    let words: Vec<&str> = what.unwrap_or_default().split_whitespace().collect();
    let what = words.join(" ");
    let what = printable(what.strip_prefix("error: ").unwrap_or(&what)).replace(" tip: ", "; ");
    // `flock` needs no dashes there.
    let is_about_it = matches!(error.kind(), ErrorKind::UnknownArgument | ErrorKind::MissingRequiredArgument);
    let is_of_command = is_about_it && rendered.contains("-- <COMMAND>");
    let unknown = error.get(ContextKind::InvalidArg).filter(|_| error.kind() == ErrorKind::UnknownArgument);
    let has_dash = unknown.is_some_and(|typed| typed.to_string().starts_with('-'));
    let takes_a_name = ["NAME>", "NAME]", "[ID]"].iter().any(|word| usage.contains(word));
    let dashes = match (has_dash, is_of_command) {
        (true, true) => {
            "; a name that begins with a dash is passed by --name=NAME, and the command comes after --"
        }
        (true, false) if takes_a_name => {
            "; a name that begins with a dash comes last: the options, then --, then the name"
        }
        (false, true) => "; the command comes after --",
        _ => "",
    };
    // clap's advice is about a part of the name only; where a command follows the two dashes, it is wrong.
    let is_ours = is_of_command || !dashes.is_empty();
    let what = if is_ours { what.split("; to pass ").next().unwrap_or_default() } else { &what };
    format!("{what}{dashes}; see leasehold --help")
}

/// Omits what was typed if it may be an address with a password, or contain one, as that of a bridge does.
fn hide_addresses(error: &mut clap::Error) {
    for kind in [ContextKind::InvalidArg, ContextKind::InvalidValue, ContextKind::InvalidSubcommand] {
        let typed = error.get(kind).and_then(|typed| match typed {
            ContextValue::String(typed) => Some(typed),
            _ => None,
        });
        if typed.is_some_and(|typed| ["@", "pass=", "password="].iter().any(|part| typed.contains(part))) {
            error.insert(kind, ContextValue::String("…".to_owned()));
        }
    }
}
