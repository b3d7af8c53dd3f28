//! Leases without a guard: they outlive the client that acquired them, and any client of the store can take them over by
//! their id.
//!
//! For the store, a detached lease is a lease like any other. It stays in the store when its client forgets it. The id of a lease whose lock was
//! detachable contains the attempt as the store knows it, so each client renews and releases it by one command. Otherwise a client
//! finds the holder by the secret in the id, and then renews and releases it as its own.

mod id;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use leasehold_core::{
    Acquire, Acquisition, Answer, Command, Holder, LocalTime, Loss, Release, ReleaseIf, Renew, Reply,
    TokenRange, drift_margin,
};
use leasehold_store::{Call, CallResult};

use crate::client::Client;
use crate::engine::{AttachedLease, DetachedLease};
use crate::error::{Error, ErrorKind};
use crate::guard::Guard;
use crate::handle::Handle;
use crate::inspect::HolderInfo;

pub use id::LeaseId;
use id::{DetachedTerms, LeaseKey, Returnable};

/// Part of the lease's time for which [`Guard::detach`] waits until the store has the client's metadata.
const PUBLISH_FRACTION: u32 = 4;

impl Guard {
    /// Renews the lease to its full ttl, unless less than a tenth of it has passed, and lets it outlive this guard, its client and the
    /// process. From then on only [`Client::attach`] with the returned id, in any process, can renew or release it. Otherwise it expires after the ttl.
    /// Tasks of this client that wait for the lock then wait in the store.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # use std::time::Duration;
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let deploy = client.mutex("deploy").ttl(Duration::from_secs(300));
    /// let id = deploy.lock().await?.detach().await?;
    /// assert!(deploy.try_lock().await?.is_none()); // it is still held
    /// client.attach(&id).await?.release().await?;
    /// assert!(deploy.try_lock().await?.is_some());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_lost`; `is_unavailable` if the store did not confirm the renewal; `is_invalid` for a bridged lock. The lease is
    /// released in these cases.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lease is released, as by the drop of its guard.
    pub async fn detach(self) -> Result<LeaseId, Error> {
        self.detach_valid_for().await.map(|(id, _)| id)
    }

    /// As [`Self::detach`], and for how much longer the lease may be trusted without a renewal.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let (id, valid_for) = client.mutex("deploy").lock().await?.detach_valid_for().await?;
    /// assert!(valid_for <= id.ttl());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Self::detach`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::detach`].
    pub async fn detach_valid_for(mut self) -> Result<(LeaseId, Duration), Error> {
        self.check_detachable()?;
        if let Some(records) = self.store().client_records() {
            records.await_published(self.remaining() / PUBLISH_FRACTION).await;
        }
        // A lease that was granted after a wait has a few seconds only.
        if !self.is_fresh() {
            self.renew().await?;
        }
        let valid_for = self.remaining();
        match self.forget_lease() {
            Ok((lease, stored)) => {
                let is_voted = self.store().voted_attempts().is_some();
                let id = LeaseId::new(self.resource(), &lease, self.token(), stored, is_voted);
                Ok((id, valid_for))
            }
            Err(loss) => Err(self.lost_error(loss)),
        }
    }
}

impl Client {
    /// Takes over a detached lease. The client renews it while the guard lives, and releases it when the guard is dropped;
    /// [`Guard::detach`] detaches it again. A renewal never shortens the lease. If two guards are attached to one lease, each of
    /// them can release it.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let id = client.mutex("deploy").lock().await?.detach().await?;
    /// let guard = client.attach(&id).await?;
    /// guard.release().await?;
    /// assert!(client.attach(&id).await.unwrap_err().is_lost()); // it has ended
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_lost` if the lease has ended, or if the id is wrong; `is_invalid` if its ttl or minimum hold is longer than the `max_ttl` of
    /// a quorum; `is_unavailable`, also if a quorum did not confirm the lease by a renewal; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: if the future is dropped, the lease stays detached.
    pub async fn attach(&self, id: &LeaseId) -> Result<Guard, Error> {
        let has_quorum = self.handle.capabilities.needs_admission_queue;
        let (guard, acquisition) = self.attach_as(id, has_quorum).await?;
        if !has_quorum {
            return Ok(guard);
        }
        // What the nodes show counts those that do not answer as holders. Only a renewal shows that a quorum has the lease.
        let borrowed = Borrowed { guard: Some(guard), acquisition };
        borrowed.renew().await?;
        Ok(borrowed.keep())
    }

    /// The guard, and the attempt that the store knows as its holder. `is_borrowed`: the guard never releases the lease.
    async fn attach_as(&self, id: &LeaseId, is_borrowed: bool) -> Result<(Guard, Acquisition), Error> {
        let handle = &self.handle;
        let lasts = id.lease.ttl.max(id.lease.min_hold);
        if let Some(longest) = handle.capabilities.max_ttl.filter(|longest| lasts > *longest) {
            let what =
                format!("the lease lasts for up to {lasts:?}, and the max_ttl of this store is {longest:?}");
            return Err(handle.error(ErrorKind::Invalid, &id.resource, what));
        }
        let asked_at = handle.now();
        let Some((holder, valid_for)) = handle.find_detached(id).await? else {
            return Err(self.no_such_lease(id));
        };
        let resource = Arc::new(id.resource.clone());
        let (token, acquisition) = (holder.token.max(id.token), holder.acquisition);
        let ttl = id.lease.ttl;
        let request = Acquire {
            weight: holder.weight,
            metadata: holder.metadata.clone(),
            ..Acquire::exclusive(acquisition, ttl)
        };
        if let Some(attempts) = handle.store.voted_attempts() {
            attempts.attach(&resource, Arc::new(request), token);
        }
        let detached = DetachedLease { outlasts_ttl: valid_for > ttl, ..id.lease.of(acquisition) };
        // The loss of a borrowed lease concerns no guard of its owner.
        let owner = holder.owner.filter(|_| !is_borrowed);
        let tokens = TokenRange { first: holder.token, last: token };
        let replicas = handle.options.replicas;
        let lease = AttachedLease { detached, owner, tokens, replicas, is_borrowed };
        let attached = handle.session.attach(resource.clone(), lease, asked_at, valid_for);
        let sequence = attached.map_err(|_| handle.closed())?;
        Ok((Guard::new(handle.clone(), sequence, resource, token, None), acquisition))
    }

    /// Renews a detached lease to its full ttl. It stays detached, and a failure does not release it.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let id = client.mutex("deploy").lock().await?.detach().await?;
    /// client.renew_lease(&id).await?;
    /// assert!(client.inspect_lease(&id).await?.is_some());
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_lost` if the lease has ended, or if the id is wrong; `is_unavailable` if the store did not confirm the renewal, which
    /// may have taken effect; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lease stays detached, and may have been renewed.
    pub async fn renew_lease(&self, id: &LeaseId) -> Result<(), Error> {
        self.renew_leases([id]).await.pop().unwrap_or_else(|| Err(self.handle.closed())).map(drop)
    }

    /// Renews detached leases to their full ttl, as [`Self::renew_lease`] does, at the same time: for how much longer each may be trusted,
    /// in the order of the ids. Those of [detachable](crate::Mutex::detachable) locks go together, in one command where the store can do that.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let id = client.mutex("deploy").detachable().lock().await?.detach().await?;
    /// for renewed in client.renew_leases([&id]).await {
    ///     println!("valid for another {:?}", renewed?);
    /// }
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// Each as [`Self::renew_lease`].
    ///
    /// # Cancel safety
    ///
    /// As [`Self::renew_lease`].
    pub async fn renew_leases(
        &self,
        ids: impl IntoIterator<Item = &LeaseId>,
    ) -> Vec<Result<Duration, Error>> {
        let command = |id: &LeaseId, acquisition| {
            Command::Renew(Renew { token: id.granted(), ..Renew::to(acquisition, id.lease.ttl) })
        };
        let replied = |id: &LeaseId, sent_at: LocalTime, answered: CallResult| match answered {
            Ok(Answer { reply: Reply::Renewed { valid_for, .. }, .. }) => {
                let trusted_for = valid_for.min(id.lease.ttl);
                Ok(sent_at + trusted_for.saturating_sub(drift_margin(trusted_for)))
            }
            Ok(Answer { reply: Reply::NotHeld, .. }) => Err(self.no_such_lease(id)),
            Ok(Answer { reply, .. }) => Err(self.handle.unexpected(&id.resource, &reply)),
            Err(error) => Err(self.handle.store_error(&id.resource, &error)),
        };
        let ids: Vec<&LeaseId> = ids.into_iter().collect();
        let renewed =
            self.of_leases(ids.clone(), command, replied, |id| Box::pin(self.renew_attached(id))).await;
        // Each was trusted from its own reply on, and this answer is as late as the last one.
        let now = self.handle.now();
        let remaining = |(id, renewed): (&LeaseId, Result<LocalTime, Error>)| match renewed?.since(now) {
            Duration::ZERO => {
                let what = "the renewal was not confirmed before the lease had to end, and may have taken effect: look at the lease again";
                Err(self.handle.unavailable(&id.resource, what))
            }
            remaining => Ok(remaining),
        };
        ids.into_iter().zip(renewed).map(remaining).collect()
    }

    /// Releases detached leases, at the same time. True for each that this has released, and false for each that had ended before, or whose id
    /// is wrong; in the order of the ids. A minimum hold of the lock counts. Those of [detachable](crate::Mutex::detachable) locks are
    /// one command each; the others are attached first.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let id = client.mutex("deploy").detachable().lock().await?.detach().await?;
    /// assert!(client.release_leases([&id]).await.remove(0)?);
    /// assert!(!client.release_leases([&id]).await.remove(0)?);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_unavailable` if the store did not confirm the release, which may have taken effect: it can be repeated; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, leases may have been released.
    pub async fn release_leases(&self, ids: impl IntoIterator<Item = &LeaseId>) -> Vec<Result<bool, Error>> {
        let command = |id: &LeaseId, acquisition| {
            let DetachedTerms { min_hold, tombstone, .. } = id.lease;
            let only_if = id.granted().map(ReleaseIf::HasToken);
            Command::Release(Release { min_hold, tombstone, only_if, ..Release::now(acquisition) })
        };
        let replied = |id: &LeaseId, _: LocalTime, answered: CallResult| match answered {
            Ok(Answer { reply: Reply::Released, .. }) => Ok(true),
            Ok(Answer { reply: Reply::NotHeld | Reply::Dequeued, .. }) => Ok(false),
            Ok(Answer { reply, .. }) => Err(self.handle.unexpected(&id.resource, &reply)),
            Err(error) => Err(self.handle.store_error(&id.resource, &error)),
        };
        let ids: Vec<&LeaseId> = ids.into_iter().collect();
        self.of_leases(ids, command, replied, |id| Box::pin(self.release_attached(id))).await
    }

    /// The caller of a [request](crate::Mutex::request) was not told of this lease: it is released in 2.5 s, unless the caller repeats the
    /// request until then, at this client or another one. A lease that was granted to the request before is left
    /// alone, because the caller may know of it by another answer. A lease whose lock was only detachable is released at once. False,
    /// without effect, for any other lease, also for each of a quorum, and for an id that was read from a text: [`Self::release_leases`] releases it.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let deploy = client.mutex("deploy").request(b"7f2c9d54a1e84b60");
    /// let id = deploy.lock().await?.detach().await?;
    /// assert!(client.return_lease(&id)); // the answer could not be written
    /// assert_eq!(deploy.lock().await?.detach().await?, id); // the caller has asked again
    /// # Ok(()) });
    /// ```
    #[must_use = "false if the lease is still held"]
    pub fn return_lease(&self, id: &LeaseId) -> bool {
        let Some(Returnable { attempt, until, is_repeat }) = id.returnable else { return false };
        if is_repeat || self.handle.now() >= until {
            return true;
        }
        let detached = id.lease.of(attempt);
        self.handle.session.return_lease(Arc::new(id.resource.clone()), detached, id.token);
        true
    }

    /// Runs a command for each lease whose id names its attempt, all at once, and something else for each of the others.
    async fn of_leases<'a, T>(
        &self,
        ids: Vec<&'a LeaseId>,
        command: impl Fn(&LeaseId, Acquisition) -> Command,
        replied: impl Fn(&LeaseId, LocalTime, CallResult) -> Result<T, Error>,
        slowly: impl Fn(&'a LeaseId) -> BoxFuture<'a, Result<T, Error>>,
    ) -> Vec<Result<T, Error>> {
        if self.handle.session.is_closed() {
            return ids.iter().map(|_| Err(self.handle.closed())).collect();
        }
        let is_voted = self.handle.store.voted_attempts().is_some();
        let attempt_of = |id: &LeaseId| match id.key {
            LeaseKey::Attempt(acquisition) if !is_voted => Some(acquisition),
            _ => None,
        };
        let sent_at = self.handle.now();
        let batch: Vec<Call> = ids
            .iter()
            .filter_map(|id| Some(Call::new(Arc::new(id.resource.clone()), command(id, attempt_of(id)?))))
            .collect();
        let answered = async {
            match batch.len() {
                0 => Vec::new(),
                _ => self.handle.store.call_batch(batch, self.handle.options.replicas).await,
            }
        };
        let others: Vec<_> = ids.iter().filter(|id| attempt_of(id).is_none()).map(|id| slowly(id)).collect();
        let others = join_all(others);
        let (answered, others) = futures_util::future::join(answered, others).await;
        let (mut answered, mut others) = (answered.into_iter(), others.into_iter());
        let unanswered = |id: &LeaseId| Err(self.handle.unavailable(&id.resource, "there was no answer"));
        let one = |id: &&LeaseId| match attempt_of(id) {
            Some(_) => answered.next().map_or_else(|| unanswered(id), |answer| replied(id, sent_at, answer)),
            None => others.next().unwrap_or_else(|| unanswered(id)),
        };
        ids.iter().map(one).collect()
    }

    /// Until when the lease may be trusted.
    async fn renew_attached(&self, id: &LeaseId) -> Result<LocalTime, Error> {
        let (guard, acquisition) = self.attach_as(id, true).await?;
        let borrowed = Borrowed { guard: Some(guard), acquisition };
        borrowed.renew().await?;
        let remaining = borrowed.guard.as_ref().map_or(Duration::ZERO, Guard::remaining);
        Ok(self.handle.now() + remaining)
    }

    async fn release_attached(&self, id: &LeaseId) -> Result<bool, Error> {
        match self.attach(id).await {
            Ok(guard) => guard.release().await.map(|()| true),
            Err(error) if error.is_lost() => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn no_such_lease(&self, id: &LeaseId) -> Error {
        let what = "no such lease: it was released, it has expired, or the id is wrong";
        self.handle.error(ErrorKind::Lost, &id.resource, what)
    }

    /// What the store shows of a detached lease; `None` if it has ended, or if the id is wrong. The lease is not renewed.
    ///
    /// ```
    /// # leasehold::doc_test(async {
    /// # let client = leasehold::Client::connect("memory:").await?;
    /// let id = client.mutex("deploy").lock().await?.detach().await?;
    /// let holder = client.inspect_lease(&id).await?.unwrap();
    /// println!("token {}, for another {:?}", holder.token, holder.expires_in);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// `is_unavailable`; `is_closed`.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it only reads.
    pub async fn inspect_lease(&self, id: &LeaseId) -> Result<Option<HolderInfo>, Error> {
        let info = self.handle.inspect(id.resource.clone()).await?;
        let is_meant = |holder: &HolderInfo| !holder.retained && id.is_of(holder.acquisition, holder.token);
        let found = info.holders.into_iter().find(is_meant);
        Ok(found.map(|holder| HolderInfo { token: holder.token.max(id.token), ..holder }))
    }
}

/// A guard that is detached again when it is dropped. If its lease was lost meanwhile, because the answer to a renewal is
/// late, the store may have renewed it, so nothing is released then either.
struct Borrowed {
    /// None when it is kept.
    guard: Option<Guard>,
    acquisition: Acquisition,
}

impl Borrowed {
    async fn renew(&self) -> Result<(), Error> {
        let Some(guard) = &self.guard else { return Ok(()) };
        let renewed = guard.renew().await;
        if renewed.is_err() && guard.loss() == Some(Loss::Expired) {
            // The store has not said that the lease has ended.
            let why = guard.renewal_error().map_or_else(String::new, |error| format!(" ({error:#})"));
            let what = "the renewal was not confirmed before the lease had to end";
            let then = "and may have taken effect: look at the lease again";
            return Err(guard.unavailable(&format!("{what}{why}, {then}")));
        }
        renewed
    }

    /// The guard, which releases the lease from now on.
    fn keep(mut self) -> Guard {
        let guard = self.guard.take().expect("it is taken once");
        guard.own();
        guard
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if let Some(mut guard) = self.guard.take()
            && guard.forget_lease().is_err()
            && let Some(attempts) = guard.store().voted_attempts()
        {
            attempts.detach(self.acquisition);
        }
    }
}

impl Handle {
    /// The holder of this lease, and the time that was left of it when the store answered.
    async fn find_detached(&self, id: &LeaseId) -> Result<Option<(Holder, Duration)>, Error> {
        let answer = self.ask(id.resource.clone(), Command::Inspect).await?;
        let Reply::View(view) = answer.reply else { return Ok(None) };
        let is_meant = |holder: &Holder| !holder.retained && id.is_of(holder.acquisition, holder.token);
        let found = view.holders.into_iter().find(is_meant);
        Ok(found.map(|holder| {
            let valid_for = holder.expires_at.since(answer.at);
            // Over a quorum no renewal may ask for more, even if the clock of a node was set back.
            (holder, self.capabilities.max_ttl.map_or(valid_for, |longest| valid_for.min(longest)))
        }))
    }
}
