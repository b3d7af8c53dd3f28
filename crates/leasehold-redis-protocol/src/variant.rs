//! The variants of the scripts for the kinds of deployment.

use std::sync::LazyLock;

use crate::keys::{inbox_prefix, scratch_key};
use crate::script::{NOT_DRAWN, SLOT_GUARD, Script};

/// Around a script for a proxy.
const RESTRICTED: &str = include_str!("scripts/restricted.lua");
const USE_SCRIPT: &str = "--@use script\n";

/// Pub/sub channels of the clients' inboxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channels {
    /// Channels that every node serves: single servers, and clusters before Redis 7.
    Plain,
    /// Sharded channels, which stay on the nodes of the slot.
    Sharded,
}

impl Channels {
    /// The command that subscribes to such a channel.
    #[must_use]
    pub const fn subscribe_command(self) -> &'static str {
        match self {
            Self::Plain => "SUBSCRIBE",
            Self::Sharded => "SSUBSCRIBE",
        }
    }
}

/// Variant of the scripts for a kind of deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScriptVariant {
    /// A single server, or a master with replicas.
    Server,
    /// One node of a quorum of independent servers.
    Voter,
    /// A cluster, in which each hash slot has its own inboxes.
    Cluster(Channels),
    /// A cluster behind a proxy, or a managed server, that restricts what scripts may do: these do without `TIME`, `PUBLISH` and `PUBSUB`,
    /// and use no key that is not declared. A reply may carry messages that the client is to publish: [`decode_outbox`](crate::decode_outbox).
    Restricted,
}

impl ScriptVariant {
    /// Every variant.
    pub const ALL: [Self; 5] = [
        Self::Server,
        Self::Voter,
        Self::Cluster(Channels::Plain),
        Self::Cluster(Channels::Sharded),
        Self::Restricted,
    ];

    /// Whether each hash slot has keys of its own, because a command may only use those of one.
    #[must_use]
    pub const fn is_cluster(self) -> bool {
        matches!(self, Self::Cluster(_) | Self::Restricted)
    }

    /// Whether the scripts do without what a proxy may refuse.
    #[must_use]
    pub const fn is_restricted(self) -> bool {
        matches!(self, Self::Restricted)
    }

    /// Whether the scripts publish in inboxes whose names are an argument.
    pub(crate) const fn names_inbox(self) -> bool {
        matches!(self, Self::Cluster(_))
    }

    /// Whether the server is a quorum node.
    #[must_use]
    pub const fn is_voter(self) -> bool {
        matches!(self, Self::Voter)
    }

    /// The channels of the inboxes, if scripts publish there.
    #[must_use]
    pub const fn channels(self) -> Channels {
        match self {
            Self::Server | Self::Voter | Self::Restricted => Channels::Plain,
            Self::Cluster(channels) => channels,
        }
    }

    /// The text of a script.
    #[must_use]
    pub fn text(self, script: Script) -> String {
        let text = script.text(&self.constants(), self.is_voter());
        let text = match (self, text.strip_prefix(NOT_DRAWN)) {
            (Self::Restricted, Some(script)) => [NOT_DRAWN, &RESTRICTED.replace(USE_SCRIPT, script)].concat(),
            _ => text,
        };
        self.in_words(&text)
    }

    /// The scripts' constants. In a cluster the channel depends on the slot and is an argument, and the slot may move.
    fn constants(self) -> String {
        // No call declares the scratch: it would cost 26 bytes, and refuse every call while a slot of a cluster is being moved.
        match self {
            Self::Server | Self::Voter => {
                let (inbox, scratch) = (inbox_prefix(None), scratch_key(None));
                format!("local INBOX = '{inbox}'\nlocal SCRATCH = '{scratch}'\n")
            }
            Self::Cluster(_) => {
                let scratch = "string.gsub(KEYS[2], 'clock', 'scratch', 1)";
                format!("local INBOX = ARGV[#ARGV]\nlocal SCRATCH = {scratch}\n{SLOT_GUARD}")
            }
            Self::Restricted => String::new(),
        }
    }

    /// The text with this variant's words: proxies want literal commands, and keys as `KEYS[i]`.
    pub(crate) fn in_words(self, text: &str) -> String {
        if self.is_restricted() {
            // The short name of redis.call, but not the ends of the long ones.
            let text = text.replace("local call = redis.call\n", "").replace("call('", "redis.call('");
            return text
                .replace("redis.redis.call('", "redis.call('")
                .replace("redis.predis.call('", "redis.pcall('")
                .replace("NOW()", "time_of_clock()")
                .replace("NUMSUB(", "subscribers(")
                .replace("PUBLISH(", "publish_later(")
                .replace("SCRATCH", "KEYS[3]")
                .replace("ENDED", "KEYS[4]");
        }
        let (numsub, publish) = match self.channels() {
            Channels::Plain => ("'NUMSUB'", "'PUBLISH'"),
            Channels::Sharded => ("'SHARDNUMSUB'", "'SPUBLISH'"),
        };
        let ended =
            "'leasehold:4:ended' .. string.sub(KEYS[1], #'leasehold:4:') .. ':' .. redis.sha1hex(attempt)";
        text.replace("NOW()", "redis.call('TIME')")
            .replace("NUMSUB(", &format!("redis.call('PUBSUB', {numsub}, INBOX .. "))
            .replace("PUBLISH(", &format!("redis.call({publish}, INBOX .. "))
            .replace("ENDED", ended)
    }

    const fn index(self) -> usize {
        match self {
            Self::Server => 0,
            Self::Voter => 1,
            Self::Cluster(Channels::Plain) => 2,
            Self::Cluster(Channels::Sharded) => 3,
            Self::Restricted => 4,
        }
    }

    /// The script's text and hash.
    pub(crate) fn source(self, script: Script) -> &'static ScriptSource {
        &SOURCES[script as usize][self.index()]
    }
}

/// A script's text and its SHA-1.
#[derive(Debug)]
pub(crate) struct ScriptSource {
    pub(crate) text: String,
    pub(crate) sha1: String,
}

/// By script and variant.
static SOURCES: LazyLock<[[ScriptSource; 5]; 9]> = LazyLock::new(|| {
    Script::ALL.map(|script| {
        ScriptVariant::ALL.map(|variant| {
            let text = variant.text(script);
            let sha1 = sha1_smol::Sha1::from(&text).digest().to_string();
            ScriptSource { text, sha1 }
        })
    })
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_script_is_found_under_its_own_variant() {
        for (at, script) in Script::ALL.into_iter().enumerate() {
            assert_eq!(script as usize, at);
            for (at, variant) in ScriptVariant::ALL.into_iter().enumerate() {
                assert_eq!(variant.index(), at);
                assert_eq!(variant.source(script).text, variant.text(script));
            }
        }
    }

    #[test]
    fn scripts_are_named_by_the_sha1_of_their_text() {
        assert_eq!(
            sha1_smol::Sha1::from("return 1").digest().to_string(),
            "e0e1f9fabfc9d4800c877a703b823ac0578ff8db"
        );
        let source = ScriptVariant::Server.source(Script::Acquire);
        assert_eq!(source.sha1, sha1_smol::Sha1::from(&source.text).digest().to_string());
    }

    #[test]
    fn only_a_voter_reads_a_floor_and_only_a_cluster_an_inbox() {
        for script in [Script::Acquire, Script::Renew, Script::Release, Script::Inspect, Script::ForceRelease]
        {
            for variant in ScriptVariant::ALL {
                let text = variant.text(script);
                assert_eq!(text.contains("local floor = 0\n"), !variant.is_voter(), "{script:?} {variant:?}");
                assert_eq!(
                    text.contains("local INBOX = ARGV[#ARGV]\n"),
                    variant.names_inbox(),
                    "{variant:?}"
                );
                let is_sharded = variant == ScriptVariant::Cluster(Channels::Sharded);
                assert_eq!(text.contains("'SPUBLISH'"), is_sharded, "{variant:?}");
            }
        }
    }

    #[test]
    fn client_subscribes_to_the_channels_on_which_the_scripts_publish() {
        let plain =
            ("SUBSCRIBE", "redis.call('PUBLISH', INBOX .. ", "redis.call('PUBSUB', 'NUMSUB', INBOX .. ");
        let sharded = (
            "SSUBSCRIBE",
            "redis.call('SPUBLISH', INBOX .. ",
            "redis.call('PUBSUB', 'SHARDNUMSUB', INBOX .. ",
        );
        for (variant, (subscribe, publish, count)) in
            ScriptVariant::ALL.into_iter().zip([plain, plain, plain, sharded])
        {
            assert_eq!(variant.channels().subscribe_command(), subscribe, "{variant:?}");
            let text = variant.text(Script::Acquire);
            assert!(text.contains(publish) && text.contains(count), "{variant:?}");
            let inbox = "local INBOX = 'leasehold:4:inbox:'\n";
            assert_eq!(text.contains(inbox), !variant.is_cluster(), "{variant:?}");
        }
    }

    /// The commands of the scripts for a proxy, each with what follows its opening parenthesis.
    fn commands_of(text: &str) -> impl Iterator<Item = &str> {
        let lines = text.lines().map(|line| line.split("--").next().unwrap_or_default());
        lines.flat_map(|line| {
            line.match_indices("call(")
                .filter(|(at, _)| line[..*at].ends_with("redis.") || line[..*at].ends_with("redis.p"))
                .map(|(at, _)| &line[at + 5..])
        })
    }

    #[test]
    fn scripts_for_a_proxy_have_literal_commands_and_declared_keys_only() {
        const FORBIDDEN: [&str; 5] = ["'TIME'", "'PUBLISH'", "'SPUBLISH'", "'PUBSUB'", "'SCRIPT'"];
        for script in [Script::Acquire, Script::Renew, Script::Release, Script::Inspect, Script::ForceRelease]
        {
            let text = ScriptVariant::Restricted.text(script);
            let commands: Vec<&str> = commands_of(&text).collect();
            assert!(commands.len() > 10, "{script:?}");
            for command in commands {
                assert!(!FORBIDDEN.iter().any(|word| command.starts_with(word)), "{script:?}: {command}");
                let (word, rest) =
                    command.split_once(", ").unwrap_or_else(|| panic!("{script:?}: {command}"));
                let is_literal = word.starts_with('\'') && word.ends_with('\'');
                assert!(is_literal && rest.starts_with("KEYS["), "{script:?}: {command}");
            }
            // No other name of the functions that call commands.
            let code: String = text.lines().map(|line| line.split("--").next().unwrap_or_default()).collect();
            let named = code.matches("redis.call").count() + code.matches("redis.pcall").count();
            let called = code.matches("redis.call('").count() + code.matches("redis.pcall('").count();
            assert_eq!(named, called, "{script:?}");
            assert!(
                !code.contains("PUBLISH")
                    && !code.contains("NUMSUB")
                    && !code.contains("SCRATCH")
                    && !code.contains("ENDED")
            );
        }
    }
}
