//! What a doctor says about a store: what was seen of it, and what that means for locks.
//!
//! The stores see and judge; here are only the words for it.

use std::fmt;

/// What was found out about a store, by [`Client::examine`](crate::Client::examine).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Examination {
    /// Everything that a store consists of: its servers, or its file, and what they are together.
    pub subjects: Vec<Subject>,
}

impl Examination {
    /// Whether something was found that can give one lock to two holders, or to nobody any more.
    #[must_use]
    pub fn is_dangerous(&self) -> bool {
        let mut findings = self.subjects.iter().flat_map(|subject| &subject.findings);
        findings.any(|finding| finding.severity == Severity::Danger)
    }
}

/// One part of a store: a server, the sentinels, a file.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Subject {
    /// Which one it is.
    pub name: String,
    /// What was seen of it.
    pub facts: Vec<Fact>,
    /// What that means for locks.
    pub findings: Vec<Finding>,
}

/// Something that was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fact {
    /// What it is.
    pub name: &'static str,
    /// How it is, in words, with its unit.
    pub value: String,
}

/// What something that was seen means for locks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What is the case.
    pub what: String,
    /// Why that matters to locks.
    pub why: String,
    /// What makes it better: a line to be pasted, where one does.
    pub remedy: Option<String>,
}

/// How bad a finding is. The worst is the least, so that it is sorted to the top.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Severity {
    /// One lock can come to have two holders, or locks can't be had.
    Danger,
    /// Something could be better, or could not be seen.
    Advice,
    /// As it should be.
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

impl Subject {
    pub(crate) fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), facts: Vec::new(), findings: Vec::new() }
    }

    pub(crate) fn fact(&mut self, name: &'static str, value: impl fmt::Display) {
        self.facts.push(Fact { name, value: value.to_string() });
    }

    pub(crate) fn danger(&mut self, what: impl Into<String>, why: impl Into<String>, remedy: Option<String>) {
        self.find(Severity::Danger, what, why, remedy);
    }

    pub(crate) fn advice(&mut self, what: impl Into<String>, why: impl Into<String>, remedy: Option<String>) {
        self.find(Severity::Advice, what, why, remedy);
    }

    pub(crate) fn fine(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.find(Severity::Fine, what, why, None);
    }

    fn find(
        &mut self,
        severity: Severity,
        what: impl Into<String>,
        why: impl Into<String>,
        remedy: Option<String>,
    ) {
        self.findings.push(Finding { severity, what: what.into(), why: why.into(), remedy });
    }
}
