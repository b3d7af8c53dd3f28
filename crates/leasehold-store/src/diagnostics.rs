//! The result of diagnosing a store: facts about its components, and what they mean for locks.
//!
//! The stores collect the facts and judge them; this file has only the types.

use std::fmt;

/// The result of `Client::diagnose`.
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let diagnosis = client.diagnose().await?;
/// for component in &diagnosis.components {
///     for finding in &component.findings {
///         println!("{} {}: {}", finding.severity, component.name, finding.what);
///     }
/// }
/// # Ok(()) });
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Diagnosis {
    /// The parts of the store, such as its servers or its file, and an entry for the store as a whole.
    pub components: Vec<Component>,
}

impl Diagnosis {
    /// Of these parts.
    #[must_use]
    pub fn new(components: Vec<Component>) -> Self {
        Self { components }
    }

    /// Whether a finding has [`Severity::Danger`]: two holders of one lock are possible, or locks are unavailable.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// assert!(!client.diagnose().await?.is_dangerous());
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn is_dangerous(&self) -> bool {
        let mut findings = self.components.iter().flat_map(|component| &component.findings);
        findings.any(|finding| finding.severity == Severity::Danger)
    }
}

/// One part of a store: a server, the Sentinels, a cluster, a file.
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// for component in client.diagnose().await?.components {
///     println!("{}: {} facts, {} findings", component.name, component.facts.len(), component.findings.len());
/// }
/// # Ok(()) });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Component {
    /// Its name or address.
    pub name: String,
    /// What was observed.
    pub facts: Vec<Fact>,
    /// What the facts mean for locks.
    pub findings: Vec<Finding>,
}

/// An observed value.
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// for fact in &client.diagnose().await?.components[0].facts {
///     println!("{}: {}", fact.name, fact.value);
/// }
/// # Ok(()) });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Fact {
    /// What was observed.
    pub name: &'static str,
    /// The value, with its unit.
    pub value: String,
}

/// What one or more facts mean for locks.
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// for finding in &client.diagnose().await?.components[0].findings {
///     println!("{} [{}]: {}", finding.what, finding.id, finding.why);
///     if let Some(remedy) = &finding.remedy {
///         println!("> {remedy}");
///     }
/// }
/// # Ok(()) });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Finding {
    /// The check's id, one of [`FINDING_IDS`]. It is stable across versions, and independent of the server and the severity.
    pub id: &'static str,
    /// The severity of the finding.
    pub severity: Severity,
    /// What was found.
    pub what: String,
    /// Why it matters for locks.
    pub why: String,
    /// The fix, as a command to paste if there is one.
    pub remedy: Option<String>,
}

/// The severity of a finding. The most severe is the smallest, so that it sorts first.
///
/// ```
/// use leasehold::Severity;
/// assert!(Severity::Danger < Severity::Advice && Severity::Advice < Severity::Fine);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum Severity {
    /// One lock can get two holders, or locks are unavailable.
    Danger,
    /// A setting should be improved, or could not be read.
    Advice,
    /// Nothing to do.
    Fine,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Danger => "danger",
            Self::Advice => "advice",
            Self::Fine => "fine",
        })
    }
}

impl Component {
    /// A component of which nothing is known yet.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), facts: Vec::new(), findings: Vec::new() }
    }

    /// Adds what was observed.
    pub fn fact(&mut self, name: &'static str, value: impl fmt::Display) {
        self.facts.push(Fact { name, value: value.to_string() });
    }

    /// Adds a finding: two holders of one lock are possible, or locks are unavailable.
    pub fn danger(
        &mut self,
        check: Check,
        what: impl Into<String>,
        why: impl Into<String>,
        remedy: Option<String>,
    ) {
        self.find(check, Severity::Danger, what, why, remedy);
    }

    /// Adds a finding: a setting should be improved, or could not be read.
    pub fn advice(
        &mut self,
        check: Check,
        what: impl Into<String>,
        why: impl Into<String>,
        remedy: Option<String>,
    ) {
        self.find(check, Severity::Advice, what, why, remedy);
    }

    /// Adds a finding with which there is nothing to do.
    pub fn fine(&mut self, check: Check, what: impl Into<String>, why: impl Into<String>) {
        self.find(check, Severity::Fine, what, why, None);
    }

    fn find(
        &mut self,
        check: Check,
        severity: Severity,
        what: impl Into<String>,
        why: impl Into<String>,
        remedy: Option<String>,
    ) {
        self.findings.push(Finding { id: check.id(), severity, what: what.into(), why: why.into(), remedy });
    }
}

/// Declares the checks and their ids in one place, so that none is without an id.
macro_rules! checks {
    ($($check:ident => $id:literal,)*) => {
        /// The checks of a store, the most severe first: no lock can be acquired; two holders are possible; the rest.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        #[allow(missing_docs, reason = "the ids say what they are")]
        pub enum Check { $($check),* }

        impl Check {
            fn id(self) -> &'static str {
                match self { $(Self::$check => $id),* }
            }
        }

        /// The ids of all findings. Findings of the same severity are reported in this order. The
        /// guide to operations explains each.
        ///
        /// ```
        /// assert!(leasehold::FINDING_IDS.contains(&"eviction"));
        /// ```
        pub const FINDING_IDS: &[&str] = &[$($id),*];
    };
}

checks! {
    Integrity => "integrity",
    SharedLog => "shared-log",
    LockTrial => "lock-trial",
    QuorumUnreachable => "quorum-unreachable",
    Replica => "replica",
    OldVersion => "old-version",
    ClusterDown => "cluster-down",
    UncoveredSlots => "uncovered-slots",
    SentinelsDisagree => "sentinels-disagree",
    UnnamedSentinels => "unnamed-sentinels",
    DependentNodes => "dependent-nodes",
    DiskWrite => "disk-write",
    DiskSpace => "disk-space",
    TooFewReplicas => "too-few-replicas",
    Rights => "rights",
    Eviction => "eviction",
    Clock => "clock",
    ClocksApart => "clocks-apart",
    TokenClock => "token-clock",
    NoFailover => "no-failover",
    MinReplicas => "min-replicas",
    Persistence => "persistence",
    ForgetfulNode => "forgetful-node",
    Fsync => "fsync",
    Encryption => "encryption",
    NotExamined => "not-examined",
    SilentSentinel => "silent-sentinel",
    Info => "info",
    Config => "config",
    OptionalRights => "optional-rights",
    NoReplica => "no-replica",
    ClusterReplicas => "cluster-replicas",
    ReplicaLink => "replica-link",
    FewSentinels => "few-sentinels",
    SentinelQuorum => "sentinel-quorum",
    FewNodes => "few-nodes",
    EvenNodes => "even-nodes",
    MemoryUse => "memory-use",
    MaxClients => "max-clients",
    IdleTimeout => "idle-timeout",
    TcpKeepalive => "tcp-keepalive",
    OutputBuffer => "output-buffer",
    Pooler => "pooler",
    Proxy => "proxy",
    ProxyMessages => "proxy-messages",
    RoundTrip => "round-trip",
    LockCost => "lock-cost",
    SlowCommands => "slow-commands",
    ForeignLocks => "foreign-locks",
    LogSize => "log-size",
    ContainerFileSystem => "container-file-system",
    Sentinels => "sentinels",
    Cluster => "cluster",
    Quorum => "quorum",
    Durability => "durability",
    InProcess => "in-process",
}

impl Finding {
    /// The sort key of findings: the most severe first, then in the order of [`FINDING_IDS`].
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let mut findings = client.diagnose().await?.components.remove(0).findings;
    /// findings.sort_by_key(leasehold::Finding::rank);
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn rank(&self) -> (Severity, usize) {
        (self.severity, FINDING_IDS.iter().position(|id| *id == self.id).unwrap_or(FINDING_IDS.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finding_ids_are_unique_and_ranked_by_severity() {
        let mut ids = FINDING_IDS.to_vec();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), FINDING_IDS.len());
        let mut component = Component::new("server");
        component.fine(Check::Integrity, "", "");
        component.advice(Check::Replica, "", "", None);
        component.danger(Check::Persistence, "", "", None);
        component.danger(Check::Replica, "", "", None);
        component.findings.sort_by_key(Finding::rank);
        let sorted: Vec<_> =
            component.findings.iter().map(|finding| (finding.severity, finding.id)).collect();
        assert_eq!(
            sorted,
            [
                (Severity::Danger, "replica"),
                (Severity::Danger, "persistence"),
                (Severity::Advice, "replica"),
                (Severity::Fine, "integrity")
            ]
        );
    }
}
