//! A timer on the clock that counts suspend. The runtime's own timers stop during suspend.

pub(crate) use imp::Timer;

#[cfg(any(target_os = "linux", target_os = "android"))]
mod imp {
    use std::fs::File;
    use std::io;

    use leasehold_core::LocalTime;
    use rustix::time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    };
    use tokio::net::unix::pipe::Receiver;

    /// A timerfd on CLOCK_BOOTTIME. The runtime waits until it is readable, as for a pipe. The runtime's general wrapper for
    /// file descriptors would need unsafe code.
    pub(crate) struct Timer {
        fd: Receiver,
        set_to: LocalTime,
    }

    impl Timer {
        /// Must be called inside the runtime that is going to wait.
        pub(crate) fn new() -> io::Result<Self> {
            let fd =
                timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
            Ok(Self { fd: Receiver::from_file_unchecked(File::from(fd))?, set_to: LocalTime::NEVER })
        }

        /// Ends at this point of the local clock or later. Cancel safe.
        pub(crate) async fn until(&mut self, time: LocalTime) -> io::Result<()> {
            if self.set_to != time {
                self.set(time)?;
            }
            loop {
                self.fd.readable().await?;
                match self.fd.try_read(&mut [0; 8]) {
                    Ok(_) => break,
                    // The timer was set again since it became readable.
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
            }
            self.set_to = LocalTime::NEVER;
            Ok(())
        }

        fn set(&mut self, time: LocalTime) -> io::Result<()> {
            // All zero disarms it.
            let micros = if time == LocalTime::NEVER { 0 } else { time.as_micros().max(1) };
            let seconds = i64::try_from(micros / 1_000_000).unwrap_or(i64::MAX);
            let nanos = i64::try_from(micros % 1_000_000 * 1_000).unwrap_or(0);
            let it_value = Timespec { tv_sec: seconds, tv_nsec: nanos };
            let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
            timerfd_settime(&self.fd, TimerfdTimerFlags::ABSTIME, &Itimerspec { it_interval, it_value })?;
            self.set_to = time;
            Ok(())
        }
    }

    #[cfg(test)]
    mod tests {
        use std::os::fd::AsRawFd as _;
        use std::time::Duration;

        use super::*;
        use crate::engine::clock::Clock;

        /// What the kernel says about a timer, by the name of the line.
        fn field(timer: &Timer, name: &str) -> String {
            let path = format!("/proc/self/fdinfo/{}", timer.fd.as_raw_fd());
            let info = std::fs::read_to_string(path).unwrap();
            let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
            value.unwrap_or_else(|| panic!("no {name} in {info}")).to_owned()
        }

        #[tokio::test]
        async fn timer_counts_the_time_that_the_machine_sleeps() {
            const CLOCK_BOOTTIME: &str = "7";
            const TFD_TIMER_ABSTIME: &str = "01";
            let mut timer = Timer::new().unwrap();
            let now = Clock::System.local();
            timer.set(now + Duration::from_secs(60)).unwrap();
            // A machine that sleeps for the whole time finds it due when it wakes.
            assert_eq!(field(&timer, "clockid"), CLOCK_BOOTTIME);
            assert_eq!(field(&timer, "settime flags"), TFD_TIMER_ABSTIME);
            timer.until(now + Duration::from_millis(20)).await.unwrap();
            assert!(Clock::System.local() >= now + Duration::from_millis(20));
        }

        /// The time that is left of a timer, as the kernel says.
        fn left(timer: &Timer) -> Duration {
            let value = field(timer, "it_value");
            let numbers = value.trim_matches(['(', ')']).split(", ").map(|number| number.parse().unwrap());
            let [seconds, nanos] = numbers.collect::<Vec<u64>>()[..] else { panic!("{value}") };
            Duration::from_secs(seconds) + Duration::from_nanos(nanos)
        }

        #[tokio::test]
        async fn timer_is_set_to_the_microsecond_or_disarmed() {
            let mut timer = Timer::new().unwrap();
            for span in [Duration::from_secs(60), Duration::from_micros(7_200_345_678)] {
                let before = Clock::System.local();
                timer.set(before + span).unwrap();
                let left = left(&timer);
                let passed = Clock::System.local().since(before) + Duration::from_micros(1);
                assert!((span.saturating_sub(passed)..=span).contains(&left), "{left:?} of {span:?}");
            }
            timer.set(LocalTime::NEVER).unwrap();
            assert_eq!(left(&timer), Duration::ZERO);
        }

        #[tokio::test]
        async fn timer_that_is_set_again_after_it_was_due_ends_at_its_new_time() {
            let mut timer = Timer::new().unwrap();
            let now = Clock::System.local();
            timer.set(now).unwrap();
            // The wait was dropped before it was polled again.
            timer.fd.readable().await.unwrap();
            let later = Clock::System.local() + Duration::from_millis(20);
            timer.until(later).await.unwrap();
            assert!(Clock::System.local() >= later);
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
#[path = "timer/portable.rs"]
mod imp;
