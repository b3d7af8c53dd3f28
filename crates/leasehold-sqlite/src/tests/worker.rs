//! A worker that panics, runs a long batch, or gets an unknown outcome of a COMMIT.

use super::*;

/// Panics on the thread that delivers a push.
struct PanickingInbox;

impl Inbox for PanickingInbox {
    fn reconnected(&self, _: &dyn Fn(&Resource) -> bool) {}

    fn deliver(&self, push: Push) {
        panic!("{push:?}, on purpose");
    }
}

#[test]
fn client_with_a_panicked_worker_is_unreachable() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let inbox: Arc<dyn Inbox> = Arc::new(PanickingInbox);
    let first = open(&path, 1).unwrap();
    let second = open_with(&path, 2, Arc::downgrade(&inbox)).unwrap();
    assert!(matches!(granted(&first, id(1, 1)), Reply::Granted(_)));
    assert!(matches!(granted(&second, id(2, 1)), Reply::Queued(_)));
    first.try_call_inline(&resource("a"), &release(id(1, 1))).unwrap().unwrap();
    let give_up = Instant::now() + Duration::from_secs(10);
    while !matches!(first.shared.mailboxes.reach(ClientId::new(2)), Reached::Gone) {
        assert!(Instant::now() < give_up, "the client is still reachable");
        thread::yield_now();
    }
    let other = resource("b");
    let ask = |store: &Sqlite, acquisition| {
        store.try_call_inline(&other, &acquire(acquisition, true)).unwrap().unwrap().reply
    };
    assert!(matches!(ask(&first, id(1, 2)), Reply::Granted(_)));
    assert!(matches!(ask(&second, id(2, 2)), Reply::Queued(_)));
    first.try_call_inline(&other, &release(id(1, 2))).unwrap().unwrap();
    assert!(
        matches!(ask(&first, id(1, 3)), Reply::Granted(_)),
        "the unreachable client is not granted the lock"
    );
    let answers =
        pollster::block_on(second.call_batch(vec![Call::new(Arc::new(other.clone()), Command::Inspect)], 0));
    assert!(matches!(&answers[..], [Err(error)] if error.failure == Failure::NotSent), "{answers:?}");
}

/// It has committed them, and ends before it answers.
#[test]
fn commands_of_a_worker_that_panics_are_unknown() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let inbox: Arc<dyn Inbox> = Arc::new(PanickingInbox);
    let store = open_with(&path, 1, Arc::downgrade(&inbox)).unwrap();
    assert!(matches!(granted(&store, id(1, 1)), Reply::Granted(_)));
    assert!(matches!(granted(&store, id(1, 2)), Reply::Queued(_)));
    let batch = vec![
        Call::new(Arc::new(resource("a")), release(id(1, 1))),
        Call::new(Arc::new(resource("b")), acquire(id(1, 3), false)),
    ];
    let answers = pollster::block_on(store.call_batch(batch, 0));
    let is_unknown = |answer: &CallResult| matches!(answer, Err(error) if error.failure == Failure::Unknown);
    assert!(answers.len() == 2 && answers.iter().all(is_unknown), "{answers:?}");
}

/// Records pushes. On the first one, it writes a push as another client would.
struct EchoInbox {
    mailboxes: Mailboxes,
    received: Mutex<Vec<(u64, PushKind)>>,
}

/// Sequence number of the push that stands for another client's.
const ECHO: u64 = 99;

impl Inbox for EchoInbox {
    fn reconnected(&self, _: &dyn Fn(&Resource) -> bool) {}

    fn deliver(&self, push: Push) {
        let mut received = self.received.lock().unwrap();
        if received.is_empty() {
            let acquisition = Acquisition { sequence: ECHO, ..push.acquisition };
            let Reached::Open(writer) = self.mailboxes.reach(push.inbox) else {
                panic!("the client is reachable")
            };
            writer.write_push(&Push { acquisition, kind: PushKind::Contended, ..push });
        }
        received.push((push.acquisition.sequence, push.kind));
    }
}

#[test]
fn pushes_are_delivered_during_a_long_batch() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    fs::write(&path, "").unwrap();
    let inbox =
        Arc::new(EchoInbox { mailboxes: Mailboxes::beside(&path).unwrap(), received: Mutex::default() });
    let weak: Weak<dyn Inbox> = Arc::<EchoInbox>::downgrade(&inbox);
    let store = open_with(&path, 1, weak).unwrap();
    assert!(matches!(granted(&store, id(1, 1)), Reply::Granted(_)));
    assert!(matches!(granted(&store, id(1, 2)), Reply::Queued(_)));
    assert!(matches!(granted(&store, id(1, 3)), Reply::Queued(_)));
    // The batch begins with a release that grants to the second, and ends with one that grants to the third. It has several transactions,
    // and ends before the second's grant expires, also on a slow machine.
    let mut batch = vec![Call::new(Arc::new(resource("a")), Command::Inspect); 100];
    batch.first_mut().unwrap().command = release(id(1, 1));
    batch.last_mut().unwrap().command = release(id(1, 2));
    assert!(pollster::block_on(store.call_batch(batch, 0)).iter().all(Result::is_ok));
    let received = inbox.received.lock().unwrap();
    let at = |sequence| received.iter().rposition(|(of, _)| *of == sequence);
    assert!(at(2).is_some() && at(2) < at(ECHO) && at(ECHO) < at(3), "{received:?}");
}

/// Makes the COMMIT of a release fail with an error after which its outcome is unknown.
const FAILS: &str = "
    CREATE TABLE fails (
        resource, client, sequence,
        FOREIGN KEY (resource, client, sequence) REFERENCES lease DEFERRABLE INITIALLY DEFERRED
    );
    INSERT INTO fails SELECT resource, client, sequence FROM lease;
";

#[test]
fn failed_commit_is_unknown_for_all_its_commands() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    assert!(matches!(granted(&store, id(1, 1)), Reply::Granted(_)));
    let other = Connection::open(&path).unwrap();
    other.execute_batch(FAILS).unwrap();
    store.shared.has_own_schema.store(true, Ordering::Relaxed);
    let inline = store.try_call_inline(&resource("a"), &release(id(1, 1))).unwrap();
    assert!(matches!(inline, Err(error) if error.failure.may_have_effect()));
    let batch = vec![
        Call::new(Arc::new(resource("a")), release(id(1, 1))),
        Call::new(Arc::new(resource("b")), acquire(id(1, 2), false)),
    ];
    for answered in pollster::block_on(store.call_batch(batch.clone(), 0)) {
        assert!(matches!(&answered, Err(error) if error.failure.may_have_effect()), "{answered:?}");
    }
    // A retry learns the outcome: nothing was committed.
    other.execute_batch("DELETE FROM fails").unwrap();
    let answers = pollster::block_on(store.call_batch(batch, 0));
    let replies: Vec<_> = answers.into_iter().map(|answered| answered.unwrap().reply).collect();
    assert!(matches!(&replies[..], [Reply::Released, Reply::Granted(_)]), "{replies:?}");
}

/// A list may take seconds, and a renewal may not wait for it.
#[test]
fn list_and_the_worker_do_not_wait_for_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    assert!(matches!(granted(&store, id(1, 1)), Reply::Granted(_)));
    let other = Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let waiting = store.call(Call::new(Arc::new(resource("b")), acquire(id(1, 2), false)), 0);
    let listed = pollster::block_on(store.list()).unwrap();
    assert_eq!(listed, [resource("a")]);
    other.execute_batch("ROLLBACK").unwrap();
    assert!(matches!(pollster::block_on(waiting).unwrap().reply, Reply::Granted(_)));
}
