//! Detached leases over a store whose answers are late or lost.

use leasehold_core::drift_margin;
use leasehold_testkit::wait_until;

use super::*;
use crate::LeaseId;

const TTL: Duration = Duration::from_secs(20);

/// A lease that another client of the store has detached.
fn detached(stage: &Stage, ttl: Duration) -> LeaseId {
    let other = stage.other_client();
    let id = block_on(async { other.mutex("a").ttl(ttl).lock().await?.detach().await }).unwrap();
    block_on(other.close()).unwrap();
    id
}

/// The id of a lease that ends soon, and that a renewal extends by [`TTL`].
fn ending_soon(stage: &Stage) -> LeaseId {
    let short = Duration::from_secs(8);
    let text = detached(stage, short).to_string();
    text.replace(&format!(".{}.", short.as_millis()), &format!(".{}.", TTL.as_millis())).parse().unwrap()
}

/// Asserts that the lease is at the store, and was renewed, after the client has sent everything that it has to send.
fn assert_renewed(stage: &Stage, case: &str) {
    wait_until("the client has settled", || stage.client.is_settled());
    let view = stage.view();
    let [holder] = &view.holders[..] else { panic!("{case}: {view:?}") };
    assert!(!holder.retained, "{case}: {view:?}");
}

#[test]
fn renewal_by_id_never_releases_the_lease_if_its_answer_is_late() {
    let stage = Stage::new();
    let id = ending_soon(&stage);
    // It is repeated without an answer, too.
    let silent = [Fate::NeverAnswered; 64];
    stage.script(&[&[Fate::Now][..], &silent[..]].concat());
    // The lease seems to have ended before an answer comes.
    let error = block_on(stage.client.renew_lease(&id)).unwrap_err();
    assert!(error.is_unavailable() && error.to_string().contains("may have taken effect"), "{error}");
    assert_renewed(&stage, "late answer");
}

#[test]
fn dropped_renewal_by_id_and_close_never_release_the_lease() {
    for case in ["dropped", "closed"] {
        let stage = Stage::new();
        let (id, client) = (detached(&stage, TTL), stage.client.clone());
        stage.script(&[Fate::Now, Fate::NeverAnswered]);
        let mut renewal = Box::pin(client.renew_lease(&id));
        assert!(poll_once(renewal.as_mut()).is_pending());
        if case == "closed" {
            block_on(stage.client.clone().close()).unwrap();
            assert!(block_on(renewal).is_err());
        } else {
            drop(renewal);
        }
        assert_renewed(&stage, case);
    }
}

#[test]
fn renewed_leases_are_not_trusted_for_longer_because_another_one_is_late() {
    let (stage, pause) = (Stage::new(), Duration::from_secs(1));
    let first = detached(&stage, TTL);
    let other = stage.other_client();
    let second = block_on(async { other.mutex("b").ttl(TTL).lock().await?.detach().await }).unwrap();
    // The first one is looked up and renewed at once; the answer about the second one is late.
    stage.script(&[Fate::Now, Fate::Now, Fate::Later]);
    let ids = [first, second];
    let mut renewal = Box::pin(stage.client.renew_leases(&ids));
    let asked = Instant::now();
    assert!(poll_once(renewal.as_mut()).is_pending());
    wait_until("the answer is late", || asked.elapsed() >= pause);
    let renewed = block_on(renewal);
    let [Ok(first), Ok(_)] = renewed[..] else { panic!("{renewed:?}") };
    assert!(first <= TTL - pause, "{first:?}");
}

#[test]
fn renewal_of_a_lease_that_was_removed_reports_the_loss() {
    let stage = Stage::new();
    let id = detached(&stage, TTL);
    stage.script(&[Fate::Later]);
    let mut renewal = Box::pin(stage.client.renew_lease(&id));
    // The lease is looked up, and the answer has not been read.
    assert!(poll_once(renewal.as_mut()).is_pending());
    stage.store.run(&stage.resource, &Command::ForceRelease).unwrap();
    assert!(block_on(renewal).unwrap_err().is_lost());
    // The guard of an attached lease learns it from its renewal too.
    let id = detached(&stage, TTL);
    let guard = block_on(stage.client.attach(&id)).unwrap();
    stage.store.run(&stage.resource, &Command::ForceRelease).unwrap();
    assert!(block_on(guard.renew()).unwrap_err().is_lost());
    assert!(!guard.is_held());
    assert!(block_on(stage.client.renew_lease(&id)).unwrap_err().is_lost());
}

#[test]
fn attached_lease_is_trusted_from_before_its_store_was_asked() {
    let stage = Stage::new();
    let (ttl, pause) = (Duration::from_secs(20), Duration::from_secs(1));
    let id = detached(&stage, ttl);
    assert!(drift_margin(ttl) < pause / 2, "the margin does not hide the pause");
    stage.script(&[Fate::Later]);
    let asked = Instant::now();
    let mut attach = Box::pin(stage.client.attach(&id));
    assert!(poll_once(attach.as_mut()).is_pending());
    wait_until("the answer is late", || asked.elapsed() >= pause);
    let guard = block_on(attach).unwrap();
    let passed = asked.elapsed();
    assert!(guard.remaining() + passed <= ttl, "{:?} after {passed:?}", guard.remaining());
}

#[test]
fn attached_lease_is_trusted_less_than_the_store_has_it() {
    let stage = Stage::new();
    let ttl = Duration::from_secs(1_000);
    let id = detached(&stage, ttl);
    let asked = Instant::now();
    let guard = block_on(stage.client.attach(&id)).unwrap();
    let passed = asked.elapsed();
    let margin = ttl.saturating_sub(guard.remaining() + passed);
    assert!(margin >= drift_margin(ttl) / 2, "{margin:?}");
}

#[test]
fn release_of_an_attached_lease_rejects_a_late_acquire_of_the_client_that_detached_it() {
    let stage = Stage::new();
    // The first acquire may still arrive.
    stage.script(&[Fate::CommandLost]);
    let guard = block_on(stage.mutex().ttl(TTL).lock()).unwrap();
    let acquisition = stage.view().holders[0].acquisition;
    let id = block_on(guard.detach()).unwrap();
    let other = stage.other_client();
    block_on(async { other.attach(&id).await?.release().await }).unwrap();
    assert!(stage.view().holders.is_empty());
    let late = stage.store.run(&stage.resource, &Acquire::exclusive(acquisition, TTL).into()).unwrap();
    assert!(matches!(late.reply, Reply::Cancelled), "{late:?}");
    assert!(stage.view().holders.is_empty(), "{:?}", stage.view());
}

#[test]
fn attached_lease_of_an_owner_blocks_reentry_after_its_loss() {
    let stage = Stage::new();
    let lock = stage.client.reentrant_mutex("a", "us").ttl(TTL);
    let id = block_on(async { lock.lock().await?.detach().await }).unwrap();
    let attached = block_on(stage.client.attach(&id)).unwrap();
    block_on(stage.other_client().reentrant_mutex("a", "us").release_all()).unwrap();
    assert!(block_on(attached.renew()).unwrap_err().is_lost());
    assert!(block_on(lock.lock()).unwrap_err().is_lost());
    drop(attached);
    block_on(block_on(lock.lock()).unwrap().release()).unwrap();
    assert!(stage.view().holders.is_empty(), "{:?}", stage.view());
}

#[test]
fn release_of_all_ends_an_attached_lease_at_once() {
    let stage = Stage::new();
    let lock = stage.client.reentrant_mutex("a", "us").ttl(TTL);
    let id = block_on(async { lock.lock().await?.detach().await }).unwrap();
    let attached = block_on(stage.client.attach(&id)).unwrap();
    assert_eq!(block_on(lock.release_all()).unwrap(), 1);
    assert!(!attached.is_held());
}

#[test]
fn detached_lease_has_the_token_of_a_hand_off() {
    let stage = Stage::new();
    let mutex = stage.client.mutex("a").ttl(TTL);
    let first = block_on(mutex.lock()).unwrap();
    let mut next = Box::pin(mutex.lock());
    assert!(poll_once(next.as_mut()).is_pending());
    let lowest = first.token();
    block_on(first.release()).unwrap();
    let guard = block_on(next).unwrap();
    let token = guard.token();
    assert!(token > lowest && stage.view().holders[0].token < token, "it was handed off: {:?}", stage.view());
    assert_eq!(guard.lease_token(), lowest);
    let id = block_on(guard.detach()).unwrap();
    assert_eq!(block_on(stage.client.inspect_lease(&id)).unwrap().unwrap().token, token);
    let other = stage.other_client();
    let attached = block_on(other.attach(&id)).unwrap();
    assert_eq!((attached.token(), attached.lease_token()), (token, lowest));
    let released = block_on(stage.client.force_release_token(Kind::Mutex, "a", attached.lease_token()));
    assert_eq!(released.unwrap().unwrap().token, lowest);
    drop(attached);
    assert!(block_on(other.mutex("a").lock()).unwrap().token() > token);
}
