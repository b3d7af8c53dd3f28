//! Local queues: which task gets the lease, with which token, and what the store is asked for.

use leasehold_core::{HandoffLimits, Renew};

use super::super::local_queue::{AcquireKey, CancelledWait, EnqueueError, ResourceHash, Ticket, WaitOutcome};
use super::super::{AttemptEnd, EndedHold};
use super::*;

const HAND_OFFS: u32 = 1;

pub(super) fn key() -> AcquireKey {
    let resource = resource("a");
    AcquireKey {
        hash: ResourceHash::of(&resource),
        resource,
        terms: terms(),
        wait: WAIT,
        wait_policy: policy(),
        metadata: Arc::from("a task"),
        hand_off: HandoffLimits { max_handoffs: HAND_OFFS, max_duration: TTL },
    }
}

impl Scene {
    fn enqueue(&self) -> (Ticket, Option<Transmit>) {
        self.session.enqueue(key(), self.session.now()).ok().expect("there is room")
    }

    /// The first task of a queue, with its command, and others behind it.
    fn queue<const OTHERS: usize>(&self) -> (Transmit, Ticket, [Ticket; OTHERS]) {
        let (first, transmit) = self.enqueue();
        let others = [(); OTHERS].map(|()| {
            let (ticket, transmit) = self.enqueue();
            assert!(transmit.is_none(), "one attempt for all tasks");
            ticket
        });
        (transmit.expect("the first task sends the attempt"), first, others)
    }

    fn wait(&self, ticket: Ticket) -> Poll<WaitOutcome> {
        poll_with(Waker::noop(), |context| self.session.poll_wait(ticket, context))
    }

    /// The lease and the token that the task gets.
    fn granted(&self, ticket: Ticket) -> Option<(EntryId, u64)> {
        match self.wait(ticket) {
            Poll::Ready(WaitOutcome::Granted(lease, token)) => Some((lease, token.get())),
            _ => None,
        }
    }

    fn ended(&self, ticket: Ticket) -> Option<AttemptEnd> {
        match self.wait(ticket) {
            Poll::Ready(WaitOutcome::Ended(ended)) => Some(ended),
            _ => None,
        }
    }

    fn cancel(&self, ticket: Ticket) -> CancelledWait {
        self.session.cancel_wait(ticket, self.session.now())
    }

    fn queues(&self) -> usize {
        self.session.table().local_queues.by_id.len()
    }

    /// The command of a lease whose hold ended without a hand-off, and its loss.
    fn released(&self, ticket: Ticket, lease: EntryId, now: LocalTime) -> (Transmit, Option<Loss>) {
        match self.session.release_or_hand_off(Some(ticket.queue), lease, now) {
            EndedHold::Releasing { transmit: Some(transmit), loss } => (transmit, loss),
            EndedHold::Releasing { transmit: None, .. } => panic!("no release is sent"),
            EndedHold::HandedOff => panic!("the queue has kept the lease"),
        }
    }
}

fn acquire(transmit: &Transmit) -> &Acquire {
    match &transmit.command {
        Command::Acquire(acquire) => acquire,
        other => panic!("{other:?}"),
    }
}

#[test]
fn tasks_get_the_lease_in_their_order_with_rising_tokens() {
    let scene = Scene::new();
    let (attempt, first, [second, third]) = scene.queue();
    assert_eq!(acquire(&attempt).wait, Some(WAIT));
    assert_eq!((acquire(&attempt).reserve, &*acquire(&attempt).metadata), (0, "a task"));
    assert!(!scene.session.holds_lease(&key(), scene.start));
    scene.answer(&attempt, granted(10, 11));
    let lease = attempt.entry;
    assert!(scene.session.holds_lease(&key(), scene.start) && scene.granted(second).is_none());
    assert_eq!(scene.granted(first), Some((lease, 10)));
    assert!(scene.session.holds_lease(&key(), scene.start) && scene.granted(second).is_none());
    assert!(scene.session.hand_off(first.queue, lease, scene.start));
    assert_eq!(scene.granted(second), Some((lease, 11)));
    // No token is left: a renewal fetches more.
    let renewal = scene.due(scene.start).pop().expect("a renewal");
    assert!(matches!(renewal.command, Command::Renew(Renew { reserve: 1.., .. })), "{renewal:?}");
    let ended = scene.session.release_or_hand_off(Some(first.queue), lease, scene.start);
    assert!(matches!(ended, EndedHold::HandedOff) && scene.granted(third).is_none());
    let tokens = TokenRange::new(20, 30);
    scene.answer(&renewal, Reply::Renewed { valid_for: TTL, tokens, contended: false });
    assert_eq!(scene.granted(third), Some((lease, 20)));
    // No task is left: the lease is released, and the queue is removed.
    let (release, loss) = scene.released(third, lease, scene.start);
    assert_eq!((loss, scene.queues()), (None, 0));
    scene.answer(&release, Reply::Released);
    assert!(!scene.session.holds_lease(&key(), scene.start));
}

#[test]
fn contended_lease_is_released_after_its_hand_offs_and_the_other_tasks_queue_again() {
    let scene = Scene::new();
    let (attempt, first, [second]) = scene.queue();
    scene.answer(&attempt, QUEUED);
    scene.push_grant(attempt.entry, grant(10, 19));
    assert_eq!(scene.granted(first), Some((attempt.entry, 10)));
    assert!(scene.session.hand_off(first.queue, attempt.entry, scene.start));
    assert_eq!(scene.granted(second), Some((attempt.entry, 11)));
    let others = [(); 2].map(|()| scene.enqueue().0);
    let (release, loss) = scene.released(second, attempt.entry, scene.start);
    assert!(matches!(release.command, Command::Release(_)) && loss.is_none());
    let again = scene.due(scene.start).pop().expect("an attempt for the other tasks");
    assert_eq!(acquire(&again).reserve, HAND_OFFS, "a range of tokens for several tasks");
    let wait = acquire(&again).wait.expect("it waits");
    assert_eq!(wait.max_queue, u32::MAX, "a full queue does not refuse tasks that wait already");
    scene.answer(&again, granted(20, 20));
    assert_eq!(scene.granted(others[0]), Some((again.entry, 20)));
}

#[test]
fn full_queue_refuses_tasks() {
    let scene = Scene::new();
    let (attempt, first, _) = scene.queue::<2>();
    assert!(matches!(scene.session.enqueue(key(), scene.start), Err(EnqueueError::QueueFull)));
    scene.answer(&attempt, granted(1, 1));
    assert!(scene.granted(first).is_some());
    scene.enqueue();
    scene.session.close(scene.start);
    assert!(matches!(scene.session.enqueue(key(), scene.start), Err(EnqueueError::Closed)));
}

#[test]
fn failed_attempt_ends_the_wait_of_every_task() {
    let scene = Scene::new();
    let (attempt, first, [second, third]) = scene.queue();
    let error = Err(StoreError::new(Failure::NotSent, "unreachable"));
    scene.session.handle_response(&attempt, scene.start, &error);
    assert_eq!(scene.session.len(), 0);
    for ticket in [first, second] {
        let ended = scene.ended(ticket);
        let message = |(outcome, error): AttemptEnd| (outcome, error.map(|error| error.message));
        assert_eq!(ended.map(message), Some((Outcome::Failed, Some("unreachable".to_owned()))));
    }
    assert!(matches!(scene.cancel(third), CancelledWait::AttemptContinues));
    assert_eq!(scene.queues(), 0);
}

#[test]
fn attempt_is_cancelled_with_its_last_task() {
    let scene = Scene::new();
    let (attempt, first, [second]) = scene.queue();
    assert!(matches!(scene.cancel(first), CancelledWait::AttemptContinues));
    let expected = attempt.entry;
    let cancelled = scene.cancel(second);
    let CancelledWait::LastWaiter { entry: entry_id, may_be_in_store: true } = cancelled else { panic!() };
    assert_eq!((entry_id, scene.queues()), (expected, 0));
    // A busy store has not received the attempt.
    let (attempt, only, []) = scene.queue();
    let error = Err(StoreError::new(Failure::Busy, "busy"));
    scene.session.handle_response(&attempt, scene.start, &error);
    assert!(matches!(scene.cancel(only), CancelledWait::LastWaiter { may_be_in_store: false, .. }));
}

#[test]
fn cancelled_task_leaves_the_lease_to_the_next_one() {
    let scene = Scene::new();
    let (attempt, first, [second, third]) = scene.queue();
    scene.answer(&attempt, granted(10, 19));
    // The first task has the lease, and was not polled since.
    assert!(matches!(scene.cancel(second), CancelledWait::LeaseInUse));
    assert_eq!(scene.granted(first), Some((attempt.entry, 10)));
    assert!(matches!(scene.cancel(third), CancelledWait::LeaseInUse));
    assert!(scene.session.holds_lease(&key(), scene.start), "the first task still has the lease");
    let (fourth, fifth) = (scene.enqueue().0, scene.enqueue().0);
    assert!(scene.session.hand_off(first.queue, attempt.entry, scene.start));
    assert!(matches!(scene.cancel(fourth), CancelledWait::LeaseInUse));
    assert_eq!(scene.granted(fifth), Some((attempt.entry, 12)));
    let sixth = scene.enqueue().0;
    assert!(scene.session.hand_off(first.queue, attempt.entry, scene.start));
    let CancelledWait::LastWaiter { entry: entry_id, may_be_in_store: true } = scene.cancel(sixth) else {
        panic!()
    };
    assert_eq!((entry_id, scene.queues()), (attempt.entry, 0));
}

#[test]
fn lost_lease_of_a_task_leads_to_a_new_attempt_for_the_others() {
    let scene = Scene::new();
    let (attempt, first, [second]) = scene.queue();
    scene.answer(&attempt, granted(10, 19));
    assert!(scene.granted(first).is_some());
    let late = scene.after(20);
    let again = scene.due(late).pop().expect("an attempt for the other task");
    assert_ne!(EntryId::from(acquire(&again).acquisition), attempt.entry);
    // The guard of the lost lease changes nothing for the queue.
    assert!(!scene.session.hand_off(first.queue, attempt.entry, late));
    assert_eq!(scene.released(first, attempt.entry, late).1, Some(Loss::Expired));
    assert!(scene.due(late).is_empty());
    scene.session.handle_response(&again, late, &answer(granted(20, 20)));
    assert_eq!(scene.granted(second), Some((again.entry, 20)));
}

#[test]
fn lost_lease_that_no_task_has_seen_is_released() {
    let scene = Scene::new();
    let (attempt, first, []) = scene.queue();
    scene.answer(&attempt, granted(10, 19));
    let late = scene.after(20);
    let sent = scene.due(late);
    let releases = sent.iter().filter(|transmit| matches!(transmit.command, Command::Release(_)));
    let releases: Vec<_> = releases.map(|transmit| transmit.entry).collect();
    assert_eq!((sent.len(), releases), (2, vec![attempt.entry]), "and a new attempt: {sent:?}");
    assert!(scene.granted(first).is_none());
}

#[test]
fn closed_client_ends_the_waits_of_its_tasks() {
    let scene = Scene::new();
    let (attempt, first, [second]) = scene.queue();
    scene.answer(&attempt, granted(10, 19));
    assert!(scene.granted(first).is_some());
    scene.session.close(scene.start);
    assert!(matches!(scene.ended(second), Some((Outcome::Cancelled, None))));
    assert_eq!(scene.sent(scene.start), [attempt.entry], "only the release");
    assert!(matches!(scene.ended(second), Some((Outcome::Cancelled, None))), "its queue is removed");
}

#[test]
fn task_is_woken_by_its_last_waker_unless_it_has_received_the_response_itself() {
    for polls in [false, true] {
        let scene = Scene::new();
        let (attempt, first, []) = scene.queue();
        let ((before, earlier), (after, later)) = (task(), task());
        for waker in [&earlier, &later] {
            assert!(poll_with(waker, |context| scene.session.poll_wait(first, context)).is_pending());
        }
        let (polled_by, response) = (polls.then_some(first), answer(granted(1, 1)));
        scene.session.handle_polled_response(polled_by, &attempt, scene.start, &response);
        assert_eq!((before.take(), after.take()), (0, usize::from(!polls)));
        assert!(scene.granted(first).is_some());
    }
}

#[test]
fn detached_lease_leaves_its_queue() {
    let scene = Scene::new();
    let (attempt, first, [second]) = scene.queue();
    scene.answer(&attempt, granted(10, 19));
    assert!(scene.granted(first).is_some());
    let detached = scene.session.detach(attempt.entry, Some(first.queue), scene.start).unwrap();
    assert_eq!((detached.acquisition, detached.ttl), (acquire(&attempt).acquisition, TTL));
    let sent = scene.due(scene.start);
    assert!(sent.len() == 1 && sent[0].entry != attempt.entry, "no release: {sent:?}");
    scene.answer(&sent[0], granted(20, 20));
    assert_eq!(scene.granted(second), Some((sent[0].entry, 20)));
    assert!(matches!(scene.session.detach(attempt.entry, None, scene.start), Err(Loss::Closed)));
}

#[test]
fn tasks_queue_again_if_the_store_has_no_tokens_for_them() {
    let scene = Scene::new();
    let (attempt, first, [second]) = scene.queue();
    scene.answer(&attempt, granted(10, 10));
    assert!(scene.granted(first).is_some());
    let ended = scene.session.release_or_hand_off(Some(first.queue), attempt.entry, scene.start);
    assert!(matches!(ended, EndedHold::HandedOff) && scene.granted(second).is_none());
    let renewal = scene.due(scene.start).pop().expect("a renewal for tokens");
    scene.answer(&renewal, Reply::Renewed { valid_for: TTL, tokens: None, contended: false });
    let sent = scene.due(scene.start);
    let again = sent.iter().find(|transmit| matches!(transmit.command, Command::Acquire(_)));
    let again = again.unwrap_or_else(|| panic!("an attempt for the other task: {sent:?}"));
    assert!(sent.iter().any(|transmit| matches!(transmit.command, Command::Release(_))), "{sent:?}");
    scene.answer(again, granted(20, 20));
    assert_eq!(scene.granted(second), Some((again.entry, 20)));
}

#[test]
fn cancelled_task_does_not_use_up_the_retry_of_the_others() {
    let scene = Scene::new();
    let (attempt, first, [second]) = scene.queue();
    scene.session.abandon_acquire(attempt.entry, scene.start);
    scene.cancel(first);
    // Its answer is lost with the connection, and so is the next one's.
    for (is_last, sent) in [(false, "the driver's"), (true, "the retry")] {
        let again = scene.due(scene.start).pop().expect(sent);
        assert_eq!(acquire(&again).acquisition, acquire(&attempt).acquisition);
        scene.session.handle_response(&again, scene.start, &failure());
        assert_eq!(scene.ended(second).is_some(), is_last, "{sent}");
    }
}

#[test]
fn lost_lease_is_held_by_no_task() {
    let scene = Scene::new();
    let (attempt, first, []) = scene.queue();
    scene.answer(&attempt, granted(10, 19));
    assert!(scene.granted(first).is_some());
    assert!(scene.session.holds_lease(&key(), scene.after(8)));
    assert!(!scene.session.holds_lease(&key(), scene.after(10)), "the driver has not seen the loss yet");
    let second = scene.enqueue().0;
    scene.clock.jump(Duration::from_secs(10));
    assert!(matches!(scene.cancel(second), CancelledWait::AttemptContinues));
}
