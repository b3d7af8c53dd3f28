//! The configuration file: defaults for options that neither the command line nor the environment sets.
//!
//! Its keys are the names of the long options, at the top those of every command (`store`, `log`), and in a table those of the
//! command with that name. The options of the file are added to the arguments, so that they are checked as typed ones are. An
//! option is left out if it can't be used together with what the command line and the environment set (`applies.rs`).

mod applies;
mod file;
mod option;

use std::ffi::OsString;

use applies::Set;
use clap::error::ErrorKind;
use clap::{ArgMatches, Command, FromArgMatches as _};
use file::File;
use option::FileOption;
use toml::{Table, Value};

use crate::args::{self, Args, LogFormat, complaint};
use crate::exit::Stop;
use crate::output::{self, Level, message};

/// Commands that use no defaults: an invalid file must not affect them.
const WITHOUT_FILE: [&str; 4] = ["completions", "help", "man", crate::watchdog::COMMAND];

/// Why no arguments could be made.
pub(crate) enum Refused {
    Arguments(clap::Error),
    File(Stop),
}

/// The arguments; what they leave out comes from the environment, then from the configuration file.
pub(crate) fn arguments() -> Result<Args, Refused> {
    let matches = parse(&args::command())?;
    Args::from_arg_matches(&matches).map_err(Refused::Arguments)
}

/// The arguments of this process, with the defaults of the file.
pub(crate) fn parse(command: &Command) -> Result<ArgMatches, Refused> {
    let typed: Vec<OsString> = std::env::args_os().collect();
    let parse = |args: &[OsString]| command.clone().try_get_matches_from(args);
    // A help or a version is an error here too. All other errors can wait: an option of the file may be what is missing.
    let partial = command.clone().ignore_errors(true).try_get_matches_from(&typed);
    let partial = partial.map_err(Refused::Arguments)?;
    use_json_if_set(&partial);
    let named = partial.subcommand().filter(|(name, _)| !WITHOUT_FILE.contains(name));
    let (Some((name, set)), Some(at)) = (named, position_of_command(command, &typed)) else {
        return parse(&typed).map_err(Refused::Arguments);
    };
    let Some(File { path, text, is_for_others, changed_by }) = File::read().map_err(Refused::File)? else {
        return parse(&typed).map_err(Refused::Arguments);
    };
    let refused = |what: String| Refused::File(Stop::usage(format!("{}: {what}", path.display())));
    let defaults = options(command, name, set, &text).map_err(refused)?;
    let mut args = typed.clone();
    args.splice(at..at, defaults.arguments);
    let parsed = parse(&args).map_err(|error| match parse(&typed) {
        // What was typed is wrong, whatever the file says.
        Err(typed) if typed.kind() != ErrorKind::MissingRequiredArgument => Refused::Arguments(typed),
        Err(_) if error.kind() == ErrorKind::MissingRequiredArgument => Refused::Arguments(error),
        _ => refused(complaint(error)),
    })?;
    let warn = |what: &str| {
        use_json_if_set(&parsed);
        message(Level::Warn, "configuration", format_args!("{}: {what}", path.display()));
    };
    if defaults.leaves_out_bridge {
        warn(
            "its bridge is not used, because a lock as typed can't have it: programs that use the other lock are not excluded",
        );
    }
    if let Some(others) = changed_by {
        warn(&format!("warning: {others}, and it may name commands that run as you: chown or chmod it"));
    }
    if defaults.has_password && is_for_others {
        warn("warning: it has a password, and every user of this machine may read it: chmod o-r");
    }
    Ok(parsed)
}

fn use_json_if_set(set: &ArgMatches) {
    if set.try_get_one::<LogFormat>("log").ok().flatten() == Some(&LogFormat::Json) {
        output::use_json();
    }
}

/// Where the arguments of the subcommand begin.
fn position_of_command(command: &Command, args: &[OsString]) -> Option<usize> {
    let has_value = |typed: &str| {
        command
            .get_arguments()
            .any(|arg| arg.get_long() == typed.strip_prefix("--") && arg.get_action().takes_values())
    };
    let mut at = 1;
    loop {
        let typed = args.get(at)?.to_str()?;
        if !typed.starts_with('-') {
            return Some(at + 1);
        }
        at += if has_value(typed) { 2 } else { 1 };
    }
}

/// What is wrong, and where. The line itself may contain a password.
fn syntax_error(error: &toml::de::Error, text: &str) -> String {
    let message = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
    match error.span().and_then(|span| text.get(..span.start)) {
        Some(before) => format!("line {}: {message}", before.matches('\n').count() + 1),
        None => message,
    }
}

/// The options of the file that hold for a command and what is set already.
#[derive(Default)]
struct Defaults {
    arguments: Vec<OsString>,
    /// Whether the file has a bridge that can't be used together with what is set.
    leaves_out_bridge: bool,
    /// Whether it has the password of a server, for whatever command.
    has_password: bool,
}

/// All of the file is checked.
fn options(command: &Command, name: &str, set: &ArgMatches, text: &str) -> Result<Defaults, String> {
    let table: Table = text.parse().map_err(|error| syntax_error(&error, text))?;
    let (mut found, mut has_password) = (Vec::new(), false);
    for (key, value) in &table {
        let Value::Table(options) = value else {
            let default = FileOption::new(command, key, value)?;
            has_password |= default.has_password();
            found.push(default);
            continue;
        };
        let Some(sub) = command.find_subcommand(key) else {
            return Err(format!("there is no command {key:?}"));
        };
        for (option, value) in options {
            let default = FileOption::new(sub, option, value).map_err(|what| format!("{key}: {what}"))?;
            has_password |= default.has_password();
            if key == name {
                found.push(default);
            }
        }
    }
    let Some(sub) = command.find_subcommand(name) else { return Ok(Defaults::default()) };
    let set = Set::new(sub, set);
    let has_bridge =
        |found: &[FileOption<'_>]| set.has("bridge") || found.iter().any(|option| option.key == "bridge");
    let had_bridge = has_bridge(&found);
    set.retain_applicable(&mut found);
    let leaves_out_bridge = had_bridge && !has_bridge(&found);
    let arguments = found.iter().flat_map(FileOption::arguments).collect();
    Ok(Defaults { arguments, leaves_out_bridge, has_password })
}
