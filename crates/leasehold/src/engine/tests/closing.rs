//! The end of a client: what it waits for, and which tasks it wakes.

use super::*;

#[test]
fn closed_client_has_settled_once_the_store_has_released_everything() {
    for closes in [true, false] {
        let scene = Scene::new();
        let (session, now) = (&scene.session, scene.start);
        let releases = ["a", "b"].map(|name| scene.drop_lease(scene.lease(name)));
        if closes {
            session.close(now);
            assert!(session.is_closed());
        } else {
            session.on_handles_dropped();
            assert!(!session.is_closed());
        }
        let (count, waker) = task();
        for _ in 0..2 {
            assert!(poll_with(&waker, |context| session.poll_closed(context)).is_pending());
        }
        assert!(!session.due(now).is_over);
        scene.driver.take();
        scene.answer(&releases[0], Reply::Released);
        assert_eq!((count.take(), scene.driver.take()), (0, 0), "another release is unconfirmed");
        scene.answer(&releases[1], Reply::Released);
        assert_eq!((count.take(), scene.driver.take()), (1, 1), "the driver may end");
        assert_eq!(poll_with(&waker, |context| session.poll_closed(context)), Poll::Ready(0));
        assert!(session.due(now).is_over);
    }
}

#[test]
fn driver_of_an_open_client_is_not_woken_when_nothing_is_left() {
    let scene = Scene::new();
    let release = scene.drop_lease(scene.lease("a"));
    scene.driver.take();
    scene.answer(&release, Reply::Released);
    assert_eq!(scene.driver.take(), 0);
    assert!(!scene.session.due(scene.start).is_over);
}

/// Releases a lease whose store never answers.
fn let_a_release_expire(scene: &Scene, closes: bool) {
    scene.drop_lease(scene.lease("a"));
    if closes {
        scene.session.close(scene.session.now());
    }
    scene.clock.jump(Duration::from_secs(60));
    scene.session.due(scene.session.now());
}

#[test]
fn close_reports_the_releases_that_the_store_did_not_confirm_since() {
    let result = |scene: &Scene| poll_with(Waker::noop(), |context| scene.session.poll_closed(context));
    let before = Scene::new();
    let_a_release_expire(&before, false);
    before.session.close(before.session.now());
    assert_eq!(result(&before), Poll::Ready(0), "it failed before the close");
    let since = Scene::new();
    let_a_release_expire(&since, true);
    assert_eq!(result(&since), Poll::Ready(1));
    since.session.close(since.session.now());
    assert_eq!(result(&since), Poll::Ready(1), "a second close forgets nothing");
}

#[test]
fn close_after_the_driver_has_ended_reports_what_is_left() {
    let scene = Scene::new();
    let session = &scene.session;
    let_a_release_expire(&scene, true);
    let mut table = session.table();
    (table.unconfirmed, table.unsettled, table.companions) = (10, 3, 2);
    drop(table);
    let (count, waker) = task();
    assert!(poll_with(&waker, |context| session.poll_closed(context)).is_pending());
    assert!(poll_with(&waker, |context| session.poll_driver_gone(context)).is_pending());
    session.driver_gone();
    assert_eq!(count.take(), 1);
    assert_eq!(poll_with(&waker, |context| session.poll_closed(context)), Poll::Ready(15));
    assert_eq!(poll_with(&waker, |context| session.poll_driver_gone(context)), Poll::Ready(()));
}

#[test]
fn close_releases_leases_and_refuses_attempts() {
    let scene = Scene::new();
    let (session, now) = (&scene.session, scene.start);
    let lease = scene.lease("a");
    scene.driver.take();
    session.close(now);
    assert_eq!(scene.driver.take(), 1);
    let release = scene.due(now).pop().expect("the release");
    assert!(release.entry == lease && matches!(release.command, Command::Release(_)), "{release:?}");
    let command = Acquire::exclusive(session.next_acquisition(), TTL);
    assert!(session.begin(resource("b"), terms(), MinHold::default(), command, None, now).is_err());
}

#[test]
fn client_ends_after_the_last_leg_of_a_bridge() {
    let scene = Scene::new();
    let session = &scene.session;
    let (count, waker) = task();
    session.begin_companion();
    session.begin_companion();
    session.close(scene.start);
    assert!(poll_with(&waker, |context| session.poll_closed(context)).is_pending());
    session.end_companion(true);
    assert!(poll_with(&waker, |context| session.poll_closed(context)).is_pending());
    assert_eq!((count.take(), session.due(scene.start).is_over), (0, false));
    scene.driver.take();
    session.end_companion(true);
    assert_eq!((count.take(), scene.driver.take()), (1, 1));
    assert_eq!(poll_with(&waker, |context| session.poll_closed(context)), Poll::Ready(0));
    assert!(session.due(scene.start).is_over);
}

#[test]
fn leg_of_a_bridge_is_trusted_released_and_lost() {
    let scene = Scene::new();
    let (session, now) = (&scene.session, scene.start);
    let lease = scene.lease("a");
    let unlimited = session.remaining(lease, now).unwrap();
    session.limit_trust(lease, scene.after(2), now);
    assert_eq!(session.remaining(lease, now), Ok(Duration::from_secs(2)));
    session.lift_trust_limit(lease, now);
    assert_eq!(session.remaining(lease, now), Ok(unlimited));
    session.lose_companion(lease, now);
    assert_eq!(session.remaining(lease, now), Err(Loss::Bridge));
}

#[test]
fn release_that_was_not_sent_at_first_is_not_repeated() {
    let scene = Scene::new();
    let lease = scene.lease("a");
    scene.session.set_min_hold(lease, Duration::from_secs(60), scene.start);
    scene.clock.jump(Duration::from_secs(20));
    let now = scene.session.now();
    scene.drop_lease(lease);
    scene.session.defer_release(lease, now);
    scene.session.close(now);
    let release = scene.due(now).pop().expect("the release");
    scene.answer(&release, Reply::NotHeld);
    let closed = poll_with(Waker::noop(), |context| scene.session.poll_closed(context));
    assert_eq!(closed, Poll::Ready(0), "the lease was lost before");
}
