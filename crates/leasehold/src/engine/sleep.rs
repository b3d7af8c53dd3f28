//! Sleeping until a point on the clock that counts suspend, on any executor: the driver wakes the sleeper.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use leasehold_core::LocalTime;

use super::ids::WakerId;
use super::session::Session;

/// A future that ends when the local clock reaches a point, or when the driver ends.
pub(crate) struct Sleep {
    session: Arc<Session>,
    until: LocalTime,
    key: WakerId,
}

impl Sleep {
    pub(crate) fn until(session: &Arc<Session>, until: LocalTime) -> Self {
        let key = session.ids.waker();
        Self { session: session.clone(), until, key }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.session.now() >= self.until {
            return Poll::Ready(());
        }
        let replaced = self.session.act(|table, effects| {
            if table.is_driver_gone {
                return None;
            }
            table.wake_driver_by(self.until, effects);
            Some(table.sleepers.insert((self.until, self.key), context.waker().clone()))
        });
        // No driver is left to wake this task.
        let Some(replaced) = replaced else { return Poll::Ready(()) };
        // Dropping a waker may drop its task, and with it a guard that takes the mutex: it is dropped with the mutex free.
        drop(replaced);
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

/// The result of `work`; `None` if the deadline comes first.
pub(crate) async fn with_deadline<T>(
    session: &Arc<Session>,
    deadline: Option<LocalTime>,
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut work = pin!(work);
    let deadline = deadline.filter(|deadline| *deadline != LocalTime::NEVER);
    let mut limit = deadline.map(|deadline| Sleep::until(session, deadline));
    poll_fn(|context| {
        if let Poll::Ready(done) = work.as_mut().poll(context) {
            return Poll::Ready(Some(done));
        }
        let Some(limit) = &mut limit else { return Poll::Pending };
        ready!(Pin::new(limit).poll(context));
        // The limit also ends with the driver, which may have ended the work between the two polls.
        match work.as_mut().poll(context) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending => Poll::Ready(None),
        }
    })
    .await
}
