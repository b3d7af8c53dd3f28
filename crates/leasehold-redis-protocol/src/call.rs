//! One script call: what a client sends after EVALSHA or EVAL.

use crate::script::Script;
use crate::variant::{ScriptSource, ScriptVariant};

/// A script with its keys and arguments.
///
/// A client sends `EVALSHA sha1 number-of-keys key… arg…`. After the error NOSCRIPT it sends the same call with `EVAL` and
/// the text. Every command has the id of its attempt, so a repeated call has no further effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScriptCall {
    variant: ScriptVariant,
    script: Script,
    keys: usize,
    /// Keys and arguments, one behind the other: one allocation for all.
    bytes: Vec<u8>,
    /// Where each of them ends.
    ends: Vec<usize>,
}

impl ScriptCall {
    /// An empty call. `parts` and `bytes` are the expected number and total size of its keys and arguments.
    pub(crate) fn new(variant: ScriptVariant, script: Script, parts: usize, bytes: usize) -> Self {
        Self { variant, script, keys: 0, bytes: Vec::with_capacity(bytes), ends: Vec::with_capacity(parts) }
    }

    /// Appends a key. All keys come before the first argument.
    pub(crate) fn push_key(&mut self, key: &[u8]) {
        debug_assert_eq!(self.keys, self.ends.len(), "keys come before arguments");
        self.keys += 1;
        self.push_arg(|bytes| bytes.extend(key));
    }

    /// Appends the argument that `write` writes.
    pub(crate) fn push_arg(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.bytes);
        self.ends.push(self.bytes.len());
    }

    /// The script.
    #[must_use]
    pub const fn script(&self) -> Script {
        self.script
    }

    fn source(&self) -> &'static ScriptSource {
        self.variant.source(self.script)
    }

    /// The script's text, for EVAL.
    #[must_use]
    pub fn text(&self) -> &'static str {
        &self.source().text
    }

    /// The SHA-1 of the text in hexadecimal digits, for EVALSHA.
    #[must_use]
    pub fn sha1(&self) -> &'static str {
        &self.source().sha1
    }

    /// The keys, in order.
    #[must_use]
    pub fn keys(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        (0..self.keys).map(|at| self.part(at))
    }

    /// The arguments, in order.
    #[must_use]
    pub fn args(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        (self.keys..self.ends.len()).map(|at| self.part(at))
    }

    /// Total size of keys and arguments, in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    fn part(&self, at: usize) -> &[u8] {
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        &self.bytes[start..self.ends[at]]
    }
}
