//! One option of the file, as it would be typed.

use std::ffi::OsString;

use clap::{Arg, ArgAction, Command};
use toml::Value;

use crate::store::Store;

/// Options that say what a single command is about, and are therefore no defaults.
const NO_DEFAULTS: [&str; 3] = ["force", "name", "token"];

/// A single value as it would be typed.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::Boolean(is_on) => Some(is_on.to_string()),
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        _ => None,
    }
}

/// An option of the file.
pub(super) struct FileOption<'a> {
    pub(super) arg: &'a Arg,
    pub(super) key: &'a str,
    /// A text, or whether a flag is set. Only an option that can be repeated has several.
    pub(super) values: Vec<String>,
}

impl<'a> FileOption<'a> {
    pub(super) fn new(command: &'a Command, key: &'a str, value: &Value) -> Result<Self, String> {
        let is_meant = |arg: &&Arg| arg.get_long() == Some(key);
        let Some(arg) = command.get_arguments().find(is_meant) else {
            return Err(format!("there is no option --{key}"));
        };
        if NO_DEFAULTS.contains(&key) {
            return Err(format!("--{key} can't be a default"));
        }
        if !arg.get_action().takes_values() && !value.is_bool() {
            return Err(format!("{key} is true or false"));
        }
        let values = match (value, arg.get_action()) {
            (Value::Array(list), ArgAction::Append) => list.iter().map(text).collect(),
            _ => text(value).map(|value| vec![value]),
        };
        let is_repeatable = matches!(arg.get_action(), ArgAction::Append);
        let or_list = if is_repeatable { ", or a list of them" } else { "" };
        let values = values.ok_or_else(|| format!("{key} is a text, a number, true or false{or_list}"))?;
        Ok(Self { arg, key, values })
    }

    /// Whether a value is an address with a password, or a bridge with such addresses.
    pub(super) fn has_password(&self) -> bool {
        let servers = |value: &str| {
            value.split_once('@').map_or(String::new(), |(_, servers)| servers.replace(',', " "))
        };
        self.values.iter().any(|value| match self.key {
            "store" => Store::has_password(value),
            "bridge" => servers(value).split(' ').any(Store::has_password),
            _ => false,
        })
    }

    /// As it would be typed; nothing for a flag that is not set.
    pub(super) fn arguments(&self) -> Vec<OsString> {
        let is_flag = !self.arg.get_action().takes_values();
        let values = self.values.iter().filter(|value| !is_flag || *value == "true");
        let argument = |value: &String| {
            if is_flag { format!("--{}", self.key) } else { format!("--{}={value}", self.key) }
        };
        values.map(|value| argument(value).into()).collect()
    }
}
