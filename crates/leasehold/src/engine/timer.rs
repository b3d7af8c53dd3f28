//! Timers on the clock that counts suspend, one per client. The runtime's own timers stop during suspend.

pub(crate) use imp::{Timer, Timers};

#[cfg(any(target_os = "linux", target_os = "android"))]
mod imp {
    use std::collections::BTreeMap;
    use std::fs::File;
    use std::future::poll_fn;
    use std::io;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
    use std::task::{Poll, Waker};
    use std::time::Duration;

    use leasehold_core::LocalTime;
    use leasehold_store::clock::Clock;
    use rustix::time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    };
    use tokio::net::unix::pipe::Receiver;

    /// The timers of one thread: all of them share a file descriptor.
    #[derive(Clone)]
    pub(crate) struct Timers(Arc<Shared>);

    struct Shared {
        /// A timerfd on CLOCK_BOOTTIME. The runtime waits until it is readable, as for a pipe. The runtime's general wrapper for
        /// file descriptors would need unsafe code.
        fd: Receiver,
        waiting: Mutex<Waiting>,
    }

    struct Waiting {
        /// By time, then by timer.
        wakers: BTreeMap<(LocalTime, u64), Waker>,
        timers: u64,
        /// It may be due before the first of them is, never after it.
        set_to: LocalTime,
    }

    impl Timers {
        /// Must be called inside the runtime that is going to wait.
        pub(crate) fn new() -> io::Result<Self> {
            let fd =
                timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
            let fd = Receiver::from_file_unchecked(File::from(fd))?;
            let waiting = Waiting { wakers: BTreeMap::new(), timers: 0, set_to: LocalTime::NEVER };
            Ok(Self(Arc::new(Shared { fd, waiting: Mutex::new(waiting) })))
        }

        /// A timer that works while [`Self::run`] runs.
        pub(crate) fn timer(&self) -> Timer {
            let mut waiting = self.0.waiting();
            waiting.timers += 1;
            Timer { shared: self.0.clone(), number: waiting.timers, set_to: LocalTime::NEVER }
        }

        /// Wakes what is due, for ever.
        pub(crate) async fn run(self) {
            loop {
                if let Err(error) = self.0.until_due().await {
                    // A log subscriber may panic, and these are the timers of several clients.
                    let _ = catch_unwind(AssertUnwindSafe(
                        || tracing::error!(%error, "the timer failed; retrying in 1 s"),
                    ));
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                self.0.wake_due(Clock::System.local());
            }
        }
    }

    impl Shared {
        fn waiting(&self) -> MutexGuard<'_, Waiting> {
            self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
        }

        async fn until_due(&self) -> io::Result<()> {
            loop {
                self.fd.readable().await?;
                match self.fd.try_read(&mut [0; 8]) {
                    Ok(_) => return Ok(()),
                    // The timer was set again since it became readable.
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
            }
        }

        fn wake_due(&self, now: LocalTime) {
            let mut waiting = self.waiting();
            let later = waiting.wakers.split_off(&(now + Duration::from_micros(1), 0));
            let mut due = std::mem::replace(&mut waiting.wakers, later);
            waiting.set_to = LocalTime::NEVER;
            let next = waiting.wakers.first_key_value().map(|((time, _), _)| *time);
            if let Some(next) = next
                && self.set(&mut waiting, next).is_err()
            {
                // Each of them tries to set it, and reports the error.
                due.append(&mut waiting.wakers);
            }
            drop(waiting);
            due.into_values().for_each(Waker::wake);
        }

        fn set(&self, waiting: &mut Waiting, time: LocalTime) -> io::Result<()> {
            // All zero would disarm it.
            let micros = time.as_micros().max(1);
            let seconds = i64::try_from(micros / 1_000_000).unwrap_or(i64::MAX);
            let nanos = i64::try_from(micros % 1_000_000 * 1_000).unwrap_or(0);
            let it_value = Timespec { tv_sec: seconds, tv_nsec: nanos };
            let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
            timerfd_settime(&self.fd, TimerfdTimerFlags::ABSTIME, &Itimerspec { it_interval, it_value })?;
            waiting.set_to = time;
            Ok(())
        }
    }

    pub(crate) struct Timer {
        shared: Arc<Shared>,
        number: u64,
        set_to: LocalTime,
    }

    impl Timer {
        /// Ends at this point of the local clock or later. Cancel safe.
        pub(crate) async fn until(&mut self, time: LocalTime) -> io::Result<()> {
            poll_fn(|context| {
                if Clock::System.local() >= time {
                    self.stop();
                    return Poll::Ready(Ok(()));
                }
                match self.set(time, context.waker()) {
                    Ok(()) => Poll::Pending,
                    Err(error) => Poll::Ready(Err(error)),
                }
            })
            .await
        }

        fn set(&mut self, time: LocalTime, waker: &Waker) -> io::Result<()> {
            if self.set_to != time {
                self.stop();
            }
            if time == LocalTime::NEVER {
                return Ok(());
            }
            let mut waiting = self.shared.waiting();
            let slot = waiting.wakers.entry((time, self.number)).or_insert_with(|| waker.clone());
            slot.clone_from(waker);
            self.set_to = time;
            if time < waiting.set_to { self.shared.set(&mut waiting, time) } else { Ok(()) }
        }

        fn stop(&mut self) {
            if self.set_to != LocalTime::NEVER {
                let stopped = self.shared.waiting().wakers.remove(&(self.set_to, self.number));
                // With the mutex free: it may be the last that refers to its task.
                drop(stopped);
                self.set_to = LocalTime::NEVER;
            }
        }
    }

    impl Drop for Timer {
        fn drop(&mut self) {
            self.stop();
        }
    }

    #[cfg(test)]
    mod tests {
        use std::os::fd::AsRawFd as _;

        use futures_util::FutureExt as _;

        use super::*;

        /// What the kernel says about a timer, by the name of the line.
        fn field(timers: &Timers, name: &str) -> String {
            let path = format!("/proc/self/fdinfo/{}", timers.0.fd.as_raw_fd());
            let info = std::fs::read_to_string(path).unwrap();
            let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
            value.unwrap_or_else(|| panic!("no {name} in {info}")).to_owned()
        }

        fn running() -> Timers {
            let timers = Timers::new().unwrap();
            tokio::spawn(timers.clone().run());
            timers
        }

        fn begin(timer: &mut Timer, time: LocalTime) {
            assert!(timer.until(time).now_or_never().is_none());
        }

        #[tokio::test]
        async fn timer_counts_the_time_that_the_machine_sleeps() {
            const CLOCK_BOOTTIME: &str = "7";
            const TFD_TIMER_ABSTIME: &str = "01";
            let timers = running();
            let mut timer = timers.timer();
            let now = Clock::System.local();
            begin(&mut timer, now + Duration::from_secs(60));
            // A machine that sleeps for the whole time finds it due when it wakes.
            assert_eq!(field(&timers, "clockid"), CLOCK_BOOTTIME);
            assert_eq!(field(&timers, "settime flags"), TFD_TIMER_ABSTIME);
            timer.until(now + Duration::from_millis(20)).await.unwrap();
            assert!(Clock::System.local() >= now + Duration::from_millis(20));
        }

        /// The time that is left of a timer, as the kernel says.
        fn left(timers: &Timers) -> Duration {
            let value = field(timers, "it_value");
            let numbers = value.trim_matches(['(', ')']).split(", ").map(|number| number.parse().unwrap());
            let [seconds, nanos] = numbers.collect::<Vec<u64>>()[..] else { panic!("{value}") };
            Duration::from_secs(seconds) + Duration::from_nanos(nanos)
        }

        #[tokio::test]
        async fn timer_is_set_to_the_microsecond() {
            for span in [Duration::from_secs(60), Duration::from_micros(7_200_345_678)] {
                let timers = running();
                let mut timer = timers.timer();
                let before = Clock::System.local();
                begin(&mut timer, before + span);
                let left = left(&timers);
                let passed = Clock::System.local().since(before) + Duration::from_micros(1);
                assert!((span.saturating_sub(passed)..=span).contains(&left), "{left:?} of {span:?}");
            }
        }

        #[tokio::test]
        async fn timer_without_a_time_is_not_set() {
            let timers = running();
            let mut timer = timers.timer();
            begin(&mut timer, LocalTime::NEVER);
            assert_eq!(left(&timers), Duration::ZERO);
            begin(&mut timer, Clock::System.local() + Duration::from_secs(60));
            begin(&mut timer, LocalTime::NEVER);
            drop(timers.timer());
            assert!(timers.0.waiting().wakers.is_empty());
        }

        #[tokio::test]
        async fn timer_that_is_set_again_after_it_was_due_ends_at_its_new_time() {
            let timers = running();
            let mut timer = timers.timer();
            begin(&mut timer, Clock::System.local() + Duration::from_micros(100));
            // The wait was dropped before it was polled again.
            timers.0.fd.readable().await.unwrap();
            let later = Clock::System.local() + Duration::from_millis(20);
            timer.until(later).await.unwrap();
            assert!(Clock::System.local() >= later);
        }

        #[tokio::test]
        async fn each_timer_of_a_thread_ends_at_its_own_time() {
            let timers = running();
            let now = Clock::System.local();
            let ended = |millis: u64| {
                let mut timer = timers.timer();
                async move {
                    let time = now + Duration::from_millis(millis);
                    timer.until(time).await.unwrap();
                    assert!(Clock::System.local() >= time);
                    millis
                }
            };
            // Set in this order. Some are dropped, and one was the first to be due.
            let mut dropped = timers.timer();
            begin(&mut dropped, now + Duration::from_millis(1));
            let all = [40, 10, 30, 10, 20].map(ended);
            drop(dropped);
            let all = futures_util::future::join_all(all);
            assert_eq!(all.await, [40, 10, 30, 10, 20]);
            assert!(timers.0.waiting().wakers.is_empty());
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
#[path = "timer/portable.rs"]
mod imp;
