//! Who sends a request, and what it may do.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::problem::{Code, Problem};
use crate::rights::{Profile, Right, Rights};

/// Where a request comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// The process that has connected, if the system says which.
    Unix { pid: Option<i32> },
    /// The other end of the connection: the caller, or a proxy before it.
    Tcp(SocketAddr),
}

/// The caller of a request. A request without a token, on a path that needs none, has no caller.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    profile: Arc<Profile>,
    origin: Origin,
}

impl Caller {
    /// A process of this machine. The permissions of the socket have decided that it may do everything.
    pub(crate) fn of_socket(uid: u32, pid: Option<i32>) -> Self {
        let profile = Profile::new(format!("uid {uid}"), Rights::ALL, &[]);
        Self { profile: Arc::new(profile), origin: Origin::Unix { pid } }
    }

    /// A caller over TCP that has shown a token of this profile.
    pub(crate) fn of_token(profile: Arc<Profile>, peer: SocketAddr) -> Self {
        let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
        Self { profile, origin: Origin::Tcp(peer) }
    }

    /// The name of its token; on the Unix socket `uid N`.
    pub(crate) fn name(&self) -> &str {
        &self.profile.name
    }

    /// The host that it calls from: the other end of the connection, or `unix` for a process of this machine.
    pub(crate) fn peer(&self) -> String {
        match self.origin {
            Origin::Unix { pid: Some(pid) } => format!("unix, pid {pid}"),
            Origin::Unix { pid: None } => "unix".to_owned(),
            Origin::Tcp(peer) => peer.ip().to_string(),
        }
    }

    pub(crate) fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Whether it has shown a token, whose callers share limits.
    pub(crate) fn has_token(&self) -> bool {
        matches!(self.origin, Origin::Tcp(_))
    }

    /// Whether it can change nothing.
    pub(crate) fn only_reads(&self) -> bool {
        self.profile.rights == Rights::READ
    }

    /// Whether lists, events and the dashboard show it the lock with this name.
    pub(crate) fn sees(&self, lock: &str) -> bool {
        self.profile.has_name(lock)
    }

    /// Refuses a request for a right that the caller lacks.
    pub(crate) fn has(&self, right: Right) -> Result<(), Problem> {
        if self.profile.rights.has(right) {
            return Ok(());
        }
        let what =
            format!("this needs the right `{}`, which the token {:?} lacks", right.as_str(), self.name());
        Err(Problem::new(Code::MissingRight, what))
    }

    /// Refuses a request for a right that the caller lacks, or for a lock outside of its names.
    pub(crate) fn may(&self, right: Right, lock: &str) -> Result<(), Problem> {
        self.has(right)?;
        if self.sees(lock) {
            return Ok(());
        }
        let what = format!("the token {:?} may not use the name {lock:?}", self.name());
        Err(Problem::new(Code::NameNotAllowed, what))
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.origin {
            Origin::Unix { pid: Some(pid) } => write!(f, "{} (pid {pid})", self.name()),
            Origin::Unix { pid: None } => f.write_str(self.name()),
            Origin::Tcp(peer) => write!(f, "{} at {peer}", self.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caller_is_shown_by_its_token_and_its_peer() {
        let profile = Arc::new(Profile::new("ci", Rights::WRITE, &["jobs:"]));
        let at = |peer: &str| Caller::of_token(profile.clone(), peer.parse().unwrap()).to_string();
        assert_eq!(at("10.0.0.5:4242"), "ci at 10.0.0.5:4242");
        assert_eq!(at("[::ffff:10.0.0.5]:4242"), "ci at 10.0.0.5:4242");
        assert_eq!(Caller::of_socket(1000, Some(77)).to_string(), "uid 1000 (pid 77)");
        assert_eq!(Caller::of_socket(1000, None).to_string(), "uid 1000");
    }

    #[test]
    fn refusal_names_the_right_and_the_lock_and_no_prefix() {
        let profile = Arc::new(Profile::new("ci", Rights::WRITE, &["jobs:"]));
        let caller = Caller::of_token(profile, "10.0.0.5:4242".parse().unwrap());
        assert!(caller.may(Right::Write, "jobs:1").is_ok() && caller.sees("jobs:1"));
        let refused = caller.may(Right::Force, "jobs:1").unwrap_err();
        assert_eq!(refused.code, Code::MissingRight);
        assert!(refused.detail.contains("`force`"), "{}", refused.detail);
        let refused = caller.may(Right::Read, "orders").unwrap_err();
        assert_eq!(refused.code, Code::NameNotAllowed);
        assert!(
            refused.detail.contains("\"orders\"") && !refused.detail.contains("jobs"),
            "{}",
            refused.detail
        );
    }
}
