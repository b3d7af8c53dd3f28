//! The id of a lease: what it says of the lease, and its text.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use leasehold_core::{
    Acquisition, ClientId, FIRST_UNCOUNTED, Kind, LocalTime, Name, Resource, TOMBSTONE_TTL, Token,
};
use leasehold_store::digest::lease_secret;

use crate::engine::DetachedLease;
use crate::error::{Error, ErrorKind};
use crate::options::MAX_TTL;

/// The format of an id. A later format has another name.
const FORMAT: &str = "lease1";

/// The id of a detached lease: [`Guard::detach`](crate::Guard::detach) returns it, and [`Client::attach`](crate::Client::attach) turns it into a guard again, in any
/// process. Any program that has the id can renew and release the lease, so the id is a secret. It contains 128 bits that can't
/// be guessed, and that inspection does not show. `Display` and `FromStr` convert it; `Debug` hides the secret.
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let id = client.mutex("deploy").lock().await?.detach().await?;
/// let text = id.to_string(); // for a file, a variable, a database
/// let guard = client.attach(&text.parse()?).await?;
/// guard.release().await?;
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct LeaseId {
    pub(super) resource: Resource,
    pub(super) lease: DetachedTerms,
    /// The guard's token. After a hand-off within its client it is higher than the token that the store shows.
    pub(super) token: Token,
    pub(super) key: LeaseKey,
    /// What [`Client::return_lease`](crate::Client::return_lease) returns. Not a part of the text.
    pub(super) returnable: Option<Returnable>,
}

/// A lease of which the caller of a request, or of a detachable lock, may not have been told.
#[derive(Clone, Copy)]
pub(super) struct Returnable {
    pub(super) attempt: Acquisition,
    /// Then the store may let the lease expire, and grant the request anew.
    pub(super) until: LocalTime,
    /// It was granted before to the same request.
    pub(super) is_repeat: bool,
}

/// Two ids of one lease are equal.
impl PartialEq for LeaseId {
    fn eq(&self, other: &Self) -> bool {
        let parts = |id: &Self| (id.resource.clone(), id.lease, id.token, id.key);
        parts(self) == parts(other)
    }
}

impl Eq for LeaseId {}

/// How the store finds the lease. Both are secrets.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LeaseKey {
    /// The attempt, whose random id proves nothing else.
    Attempt(Acquisition),
    /// A digest of the attempt's id, because that contains the id of its client.
    Digest(u128),
}

impl LeaseKey {
    pub(super) fn is_of(self, acquisition: Acquisition) -> bool {
        match self {
            Self::Attempt(attempt) => attempt == acquisition,
            Self::Digest(secret) => lease_secret(acquisition) == secret,
        }
    }
}

/// What the next guard must know about the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DetachedTerms {
    pub(super) ttl: Duration,
    pub(super) min_hold: Duration,
    pub(super) tombstone: Duration,
    /// See `MinHold::ends_at_close`.
    pub(super) ends_at_close: bool,
}

impl DetachedTerms {
    /// The lease with these terms that the store knows by this attempt.
    pub(super) fn of(self, acquisition: Acquisition) -> DetachedLease {
        let Self { ttl, min_hold, tombstone, ends_at_close } = self;
        let (outlasts_ttl, is_repeat, trusted_until) = (false, false, LocalTime::NEVER);
        DetachedLease {
            acquisition,
            ttl,
            min_hold,
            ends_at_close,
            tombstone,
            outlasts_ttl,
            is_repeat,
            trusted_until,
        }
    }
}

/// The last part of the text of an id whose minimum hold ends at the close of its client.
const ENDS_AT_CLOSE: &str = "c";

impl LeaseId {
    /// `is_voted`: the servers of a quorum know the lease by ids of their own.
    pub(super) fn new(
        resource: &Resource,
        lease: &DetachedLease,
        token: Token,
        stored: Acquisition,
        is_voted: bool,
    ) -> Self {
        let DetachedLease {
            ttl, min_hold, ends_at_close, tombstone, is_repeat, trusted_until: until, ..
        } = *lease;
        let terms = DetachedTerms { ttl, min_hold, tombstone, ends_at_close };
        // A renewal by id alone would shorten a lease that must last longer than its ttl.
        let is_uncounted = stored.sequence >= FIRST_UNCOUNTED && !is_voted;
        let key = match is_uncounted && !lease.outlasts_ttl {
            true => LeaseKey::Attempt(stored),
            false => LeaseKey::Digest(lease_secret(stored)),
        };
        let returnable = is_uncounted.then_some(Returnable { attempt: stored, until, is_repeat });
        Self { resource: resource.clone(), lease: terms, token, key, returnable }
    }

    /// Whether it is the id of the lease that the store knows by this attempt and token.
    pub(super) fn is_of(&self, acquisition: Acquisition, token: Token) -> bool {
        self.key.is_of(acquisition) && self.granted().is_none_or(|granted| granted == token)
    }

    /// The token of the one lease that this is the id of: a request whose lease has ended may have been granted another one.
    pub(super) fn granted(&self) -> Option<Token> {
        matches!(self.key, LeaseKey::Attempt(attempt) if attempt.is_requested()).then_some(self.token)
    }

    /// The lock's kind.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let id = client.mutex("deploy").lock().await?.detach().await?;
    /// assert_eq!(id.kind(), leasehold::Kind::Mutex);
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.resource.kind
    }

    /// The lock's name.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let id = client.mutex("deploy").lock().await?.detach().await?;
    /// assert_eq!(id.name(), "deploy");
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn name(&self) -> &str {
        self.resource.name.as_str()
    }

    /// The time for which a renewal extends the lease.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let deploy = client.mutex("deploy").ttl(Duration::from_secs(300));
    /// assert_eq!(deploy.lock().await?.detach().await?.ttl(), Duration::from_secs(300));
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.lease.ttl
    }

    /// The fencing token of the lease when it was detached.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let guard = client.mutex("deploy").lock().await?;
    /// let token = guard.token();
    /// assert_eq!(guard.detach().await?.token(), token);
    /// # Ok(()) });
    /// ```
    #[must_use]
    pub fn token(&self) -> Token {
        self.token
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{FORMAT}.{}.", self.resource.kind)?;
        for byte in self.name().bytes() {
            write!(f, "{byte:02x}")?;
        }
        let DetachedTerms { ttl, min_hold, tombstone, ends_at_close } = self.lease;
        for span in [ttl, min_hold, tombstone] {
            write!(f, ".{}", span.as_millis())?;
        }
        write!(f, ".{}.", self.token)?;
        match self.key {
            LeaseKey::Attempt(Acquisition { client, sequence }) => write!(f, "{client}{sequence:016x}")?,
            LeaseKey::Digest(secret) => write!(f, "{secret:032x}")?,
        }
        if ends_at_close { write!(f, ".{ENDS_AT_CLOSE}") } else { Ok(()) }
    }
}

impl fmt::Debug for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LeaseId({})", self.resource)
    }
}

impl FromStr for LeaseId {
    type Err = Error;

    /// Reads what `Display` writes.
    ///
    /// # Errors
    ///
    /// `is_invalid` if the text is not the id of a lease.
    fn from_str(text: &str) -> Result<Self, Error> {
        // The text may be a secret with a typing error: it is not repeated.
        parse(text).ok_or_else(|| {
            let what = match text.starts_with("lease1.") {
                true => "this id of a lease is damaged: pass it whole, as `acquire` printed it",
                false => "this is not the id of a lease: it begins with \"lease1.\"",
            };
            Error::new(ErrorKind::Invalid, what)
        })
    }
}

fn parse(text: &str) -> Option<LeaseId> {
    let mut parts: Vec<&str> = text.split('.').collect();
    let ends_at_close = parts.len() == 9 && parts.pop() == Some(ENDS_AT_CLOSE);
    let [FORMAT, kind, name, ttl, min_hold, tombstone, token, secret] = parts[..] else { return None };
    let bytes =
        name.as_bytes().chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
    let name = String::from_utf8(bytes.collect::<Option<_>>()?).ok()?;
    let span = |text: &str| text.parse().ok().map(Duration::from_millis).filter(|span| *span <= MAX_TTL);
    let ttl = span(ttl).filter(|ttl| !ttl.is_zero())?;
    // A longer one is no id that was ever given: the store keeps it also for an attempt that it does not know.
    let tombstone = span(tombstone).filter(|tombstone| *tombstone <= TOMBSTONE_TTL)?;
    let lease = DetachedTerms { ttl, min_hold: span(min_hold)?, tombstone, ends_at_close };
    let key = parse_key(secret)?;
    let resource = Resource { kind: Kind::parse(kind)?, name: Name::new(&name).ok()? };
    let id = LeaseId { resource, lease, token: Token::new(token.parse().ok()?)?, key, returnable: None };
    // One id has one text.
    (id.to_string() == text).then_some(id)
}

fn parse_key(text: &str) -> Option<LeaseKey> {
    let (first, rest) = text.split_at_checked(32)?;
    let first = u128::from_str_radix(first, 16).ok()?;
    if rest.is_empty() {
        return Some(LeaseKey::Digest(first));
    }
    let sequence = u64::from_str_radix(rest, 16).ok().filter(|_| rest.len() == 16)?;
    let is_uncounted = (FIRST_UNCOUNTED..2 * FIRST_UNCOUNTED).contains(&sequence);
    is_uncounted.then(|| LeaseKey::Attempt(Acquisition { client: ClientId::new(first), sequence }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(name: &str) -> LeaseId {
        let resource = Resource { kind: Kind::Semaphore, name: Name::new(name).unwrap() };
        let span = Duration::from_millis;
        let lease =
            DetachedTerms { ttl: span(300_000), min_hold: span(0), tombstone: span(7), ends_at_close: false };
        LeaseId { resource, lease, token: Token::new(9).unwrap(), key: LeaseKey::Digest(5), returnable: None }
    }

    #[test]
    fn id_survives_its_text_whatever_the_name() {
        for name in ["deploy", "a.b c/\u{e4}", "'; rm -rf"] {
            for ends_at_close in [false, true] {
                let mut id = id(name);
                id.lease.ends_at_close = ends_at_close;
                let text = id.to_string();
                assert_eq!(text.parse::<LeaseId>().unwrap(), id);
                assert!(text.chars().all(|c| c.is_ascii_alphanumeric() || c == '.'), "{text}");
                assert!(format!("{text}.").parse::<LeaseId>().is_err());
                assert!(format!("{text}.d").parse::<LeaseId>().is_err());
            }
        }
    }

    #[test]
    fn times_that_no_lease_has_are_no_id() {
        let text = id("deploy").to_string();
        let longest = MAX_TTL.as_millis().to_string();
        for (field, milliseconds, is_valid) in [
            (".300000.", "0", false),
            (".300000.", "1", true),
            (".300000.", longest.as_str(), true),
            (".300000.", "2592000001", false),
            (".300000.", "18446744073709551615", false),
            (".0.", "2592000001", false),
            (".7.", "60000", true),
            (".7.", "60001", false),
        ] {
            let other = text.replace(field, &format!(".{milliseconds}."));
            assert!(other != text && other.parse::<LeaseId>().is_ok() == is_valid, "{other}");
        }
    }

    #[test]
    fn other_text_is_no_id_and_is_not_repeated() {
        let text = id("deploy").to_string();
        for wrong in [
            "",
            "deploy",
            "lease1",
            &text[1..],
            &text[..text.len() - 1],
            &format!("{text}0"),
            &text.to_uppercase(),
        ] {
            let error = wrong.parse::<LeaseId>().unwrap_err();
            assert!(
                error.is_invalid() && (wrong.len() < 10 || !error.to_string().contains(wrong)),
                "{error}"
            );
        }
        assert!(!format!("{:?}", id("deploy")).contains("000005"));
    }
}
