//! Sleeping until a point on the clock that counts suspend, on any executor: the driver wakes the sleeper.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use leasehold_core::LocalTime;

use super::session::Session;
use super::table::Effects;

/// A future that ends when the local clock reaches a point, or when the driver ends.
pub(crate) struct Sleep {
    session: Arc<Session>,
    until: LocalTime,
    key: u64,
}

impl Sleep {
    pub(crate) fn until(session: &Arc<Session>, until: LocalTime) -> Self {
        let key = session.sequence.fetch_add(1, Ordering::Relaxed);
        Self { session: session.clone(), until, key }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.session.now() >= self.until {
            return Poll::Ready(());
        }
        let mut effects = Effects::default();
        // Dropping a waker may drop its task, and with it a guard that takes the mutex: drop it with the mutex free.
        let replaced = {
            let mut table = self.session.table();
            if table.is_driver_gone {
                // No driver is left to wake this task.
                return Poll::Ready(());
            }
            table.wake_driver_by(self.until, &mut effects);
            table.sleepers.insert((self.until, self.key), context.waker().clone())
        };
        drop(replaced);
        self.session.apply_effects(effects);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let mut table = self.session.table();
        let removed = table.sleepers.remove(&(self.until, self.key));
        drop(table);
        drop(removed);
    }
}
