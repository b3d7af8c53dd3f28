//! Requests, watches and sleeps: what futures see, and who is woken.

use std::future::{pending, ready};
use std::pin::pin;
use std::sync::Mutex;

use leasehold_store::{Batch, BoxFuture, Call, Capabilities, EMBEDDED_POLL_INTERVALS, Store};

use super::super::{End, ReleaseOutcome, RenewalError, Request, Sleep, release_dropped, with_deadline};
use super::queues::key;
use super::*;

/// Answers every command in the same way, or not at all.
struct Fixed {
    answer: Option<CallResult>,
    is_inline: bool,
    sent: Mutex<Vec<Command>>,
}

fn store(answer: Option<CallResult>, is_inline: bool) -> Fixed {
    Fixed { answer, is_inline, sent: Mutex::default() }
}

impl Fixed {
    fn record(&self, command: &Command) {
        self.sent.lock().unwrap().push(command.clone());
    }
}

impl Store for Fixed {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(EMBEDDED_POLL_INTERVALS)
    }

    fn try_call_inline(&self, _resource: &Resource, command: &Command) -> Option<CallResult> {
        let answer = self.answer.clone().filter(|_| self.is_inline)?;
        self.record(command);
        Some(answer)
    }

    fn call(&self, call: Call, _replicas: u32) -> BoxFuture<CallResult> {
        self.record(&call.command);
        match self.answer.clone() {
            Some(answer) => Box::pin(ready(answer)),
            None => Box::pin(pending()),
        }
    }

    fn call_batch(&self, _batch: Batch, _replicas: u32) -> BoxFuture<Vec<CallResult>> {
        unreachable!("there is no driver")
    }

    fn list(&self) -> BoxFuture<Result<Vec<Resource>, StoreError>> {
        unreachable!("the engine lists nothing")
    }
}

#[test]
fn request_returns_its_response_once() {
    for is_inline in [true, false] {
        let scene = Scene::new();
        let attempt = scene.begin("a", None, false);
        let store = store(Some(answer(granted(1, 1))), is_inline);
        let mut request = Request::send(&scene.session, &store, &resource("a"), Some(attempt));
        assert_eq!(request.is_in_flight(), !is_inline);
        let mut poll = || request.poll_response(&mut Context::from_waker(Waker::noop()));
        let response = poll().expect("a response");
        assert!(matches!(response.end, Some(End::Attempt(Outcome::Granted { .. }))), "{response:?}");
        assert!(response.error.is_none() && poll().is_none());
        assert!(!request.is_in_flight());
    }
}

#[test]
fn response_to_a_release_is_its_outcome() {
    let scene = Scene::new();
    let release = scene.drop_lease(scene.lease("a"));
    let releases = store(Some(answer(Reply::Released)), false);
    let mut request = Request::send(&scene.session, &releases, &resource("a"), Some(release));
    let response = request.poll_response(&mut Context::from_waker(Waker::noop())).unwrap();
    assert!(matches!(response.end, Some(End::Release(ReleaseOutcome::Released))), "{response:?}");
    let release = scene.drop_lease(scene.lease("a"));
    let store = store(Some(failure()), false);
    let mut request = Request::send(&scene.session, &store, &resource("a"), Some(release));
    let response = request.poll_response(&mut Context::from_waker(Waker::noop())).unwrap();
    assert!(response.end.is_none() && response.error.is_some(), "{response:?}");
}

#[test]
fn abandoned_request_is_sent_again_by_the_driver() {
    let scene = Scene::new();
    let attempt = scene.begin("a", None, true);
    let (entry_id, silent) = (attempt.entry, store(None, false));
    let mut request = Request::send(&scene.session, &silent, &resource("a"), Some(attempt));
    assert!(request.poll_response(&mut Context::from_waker(Waker::noop())).is_none());
    request.abandon();
    assert!(!request.is_in_flight());
    drop(request);
    assert_eq!(scene.sent(scene.start), [entry_id]);
}

#[test]
fn dropped_renewal_counts_as_failed() {
    let scene = Scene::new();
    let lease = scene.lease("a");
    let renewal = scene.session.begin_renewal(lease, scene.start);
    let silent = store(None, false);
    let request = Request::send(&scene.session, &silent, &resource("a"), renewal);
    assert!(scene.session.begin_renewal(lease, scene.start).is_none());
    drop(request);
    assert!(scene.session.begin_renewal(lease, scene.start).is_some());
}

#[test]
fn dropped_lease_is_released_inline_or_by_the_driver() {
    for is_inline in [true, false] {
        let scene = Scene::new();
        let lease = scene.lease("a");
        let store = store(Some(answer(Reply::Released)), is_inline);
        release_dropped(&scene.session, &store, &resource("a"), lease);
        assert_eq!(store.sent.lock().unwrap().len(), usize::from(is_inline));
        assert_eq!(scene.session.len(), usize::from(!is_inline));
        let by_driver = scene.sent(scene.start);
        assert_eq!(by_driver.len(), usize::from(!is_inline), "{by_driver:?}");
    }
}

#[test]
fn dropped_lease_whose_release_failed_inline_leaves_nothing_once_it_is_released() {
    let scene = Scene::new();
    let lease = scene.lease("a");
    release_dropped(&scene.session, &store(Some(failure()), true), &resource("a"), lease);
    assert_eq!(scene.session.len(), 1);
    let again = scene.due(scene.after(1)).pop().expect("the retry");
    scene.answer(&again, Reply::Released);
    assert_eq!(scene.session.len(), 0);
}

#[test]
fn renewal_without_an_answer_is_repeated_by_the_driver() {
    let scene = Scene::new();
    let lease = scene.lease("a");
    // An error from before the renewal is not its result.
    scene.session.table().entries.get_mut(&lease).unwrap().last_error = failure().err();
    let renewal = scene.session.begin_renewal(lease, scene.start);
    let silent = store(None, false);
    let _request = Request::send(&scene.session, &silent, &resource("a"), renewal);
    let mut watch = scene.session.watch(lease);
    let mut is_pending =
        || poll_with(Waker::noop(), |context| scene.session.poll_renewed(&mut watch, context)).is_pending();
    let timeout = scene.session.table().entries[&lease].poll_timeout().unwrap();
    assert!(scene.sent(timeout).is_empty() && is_pending());
    let again = scene.session.table().entries[&lease].poll_timeout().unwrap();
    assert_eq!(scene.sent(again), [lease]);
}

#[test]
fn response_does_not_wake_the_task_that_polls_for_it() {
    let scene = Scene::new();
    let (ticket, attempt) = scene.session.enqueue(key(), scene.start).ok().unwrap();
    let (count, waker) = task();
    assert!(poll_with(&waker, |context| scene.session.poll_wait(ticket, context)).is_pending());
    let store = store(Some(answer(granted(1, 1))), false);
    let mut request = Request::send(&scene.session, &store, &resource("a"), attempt).polled_by(ticket);
    assert!(request.poll_response(&mut Context::from_waker(&waker)).is_some());
    assert_eq!(count.take(), 0);
}

#[test]
fn watch_is_woken_by_the_end_of_an_attempt() {
    let scene = Scene::new();
    let attempt = scene.begin("a", None, false);
    let registered = || scene.session.table().entries[&attempt.entry].wakers.len();
    let (count, waker) = task();
    let (mut watch, mut dropped) = (scene.session.watch(attempt.entry), scene.session.watch(attempt.entry));
    for watch in [&mut watch, &mut dropped] {
        assert!(poll_with(&waker, |context| scene.session.poll_ended(watch, context)).is_pending());
    }
    assert_eq!(registered(), 2);
    drop(dropped);
    assert_eq!(registered(), 1);
    scene.answer(&attempt, Reply::Busy);
    assert_eq!(count.take(), 1);
    let ended = poll_with(&waker, |context| scene.session.poll_ended(&mut watch, context));
    assert!(matches!(ended, Poll::Ready((Outcome::NotGranted, None))));
    let mut gone = scene.session.watch(99.into());
    let ended = poll_with(&waker, |context| scene.session.poll_ended(&mut gone, context));
    assert!(matches!(ended, Poll::Ready((Outcome::Cancelled, None))));
}

#[test]
fn watch_is_woken_by_the_loss_of_a_lease() {
    let scene = Scene::new();
    let lease = scene.lease("a");
    let (count, waker) = task();
    let mut watch = scene.session.watch(lease);
    assert!(poll_with(&waker, |context| scene.session.poll_lost(&mut watch, context)).is_pending());
    scene.clock.jump(TTL);
    scene.session.due(scene.session.now());
    assert_eq!(count.take(), 1);
    let lost = poll_with(&waker, |context| scene.session.poll_lost(&mut watch, context));
    assert_eq!(lost, Poll::Ready(Loss::Expired));
    let mut gone = scene.session.watch(99.into());
    let lost = poll_with(&waker, |context| scene.session.poll_lost(&mut gone, context));
    assert_eq!(lost, Poll::Ready(Loss::Closed));
}

#[test]
fn watch_is_woken_by_the_result_of_a_renewal() {
    let scene = Scene::new();
    let lease = scene.lease("a");
    let (count, waker) = task();
    let mut watch = scene.session.watch(lease);
    for (result, is_renewed) in [
        (answer(Reply::Renewed { valid_for: TTL, tokens: None, contended: false }), true),
        (failure(), false),
    ] {
        let renewal = scene.session.begin_renewal(lease, scene.start).unwrap();
        assert!(poll_with(&waker, |context| scene.session.poll_renewed(&mut watch, context)).is_pending());
        scene.session.handle_response(&renewal, scene.start, &result);
        assert_eq!(count.take(), 1);
        let ended = poll_with(&waker, |context| scene.session.poll_renewed(&mut watch, context));
        let Poll::Ready(ended) = ended else { panic!("{ended:?}") };
        assert_eq!(ended.is_ok(), is_renewed, "{ended:?}");
    }
    let mut gone = scene.session.watch(99.into());
    let ended = poll_with(&waker, |context| scene.session.poll_renewed(&mut gone, context));
    assert!(matches!(ended, Poll::Ready(Err(RenewalError::Lost(Loss::Closed)))), "{ended:?}");
}

#[test]
fn watch_is_woken_by_the_end_of_a_release_and_takes_the_entry() {
    let scene = Scene::new();
    let attempt = scene.begin("a", None, true);
    scene.answer(&attempt, QUEUED);
    let deadline = scene.session.release_dropped(attempt.entry, scene.start).unwrap();
    scene.session.table().entries.get_mut(&attempt.entry).unwrap().is_referenced = true;
    let (count, waker) = task();
    let mut watch = scene.session.watch(attempt.entry);
    assert!(poll_with(&waker, |context| scene.session.poll_released(&mut watch, context)).is_pending());
    scene.answer(&deadline, Reply::Released);
    assert_eq!((count.take(), scene.session.len()), (1, 1));
    let released = poll_with(&waker, |context| scene.session.poll_released(&mut watch, context));
    assert_eq!((released, scene.session.len()), (Poll::Ready(ReleaseOutcome::Released), 0));
    let released = poll_with(&waker, |context| scene.session.poll_released(&mut watch, context));
    assert_eq!(released, Poll::Ready(ReleaseOutcome::Released), "it is gone");
}

#[test]
fn sleep_wakes_the_driver_and_ends_at_its_time() {
    let scene = Scene::new();
    let sleepers = || scene.session.table().sleepers.len();
    let (count, waker) = task();
    let mut sleep = pin!(Sleep::until(&scene.session, scene.after(2)));
    assert!(poll_with(&waker, |context| sleep.as_mut().poll(context)).is_pending());
    assert_eq!((scene.driver.take(), sleepers()), (1, 1));
    let mut dropped = Box::pin(Sleep::until(&scene.session, scene.after(2)));
    assert!(poll_with(&waker, |context| dropped.as_mut().poll(context)).is_pending());
    assert_eq!((scene.driver.take(), sleepers()), (0, 2));
    drop(dropped);
    assert_eq!(sleepers(), 1);
    assert_eq!(scene.session.due(scene.after(1)).next, scene.after(2));
    assert_eq!(count.take(), 0);
    scene.clock.jump(Duration::from_secs(2));
    scene.session.due(scene.session.now());
    assert_eq!((count.take(), sleepers()), (1, 0));
    assert!(poll_with(&waker, |context| sleep.as_mut().poll(context)).is_ready());
}

#[test]
fn sleep_ends_with_the_driver() {
    let scene = Scene::new();
    let (count, waker) = task();
    let mut sleep = pin!(Sleep::until(&scene.session, scene.after(2)));
    assert!(poll_with(&waker, |context| sleep.as_mut().poll(context)).is_pending());
    scene.session.driver_gone();
    assert_eq!(count.take(), 1);
    assert!(poll_with(&waker, |context| sleep.as_mut().poll(context)).is_ready());
}

#[test]
fn work_ends_before_its_deadline_or_not_at_all() {
    let scene = Scene::new();
    let session = &scene.session;
    let limited = |deadline| with_deadline(session, deadline, pending::<()>());
    for unlimited in [None, Some(LocalTime::NEVER)] {
        assert!(poll_with(Waker::noop(), |context| pin!(limited(unlimited)).poll(context)).is_pending());
        assert!(session.table().sleepers.is_empty());
    }
    let mut work = pin!(limited(Some(scene.after(1))));
    assert!(poll_with(Waker::noop(), |context| work.as_mut().poll(context)).is_pending());
    scene.clock.jump(Duration::from_secs(1));
    assert_eq!(poll_with(Waker::noop(), |context| work.as_mut().poll(context)), Poll::Ready(None));
    let done = with_deadline(session, Some(scene.start), ready(7));
    assert_eq!(poll_with(Waker::noop(), |context| pin!(done).poll(context)), Poll::Ready(Some(7)));
}
