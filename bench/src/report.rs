//! The results of a measurement: as text while it runs, or as one JSON value at the end.

use serde_json::{Value, json};

use crate::show;

/// The results of a measurement.
pub struct Report {
    is_json: bool,
    found: Vec<Value>,
}

impl Report {
    /// Prints results at once, or collects them for one JSON value.
    #[must_use]
    pub const fn new(is_json: bool) -> Self {
        Self { is_json, found: Vec::new() }
    }

    /// The title of the following figures.
    pub fn title(&mut self, title: &str) {
        if !self.is_json {
            println!("\n{title}");
        }
        self.found.push(json!({ "title": title, "figures": [], "bars": [], "missing": [] }));
    }

    /// A time, with its ratio to the first one.
    pub fn time(&mut self, name: &str, seconds: f64, ratio: f64) {
        self.say(&format!("  {name:<52} {:>12}   {ratio:6.2} x", show(seconds)));
        self.add("figures", json!({ "name": name, "seconds": seconds, "ratio": ratio }));
    }

    /// Any other figure.
    pub fn figure(&mut self, name: &str, value: f64, unit: &str) {
        self.say(&format!("  {name:<52} {value:>12.3} {unit}"));
        self.add("figures", json!({ "name": name, "value": value, "unit": unit }));
    }

    /// A contestant that could not take part.
    pub fn missing(&mut self, name: &str, why: &str) {
        self.say(&format!("  {name} is missing: {why}"));
        self.add("missing", json!({ "name": name, "why": why }));
    }

    /// Checks a promise with an upper limit.
    pub fn at_most(&mut self, promise: &str, measured: f64, limit: f64) {
        self.bar(promise, measured, limit, measured <= limit, "at most");
    }

    /// Checks a promise with a lower limit.
    pub fn at_least(&mut self, promise: &str, measured: f64, limit: f64) {
        self.bar(promise, measured, limit, measured >= limit, "at least");
    }

    fn bar(&mut self, promise: &str, measured: f64, limit: f64, is_kept: bool, word: &str) {
        let verdict = if is_kept { "kept" } else { "MISSED" };
        self.say(&format!("  -> {promise}: {measured:.3} of {word} {limit}: {verdict}"));
        self.add("bars", json!({ "promise": promise, "measured": measured, word: limit, "kept": is_kept }));
    }

    fn say(&self, line: &str) {
        if !self.is_json {
            println!("{line}");
        }
    }

    fn add(&mut self, list: &str, value: Value) {
        if self.found.is_empty() {
            self.found.push(json!({ "title": "", "figures": [], "bars": [], "missing": [] }));
        }
        if let Some(Value::Array(all)) = self.found.last_mut().and_then(|last| last.get_mut(list)) {
            all.push(value);
        }
    }

    /// Prints the JSON value, if there is one.
    pub fn end(self) {
        if self.is_json {
            println!("{}", Value::Array(self.found));
        }
    }
}
