//! The variants of the scripts for the kinds of deployment.

use std::sync::LazyLock;

use crate::keys::{inbox_prefix, scratch_key};
use crate::script::{PLAIN_CHANNELS, SHARDED_CHANNELS, SLOT_GUARD, Script};

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
}

impl ScriptVariant {
    /// Every variant.
    pub const ALL: [Self; 4] =
        [Self::Server, Self::Voter, Self::Cluster(Channels::Plain), Self::Cluster(Channels::Sharded)];

    /// Whether commands go to a cluster.
    #[must_use]
    pub const fn is_cluster(self) -> bool {
        matches!(self, Self::Cluster(_))
    }

    /// Whether the server is a quorum node.
    #[must_use]
    pub const fn is_voter(self) -> bool {
        matches!(self, Self::Voter)
    }

    /// The channels of the inboxes.
    #[must_use]
    pub const fn channels(self) -> Channels {
        match self {
            Self::Server | Self::Voter => Channels::Plain,
            Self::Cluster(channels) => channels,
        }
    }

    /// The text of a script.
    #[must_use]
    pub fn text(self, script: Script) -> String {
        script.text(&self.inboxes(), self.is_voter())
    }

    /// The scripts' constants for inboxes. In a cluster the channel depends on the slot and is an argument, and the slot may move.
    fn inboxes(self) -> String {
        let commands = match self.channels() {
            Channels::Plain => PLAIN_CHANNELS,
            Channels::Sharded => SHARDED_CHANNELS,
        };
        let name =
            if self.is_cluster() { "ARGV[#ARGV]".to_owned() } else { format!("'{}'", inbox_prefix(None)) };
        // No call declares the scratch: it would cost 26 bytes, and refuse every call while a slot of a cluster is being moved.
        let scratch = match self.is_cluster() {
            true => "string.gsub(KEYS[2], 'clock', 'scratch', 1)".to_owned(),
            false => format!("'{}'", scratch_key(None)),
        };
        let guard = if self.is_cluster() { SLOT_GUARD } else { "" };
        format!("{commands}local INBOX = {name}\nlocal SCRATCH = {scratch}\n{guard}")
    }

    const fn index(self) -> usize {
        match self {
            Self::Server => 0,
            Self::Voter => 1,
            Self::Cluster(Channels::Plain) => 2,
            Self::Cluster(Channels::Sharded) => 3,
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
static SOURCES: LazyLock<[[ScriptSource; 4]; 9]> = LazyLock::new(|| {
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
                assert_eq!(text.contains("local INBOX = ARGV[#ARGV]\n"), variant.is_cluster(), "{variant:?}");
                let is_sharded = variant.channels() == Channels::Sharded;
                assert_eq!(text.contains("'SPUBLISH'"), is_sharded, "{variant:?}");
            }
        }
    }

    #[test]
    fn client_subscribes_to_the_channels_on_which_the_scripts_publish() {
        let plain = ("SUBSCRIBE", "local NUMSUB, PUBLISH = 'NUMSUB', 'PUBLISH'\n");
        let sharded = ("SSUBSCRIBE", "local NUMSUB, PUBLISH = 'SHARDNUMSUB', 'SPUBLISH'\n");
        for (variant, (subscribe, publish)) in
            ScriptVariant::ALL.into_iter().zip([plain, plain, plain, sharded])
        {
            assert_eq!(variant.channels().subscribe_command(), subscribe, "{variant:?}");
            let text = variant.text(Script::Acquire);
            assert!(text.contains(publish), "{variant:?}");
            let inbox = "local INBOX = 'leasehold:4:inbox:'\n";
            assert_eq!(text.contains(inbox), !variant.is_cluster(), "{variant:?}");
        }
    }
}
