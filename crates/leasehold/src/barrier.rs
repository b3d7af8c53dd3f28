//! A place where parties wait until all have come.
//!
//! Who has come holds a lease, so a party that dies while it waits has not come. Whoever sees that all are there makes its
//! lease a *mark*, which is kept for a while: it says which tokens have passed, so that those who look later know it
//! too, though the first have left. Tokens rise, so a mark says nothing about a later round. A mark weighs little, an
//! arrival so much that only one round fits: who comes too early waits in the queue.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Command, Holder, Kind, Reply, Token, View};

use crate::about::About;
use crate::client::Handle;
use crate::clock;
use crate::error::{Error, ErrorKind};
use crate::guard::Guard;
use crate::lock::{Lock, Wait};
use crate::session::Sleep;
use crate::settings::lease_settings;

const MARK: u32 = 1;
const ARRIVAL: u32 = 1 << 16;

/// The largest number of parties: beside them there must be room for marks.
const MOST: u32 = u32::MAX / ARRIVAL - 1;

/// How long a mark is kept, and for two ttls at least. A party that does not look for longer has lost its lease, unless it
/// asked for a longer one than the others.
const KEEP: Duration = Duration::from_secs(60);

/// With so many marks, further ones are kept for two ttls only: everybody is shown all of them, and they take room, without
/// which nobody can come.
const MANY_MARKS: usize = 64;

/// How often whoever waits looks; less often where more than a hundred parties would be shown each time.
const LOOK: Duration = Duration::from_millis(100);
const LOOK_FOR_EACH: Duration = Duration::from_millis(1);

/// For how many parties this capacity is, or how many have come with this weight.
pub(crate) fn parties(weight: u32) -> u32 {
    weight / ARRIVAL
}

/// A place where parties wait until all have come, again and again. Made by
/// [`Client::barrier`](crate::Client::barrier).
///
/// Everybody names the same number of parties, 65,534 at most. A party that dies while it waits counts no more once its lease has ended;
/// others wait for somebody in its place. All parties should ask for the same [`ttl`](Self::ttl): for two of them the store
/// remembers who has passed. Nobody can come while it remembers more than 65,535 rounds, which with the usual ttl takes more
/// than 3,000 rounds a second.
///
/// ```
/// # leasehold::doc_test(async {
/// let client = leasehold::Client::connect("memory:").await?;
/// let barrier = client.barrier("loaded", 1);
///
/// let is_leader = barrier.wait().await?; // alone it need not wait
/// assert!(is_leader);
/// # Ok(()) });
/// ```
#[derive(Clone)]
pub struct Barrier(Lock, u32);

lease_settings!(Barrier);

impl Barrier {
    pub(crate) fn new(handle: Arc<Handle>, name: &str, parties: u32) -> Self {
        let capacity = parties.min(MOST) * ARRIVAL + (ARRIVAL - 1);
        Self(Lock::new(handle, Kind::Barrier, name, capacity), parties)
    }

    /// Waits until all parties have come, and says to one of them, the first to come, that it is the leader of this round.
    /// It looks ten times a second, and less often
    /// for more than a hundred.
    ///
    /// # Errors
    ///
    /// `is_invalid` for a name or a setting that can't be, no parties, more than 65,534, or a number other than that with
    /// which the barrier is in use; `is_lost` when this party's lease was lost while it waited: it has not come then, or the
    /// others may have gone on without it. `is_unavailable` when the store could not be asked; `is_queue_full`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// Dropped early, this party has not come, unless the others saw it and have gone on.
    pub async fn wait(&self) -> Result<bool, Error> {
        let passed = self.pass(Wait::ForEver).await?;
        passed.ok_or_else(|| self.0.handle.closed())
    }

    /// Waits for at most this long, and answers `None` if not all have come by then: this party leaves again.
    ///
    /// # Errors
    ///
    /// As [`Self::wait`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::wait`].
    pub async fn wait_timeout(&self, limit: Duration) -> Result<Option<bool>, Error> {
        self.pass(Wait::For(limit)).await
    }

    async fn pass(&self, wait: Wait) -> Result<Option<bool>, Error> {
        self.check()?;
        let deadline = wait.deadline();
        // It is renewed by looking, and not in the background: who does not look any more must not count for a later round.
        let mut lock = self.0.clone();
        lock.terms.renews = false;
        let Some(guard) = lock.acquire(ARRIVAL, None, wait).await? else { return Ok(None) };
        let arrived = clock::local();
        let mut has_seen_all = false;
        loop {
            let view = self.look().await?;
            let round = Round::passed(&view, guard.token(), self.1);
            if let Some(loss) = guard.loss() {
                return Err(guard.lost_error(loss));
            }
            let is_late = deadline.is_none_or(|deadline| clock::local() >= deadline);
            if let Some(round) = round {
                let is_leader = round.first == guard.token();
                // Marks take room. One is enough, so the others wait for the leader's, but not for long.
                if round.is_marked || is_leader || has_seen_all || is_late {
                    self.leave(guard, &round, self.keep(&view, clock::local().since(arrived))).await?;
                    return Ok(Some(is_leader));
                }
            }
            has_seen_all = round.is_some();
            if is_late {
                let token = guard.token();
                guard.release().await?;
                // The last of the others may have come after this party looked, and before it left.
                let round = Round::passed(&self.look().await?, token, self.1);
                return Ok(round.filter(|round| round.is_marked).map(|round| round.first == token));
            }
            if self.0.terms.renews && guard.remaining() < self.0.terms.ttl / 3 * 2 {
                guard.renew().await?;
            }
            let next =
                deadline.into_iter().chain([clock::local() + self.pause().min(self.0.terms.ttl / 4)]).min();
            let sleep = Sleep::until(&self.0.handle.session, next.unwrap_or_else(clock::local));
            guard.run(sleep).await?;
        }
    }

    async fn look(&self) -> Result<View, Error> {
        let (handle, resource) = (&self.0.handle, self.0.checked_resource()?);
        match handle.ask((**resource).clone(), Command::Inspect).await?.reply {
            Reply::View(view) => Ok(view),
            other => Err(handle.unexpected(resource, &other)),
        }
    }

    /// How long after its arrival, so long ago, a party's mark is kept.
    fn keep(&self, view: &View, arrived: Duration) -> Duration {
        let least = self.0.terms.ttl * 2;
        let marks = view.holders.iter().filter(|holder| holder.weight == MARK).count();
        arrived + if marks < MANY_MARKS { least.max(KEEP) } else { least }
    }

    fn pause(&self) -> Duration {
        LOOK.max(LOOK_FOR_EACH * self.1)
    }

    /// Makes way for the next round. The first who knows leaves the mark by which the others know.
    async fn leave(&self, guard: Guard, round: &Round, keep: Duration) -> Result<(), Error> {
        // Alone there is nobody who needs to know.
        if round.is_marked || self.1 == 1 {
            return guard.release().await;
        }
        let mut mark = self.0.clone();
        mark.at_least = keep;
        mark.set_note(round.note());
        if let Some(left) = mark.replace(&guard, MARK, Wait::No).await? {
            guard.replaced();
            left.release().await?;
        }
        Ok(())
    }

    fn check(&self) -> Result<(), Error> {
        let resource = self.0.checked_resource()?;
        if (1..=MOST).contains(&self.1) {
            return Ok(());
        }
        let what = format!("a barrier has between 1 and {MOST} parties, not {}", self.1);
        Err(self.0.handle.error(ErrorKind::Invalid, resource, what))
    }
}

/// All who passed together, by their tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Round {
    first: Token,
    last: Token,
    /// Somebody has left a mark of it.
    is_marked: bool,
}

impl Round {
    /// The round in which this party passed, if it did.
    fn passed(view: &View, token: Token, parties: u32) -> Option<Self> {
        let marks: Vec<Self> = view.holders.iter().filter_map(Self::from_mark).collect();
        if let Some(mark) = marks.iter().find(|mark| (mark.first..=mark.last).contains(&token)) {
            return Some(*mark);
        }
        let latest = marks.iter().map(|mark| mark.last).max();
        let is_here =
            |holder: &&Holder| holder.weight == ARRIVAL && !holder.kept && Some(holder.token) > latest;
        let tokens: Vec<Token> = view.holders.iter().filter(is_here).map(|holder| holder.token).collect();
        let all = tokens.len() >= usize::try_from(parties).unwrap_or(usize::MAX);
        let (first, last) = (tokens.iter().min().copied()?, tokens.iter().max().copied()?);
        (all && tokens.contains(&token)).then_some(Self { first, last, is_marked: false })
    }

    fn note(&self) -> String {
        format!("passed {} {}", self.first, self.last)
    }

    fn from_mark(holder: &Holder) -> Option<Self> {
        let note = Some(&holder.metadata).filter(|_| holder.weight == MARK);
        let note = About::decode(note?).note?;
        let (first, last) = note.strip_prefix("passed ")?.split_once(' ')?;
        let token = |text: &str| text.parse().ok().and_then(Token::new);
        Some(Self { first: token(first)?, last: token(last)?, is_marked: true })
    }
}
