//! The release of a plain lease without a script, on servers that delete a key by its value.

use leasehold_core::Release;

use crate::encode::{is_plain, push_acquire};
use crate::layout::push_mark;

/// A command that deletes a key if it has this value. It returns the number of deleted keys, and an error if the key is not a
/// string: DELIFEQ returns WRONGTYPE, and DELEX returns ERR. If it did not delete the key, the script decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConditionalDelete {
    /// `DELIFEQ key value`, since Valkey 9.
    DelIfEq,
    /// `DELEX key IFEQ value`, since Redis 8.4.
    DelEx,
}

impl ConditionalDelete {
    /// The one of a server with this reply to `INFO server`, if it has one. Its user may lack the right.
    #[must_use]
    pub fn of_server(info: &str) -> Option<Self> {
        if let Some(valkey) = version(info, "valkey_version:") {
            return (valkey >= (9, 0)).then_some(Self::DelIfEq);
        }
        version(info, "redis_version:").filter(|redis| *redis >= (8, 4)).map(|_| Self::DelEx)
    }

    /// The command's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::DelIfEq => "DELIFEQ",
            Self::DelEx => "DELEX",
        }
    }

    /// The words of the command.
    pub fn words<'a>(self, key: &'a [u8], value: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        let condition = match self {
            Self::DelIfEq => None,
            Self::DelEx => Some("IFEQ".as_bytes()),
        };
        [Some(self.name().as_bytes()), Some(key), condition, Some(value)].into_iter().flatten()
    }
}

/// Major and minor version.
fn version(info: &str, name: &str) -> Option<(u32, u32)> {
    let text = info.lines().find_map(|line| line.strip_prefix(name))?;
    let mut numbers = text.trim().split('.').map_while(|part| part.parse().ok());
    Some((numbers.next()?, numbers.next().unwrap_or(0)))
}

/// The value that the first lines of `acquire.lua` have stored for the lease, if it is to be deleted and nothing else. `None` if
/// only the script can release it.
#[must_use]
pub fn plain_value(release: &Release) -> Option<Vec<u8>> {
    let (acquire, token) = release.as_granted.as_ref()?;
    if !is_plain(release) {
        return None;
    }
    let mut value = Vec::with_capacity(acquire.metadata.len() + 100);
    push_acquire(&mut value, acquire);
    push_mark(&mut value, *token);
    Some(value)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use leasehold_core::{Acquire, Acquisition, ClientId, Token};

    use super::*;
    use crate::layout::{PLAIN_MARK, TOKENS_PER_MS};
    use crate::script::Script;
    use crate::variant::ScriptVariant;

    #[test]
    fn version_tells_which_command_a_server_has() {
        let of = ConditionalDelete::of_server;
        let valkey =
            |version| format!("redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:{version}\r\n");
        assert_eq!(of(&valkey("8.1.3")), None);
        assert_eq!(of(&valkey("9.0.0")), Some(ConditionalDelete::DelIfEq));
        assert_eq!(of(&valkey("10.1.0-rc1")), Some(ConditionalDelete::DelIfEq));
        assert_eq!(of("redis_version:8.2.1\r\n"), None);
        assert_eq!(of("redis_version:8.4.0\r\n"), Some(ConditionalDelete::DelEx));
        assert_eq!(of("redis_version:10.0.0\r\n"), Some(ConditionalDelete::DelEx));
        assert_eq!(of("redis_version:unstable\r\n"), None);
        assert_eq!(of(""), None);
    }

    #[test]
    fn each_command_has_its_own_words() {
        let words = |delete: ConditionalDelete| {
            let words: Vec<_> = delete.words(b"k", b"v").map(|word| String::from_utf8_lossy(word)).collect();
            words.join(" ")
        };
        assert_eq!(words(ConditionalDelete::DelIfEq), "DELIFEQ k v");
        assert_eq!(words(ConditionalDelete::DelEx), "DELEX k IFEQ v");
    }

    #[test]
    fn plain_value_is_what_the_first_lines_of_acquire_store() {
        let acquisition = Acquisition { client: ClientId::new(1), sequence: 2 };
        let acquire = Acquire {
            metadata: Arc::from("{}"),
            ..Acquire::exclusive(acquisition, Duration::from_micros(9))
        };
        let token = Token::new(1_700_000_000_000 * TOKENS_PER_MS + 7).unwrap();
        let release =
            Release { as_granted: Some((Arc::new(acquire.clone()), token)), ..Release::now(acquisition) };
        let mut expected = Vec::new();
        push_acquire(&mut expected, &acquire);
        expected.extend(b" leasehold:4@1700000000000-7");
        assert_eq!(plain_value(&release), Some(expected));
        let second = Duration::from_secs(1);
        assert_eq!(plain_value(&Release { min_hold: second, ..release.clone() }), None);
        assert_eq!(plain_value(&Release { tombstone: second, ..release.clone() }), None);
        assert_eq!(plain_value(&Release { as_granted: None, ..release }), None);
        let text = ScriptVariant::Server.text(Script::Acquire);
        assert!(text.contains(&format!("ARGV[1] .. '{PLAIN_MARK}' .. id")), "{text}");
    }
}
