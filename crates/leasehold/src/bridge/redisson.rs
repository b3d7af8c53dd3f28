//! Redisson's locks: their keys, channels and holders.
//!
//! All of them are a hash with a field `UUID:THREAD` for each holder. A name with a hash tag keeps it in the names of the other
//! keys and of the channel, and any other name becomes the tag.

use std::time::Duration;

use leasehold_store::{ForeignAnswer, redisson_counter, redisson_tag};

use super::foreign::{Foreign, Protocol};
use super::servers::Servers;
use crate::error::Error;

/// `lockWatchdogTimeout` by default. A Java reader's watchdog sets the whole lock's time to it, also if another reader has more.
const WATCHDOG: Duration = Duration::from_secs(30);

impl Foreign {
    /// `RedissonClient.getLock(name)` of Redisson. Waiters in Java are woken by message.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::redisson_lock("jobs").key(), "jobs");
    /// ```
    pub fn redisson_lock(name: impl Into<String>) -> Self {
        Self { protocol: Protocol::Redisson, key: name.into(), wakes: None, servers: None }
    }

    /// `RedissonClient.getFencedLock(name)` of Redisson: as [`Self::redisson_lock`], and the tokens of both sides come from Redisson's
    /// counter.
    ///
    /// [`Guard::token`](crate::Guard::token) returns the counter's new value, which is the token of leasehold's own lease, or one more than
    /// the last token if that is higher. So each token is higher than all before, whichever side it is from, and a resource may check it.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::redisson_fenced_lock("jobs").key(), "jobs");
    /// ```
    pub fn redisson_fenced_lock(name: impl Into<String>) -> Self {
        Self { protocol: Protocol::RedissonFenced, ..Self::redisson_lock(name) }
    }

    /// `RedissonClient.getReadWriteLock(name)` of Redisson, for [`RwLock::bridge`](crate::RwLock::bridge). Its readers and those of
    /// leasehold hold it together, and a writer of either side excludes all others.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    /// assert_eq!(Foreign::redisson_read_write_lock("prices").key(), "prices");
    /// ```
    pub fn redisson_read_write_lock(name: impl Into<String>) -> Self {
        Self { protocol: Protocol::RedissonWrite, ..Self::redisson_lock(name) }
    }

    /// `RedissonRedLock` over `getLock(name)` of several Redisson clients, one for each server: the lock is held by the holder of
    /// more than half of them. It also excludes a `RedissonMultiLock` over the same locks, which needs all of them.
    ///
    /// ```
    /// use leasehold::bridge::Foreign;
    ///
    /// let servers = ["redis://10.0.0.1", "redis://10.0.0.2", "redis://10.0.0.3"];
    /// assert_eq!(Foreign::redisson_redlock(servers, "jobs")?.key(), "jobs");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Foreign::redlock`].
    pub fn redisson_redlock<U: AsRef<str>>(
        servers: impl IntoIterator<Item = U>,
        name: impl Into<String>,
    ) -> Result<Self, Error> {
        Ok(Self { servers: Some(Servers::parse(servers)?), ..Self::redisson_lock(name) })
    }

    /// The ttl of a reader of this lock that asks for `ttl`: at most 30 s for Redisson's read-write lock, because the watchdog of a reader
    /// in Java sets the time of the whole lock to that.
    ///
    /// ```
    /// use std::time::Duration;
    /// use leasehold::bridge::Foreign;
    ///
    /// let prices = Foreign::redisson_read_write_lock("prices");
    /// assert_eq!(prices.reader_ttl(Duration::from_secs(60)), Duration::from_secs(30));
    /// ```
    #[must_use]
    pub fn reader_ttl(&self, ttl: Duration) -> Duration {
        if self.is_read_write() { ttl.min(WATCHDOG) } else { ttl }
    }

    /// Whether it is a read-write lock.
    pub(crate) fn is_read_write(&self) -> bool {
        matches!(self.protocol, Protocol::RedissonRead | Protocol::RedissonWrite)
    }

    /// A reader's leg of a read-write lock.
    pub(crate) fn as_reader(&self) -> Self {
        debug_assert!(self.is_read_write());
        Self { protocol: Protocol::RedissonRead, ..self.clone() }
    }

    /// Whether no other program changes the key while the lock is held, so that a change is a loss.
    pub(super) fn is_exclusive(&self) -> bool {
        self.protocol != Protocol::RedissonRead
    }

    /// How long the lock may be relied on after a renewal with this ttl.
    pub(super) fn limit_ttl(&self, ttl: Duration) -> Duration {
        if self.is_exclusive() { ttl } else { self.reader_ttl(ttl) }
    }

    /// Whether the answer to a reader's renewal says that another reader has let the lock expire sooner than this one's lease.
    pub(super) fn is_shortened(&self, answer: &ForeignAnswer) -> bool {
        !self.is_exclusive() && *answer == ForeignAnswer::Int(2)
    }

    /// A holder: a client's UUID and the number of a thread.
    pub(super) fn redisson_holder(&self, random: u128) -> String {
        let hex = format!("{random:032x}");
        let uuid = format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
        let side = if self.protocol == Protocol::RedissonWrite { ":write" } else { "" };
        format!("{uuid}:1{side}")
    }

    /// The channel that its waiters have subscribed to.
    pub(super) fn channel(&self) -> String {
        self.beside(if self.is_read_write() { "redisson_rwlock" } else { "redisson_lock__channel" })
    }

    /// What wakes them: all of them, or one of each client.
    pub(super) fn unlock_message(&self) -> &'static str {
        if self.protocol == Protocol::RedissonWrite { "1" } else { "0" }
    }

    /// The counter of a fenced lock's tokens.
    pub(super) fn counter(&self) -> String {
        redisson_counter(&self.key)
    }

    /// A name beside that of the lock.
    fn beside(&self, prefix: &str) -> String {
        format!("{prefix}:{}", self.tagged())
    }

    /// What the own keys of a read-write lock's readers begin with.
    pub(super) fn tagged(&self) -> String {
        redisson_tag(&self.key)
    }

    /// The own key of a reader.
    pub(super) fn reader_key(&self, holder: &str) -> String {
        format!("{}:{holder}:rwlock_timeout:1", self.tagged())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANDOM: u128 = 0x0123_4567_89ab_cdef_0123_4567_89ab_cdef;

    #[test]
    fn holder_of_a_redisson_lock_is_a_uuid_and_a_thread() {
        let holder = "01234567-89ab-cdef-0123-456789abcdef:1";
        assert_eq!(Foreign::redisson_lock("jobs").holder(RANDOM), holder);
        assert_eq!(Foreign::redisson_fenced_lock("jobs").holder(RANDOM), holder);
        let prices = Foreign::redisson_read_write_lock("prices");
        assert_eq!(prices.holder(RANDOM), format!("{holder}:write"));
        assert_eq!(prices.as_reader().holder(RANDOM), holder);
        assert_eq!(Foreign::set_nx_px("jobs").holder(7).len(), 32);
    }

    #[test]
    fn names_beside_a_redisson_lock_keep_the_hash_tag_of_its_name() {
        assert_eq!(Foreign::redisson_lock("jobs").channel(), "redisson_lock__channel:{jobs}");
        assert_eq!(Foreign::redisson_lock("a:{b}").channel(), "redisson_lock__channel:a:{b}");
        assert_eq!(Foreign::redisson_fenced_lock("jobs").counter(), "redisson_lock_token:{jobs}");
        let prices = Foreign::redisson_read_write_lock("prices");
        assert_eq!(prices.channel(), "redisson_rwlock:{prices}");
        assert_eq!(prices.reader_key("uuid:1"), "{prices}:uuid:1:rwlock_timeout:1");
        assert_eq!(
            Foreign::redisson_read_write_lock("{a}b").reader_key("uuid:1"),
            "{a}b:uuid:1:rwlock_timeout:1"
        );
    }

    #[test]
    fn reader_relies_on_its_lock_for_as_long_as_a_watchdog_in_java_lets_it_last() {
        let prices = Foreign::redisson_read_write_lock("prices");
        let (short, long) = (Duration::from_secs(10), Duration::from_secs(60));
        assert_eq!(prices.limit_ttl(long), long);
        assert_eq!(prices.as_reader().limit_ttl(long), WATCHDOG);
        assert_eq!(prices.as_reader().limit_ttl(short), short);
    }
}
