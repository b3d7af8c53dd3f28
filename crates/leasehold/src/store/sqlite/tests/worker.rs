//! The worker in trouble: it panics, it has much to do, and it does not know what became of a COMMIT.

use super::*;

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
            let Reached::Open(letterbox) = self.mailboxes.reach(push.to()) else { panic!("it is there") };
            letterbox.post(&Push { acquisition, kind: PushKind::Wanted, ..push });
        }
        came.push((push.acquisition.sequence, push.kind));
    }
}

#[test]
fn what_others_push_does_not_wait_for_the_end_of_a_long_batch() {
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
    assert!(pollster::block_on(store.call(batch)).iter().all(Result::is_ok));
    let came = inbox.came.lock().unwrap();
    let at = |sequence| came.iter().rposition(|(of, _)| *of == sequence);
    assert!(at(2).is_some() && at(2) < at(ECHO) && at(ECHO) < at(3), "{came:?}");
}
