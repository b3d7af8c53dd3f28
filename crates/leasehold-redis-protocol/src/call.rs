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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use leasehold_core::{Acquire, Acquisition, ClientId, Command, Kind, Name, Renew, Resource};

    use super::*;
    use crate::encode::{Expectation, VoteArgs};
    use crate::variant::Channels;

    const ACQUISITION: Acquisition = Acquisition { client: ClientId::new(7), sequence: 1 };
    const TTL: Duration = Duration::from_secs(10);

    #[test]
    fn call_has_the_text_and_the_sha1_of_its_variants_script() {
        for variant in ScriptVariant::ALL {
            for script in Script::ALL {
                let call = ScriptCall::new(variant, script, 0, 0);
                assert_eq!((call.script(), call.text()), (script, variant.text(script).as_str()));
                assert_eq!(call.sha1(), sha1_smol::Sha1::from(call.text()).digest().to_string());
            }
        }
    }

    #[test]
    fn keys_and_arguments_are_returned_as_they_were_appended() {
        let mut call = ScriptCall::new(ScriptVariant::Server, Script::Renew, 0, 0);
        call.push_key(b"first");
        call.push_key(b"2");
        for arg in [b"".as_slice(), b"third", b"4"] {
            call.push_arg(|bytes| bytes.extend(arg));
        }
        assert_eq!(call.keys().collect::<Vec<_>>(), [b"first".as_slice(), b"2"]);
        assert_eq!(call.args().collect::<Vec<_>>(), [b"".as_slice(), b"third", b"4"]);
        assert_eq!((call.keys().len(), call.args().len(), call.size()), (2, 3, 12));
    }

    /// Asserts that neither of the call's vectors has grown or has much spare room. A vector that grows doubles its capacity.
    #[track_caller]
    fn assert_allocated_once(call: &ScriptCall, resources: usize) {
        assert_eq!(call.ends.capacity(), call.ends.len(), "parts");
        let spare = call.bytes.capacity() - call.size();
        assert!(spare <= 250 * resources, "{spare} of {} bytes are spare", call.bytes.capacity());
    }

    #[test]
    fn encoded_call_is_allocated_once() {
        let resource = Resource { kind: Kind::Mutex, name: Name::new(&"n".repeat(200)).unwrap() };
        let metadata = Arc::from("m".repeat(1_000));
        let acquire = Command::from(Acquire { metadata, ..Acquire::exclusive(ACQUISITION, TTL) });
        let run_id = "r".repeat(2_000);
        let vote_args = VoteArgs { floor: None, abstains_for: Some(TTL), run_id: &run_id };
        assert_allocated_once(
            &ScriptVariant::Voter.encode(&resource, &acquire, vote_args, Expectation::default()),
            1,
        );

        let attempts = [(&resource, &acquire); 5];
        let cluster = ScriptVariant::Cluster(Channels::Sharded);
        assert_allocated_once(&cluster.encode_acquire_all(attempts.into_iter()), 5);

        let renew = Renew::to(ACQUISITION, TTL);
        let renewals = [(&resource, &renew); 5];
        assert_allocated_once(&ScriptVariant::Voter.encode_renewals(&renewals, vote_args), 5);
    }
}
