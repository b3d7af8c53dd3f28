//! The configuration file: defaults for options that neither the command line nor the environment sets.
//!
//! Its keys are the names of the long options, at the top those of every command (`store`, `log`), and in a table those of the
//! command with that name. An option of the file is only a default: it conflicts with nothing.

use std::path::PathBuf;

use clap::{Arg, Command};
use etcetera::BaseStrategy as _;
use toml::{Table, Value};

use crate::exit::Stop;

/// The variable that names another file.
const VARIABLE: &str = "LEASEHOLD_CONFIG";

/// Sets the defaults that the file contains.
pub(crate) fn apply(command: Command) -> Result<Command, Stop> {
    let Some((path, text)) = read()? else { return Ok(command) };
    let refused = |what: String| Stop::usage(format!("{}: {what}", path.display()));
    let table: Table =
        text.parse().map_err(|error: toml::de::Error| refused(one_line(&error.to_string())))?;
    table.into_iter().try_fold(command, |command, (key, value)| set(command, &key, value)).map_err(refused)
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The file, if there is one. A file that was named must be there.
fn read() -> Result<Option<(PathBuf, String)>, Stop> {
    let named = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    let usual = || Some(etcetera::base_strategy::Xdg::new().ok()?.config_dir().join("leasehold/config.toml"));
    let is_named = named.is_some();
    let Some(path) = named.or_else(usual) else { return Ok(None) };
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some((path, text))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !is_named => Ok(None),
        Err(error) => Err(Stop::usage(format!("{}: it can't be read: {error}", path.display()))),
    }
}

fn set(command: Command, key: &str, value: Value) -> Result<Command, String> {
    let Value::Table(options) = value else { return set_option(command, key, &value) };
    if command.find_subcommand(key).is_none() {
        return Err(format!("there is no command {key:?}"));
    }
    let mut failed = None;
    let command = command.mut_subcommand(key, |sub| {
        let set_all = |sub: Command| {
            options.iter().try_fold(sub, |sub, (option, value)| set_option(sub, option, value))
        };
        let same = sub.clone();
        set_all(sub).unwrap_or_else(|what| {
            failed = Some(format!("{key}: {what}"));
            same
        })
    });
    failed.map_or(Ok(command), Err)
}

fn set_option(command: Command, key: &str, value: &Value) -> Result<Command, String> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Boolean(is_on) => is_on.to_string(),
        _ => return Err(format!("{key} is a text, a number, true or false")),
    };
    let is_meant = |arg: &&Arg| arg.get_long() == Some(key);
    let Some(id) = command.get_arguments().find(is_meant).map(|arg| arg.get_id().clone()) else {
        return Err(format!("there is no option --{key}"));
    };
    Ok(command.mut_arg(id, |arg| arg.default_value(text)))
}
