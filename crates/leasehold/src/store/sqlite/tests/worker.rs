//! The worker in trouble: it panics, it has much to do, and it does not know what became of a COMMIT.

use super::*;

/// Somebody whose inbox brings down the thread that delivers to it.
struct Panics;

impl Inbox for Panics {
    fn reconnected(&self, _: &dyn Fn(&Resource) -> bool) {}

    fn deliver(&self, push: Push) {
        panic!("{push:?} came, as it was to");
    }
}

#[test]
fn client_with_a_panicked_worker_is_unreachable() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let inbox: Arc<dyn Inbox> = Arc::new(Panics);
    let first = open(&path, 1).unwrap();
    let second = Sqlite::open(&path, false, ClientId::new(2), Arc::downgrade(&inbox)).unwrap();
    assert!(matches!(granted(&first, id(1, 1)), Reply::Granted(_)));
    assert!(matches!(granted(&second, id(2, 1)), Reply::Queued(_)));
    first.try_call_inline(&resource("a"), &release(id(1, 1))).unwrap().unwrap();
    let give_up = Instant::now() + Duration::from_secs(10);
    while !matches!(first.shared.mailboxes.reach(ClientId::new(2)), Reached::Gone) {
        assert!(Instant::now() < give_up, "it still seems to be there");
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
        "it is not granted what it would not hear of"
    );
    let answers = pollster::block_on(second.call_batch(vec![(Arc::new(other.clone()), Command::Inspect)], 0));
    assert!(matches!(&answers[..], [Err(error)] if error.failure == Failure::NotSent), "{answers:?}");
}

/// Notes what comes. As the first comes, another client writes to this one.
struct Echo {
    mailboxes: Mailboxes,
    came: Mutex<Vec<(u64, PushKind)>>,
}

/// By which the other client's push is known.
const ECHO: u64 = 99;

impl Inbox for Echo {
    fn reconnected(&self, _: &dyn Fn(&Resource) -> bool) {}

    fn deliver(&self, push: Push) {
        let mut came = self.came.lock().unwrap();
        if came.is_empty() {
            let acquisition = Acquisition { sequence: ECHO, ..push.acquisition };
            let Reached::Open(writer) = self.mailboxes.reach(push.to()) else { panic!("it is there") };
            writer.write_push(&Push { acquisition, kind: PushKind::Contended, ..push });
        }
        came.push((push.acquisition.sequence, push.kind));
    }
}

#[test]
fn pushes_are_delivered_during_a_long_batch() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    fs::write(&path, "").unwrap();
    let inbox = Arc::new(Echo { mailboxes: Mailboxes::beside(&path).unwrap(), came: Mutex::default() });
    let weak: Weak<dyn Inbox> = Arc::<Echo>::downgrade(&inbox);
    let store = Sqlite::open(&path, false, ClientId::new(1), weak).unwrap();
    assert!(matches!(granted(&store, id(1, 1)), Reply::Granted(_)));
    assert!(matches!(granted(&store, id(1, 2)), Reply::Queued(_)));
    assert!(matches!(granted(&store, id(1, 3)), Reply::Queued(_)));
    // A transaction that grants to the second, and at the very end one that grants to the third.
    let mut batch = vec![(Arc::new(resource("a")), Command::Inspect); 1_000];
    batch.first_mut().unwrap().1 = release(id(1, 1));
    batch.last_mut().unwrap().1 = release(id(1, 2));
    assert!(pollster::block_on(store.call_batch(batch, 0)).iter().all(Result::is_ok));
    let came = inbox.came.lock().unwrap();
    let at = |sequence| came.iter().rposition(|(of, _)| *of == sequence);
    assert!(at(2).is_some() && at(2) < at(ECHO) && at(ECHO) < at(3), "{came:?}");
}

/// Whoever gives back a lease meets a COMMIT that fails for a reason which is not known to leave everything as it was.
const FAILS: &str = "
    CREATE TABLE known (id INTEGER PRIMARY KEY);
    CREATE TABLE doubt (id INTEGER REFERENCES known DEFERRABLE INITIALLY DEFERRED);
    CREATE TRIGGER fails AFTER DELETE ON lease BEGIN INSERT INTO doubt VALUES (1); END;
";

#[test]
fn failed_commit_is_unknown_for_all_its_commands() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    let store = open(&path, 1).unwrap();
    assert!(matches!(granted(&store, id(1, 1)), Reply::Granted(_)));
    let other = Connection::open(&path).unwrap();
    other.execute_batch(FAILS).unwrap();
    let alone = store.try_call_inline(&resource("a"), &release(id(1, 1))).unwrap();
    assert!(matches!(alone, Err(error) if error.failure == Failure::Unknown));
    let batch = vec![
        (Arc::new(resource("a")), release(id(1, 1))),
        (Arc::new(resource("b")), acquire(id(1, 2), false)),
    ];
    for answered in pollster::block_on(store.call_batch(batch.clone(), 0)) {
        assert!(matches!(&answered, Err(error) if error.failure == Failure::Unknown), "{answered:?}");
    }
    // Whoever asks again learns how it is: this time, nothing had happened.
    other.execute_batch("DROP TRIGGER fails").unwrap();
    let answers = pollster::block_on(store.call_batch(batch, 0));
    let replies: Vec<_> = answers.into_iter().map(|answered| answered.unwrap().reply).collect();
    assert!(matches!(&replies[..], [Reply::Released, Reply::Granted(_)]), "{replies:?}");
}
