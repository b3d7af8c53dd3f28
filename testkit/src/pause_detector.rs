//! Detects pauses of the whole machine: a virtual machine may stall for seconds, and then a test of deadlines says nothing.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval of the watcher's sleeps, each of which it compares with the clock.
const TICK: Duration = Duration::from_millis(20);

/// How often a test is attempted whose attempts fail during pauses.
const ATTEMPTS: usize = 6;

/// What an error says of a server that did not answer in time.
const SILENCE: [&str; 2] = ["no answer within", "pg_blocking_pids"];

/// Records pauses of the whole machine until it is dropped.
pub struct PauseDetector {
    seen: Arc<Mutex<Seen>>,
    is_over: Arc<AtomicBool>,
    watcher: Option<JoinHandle<()>>,
}

/// What the watcher knows.
struct Seen {
    longest: Duration,
    /// When its present sleep began.
    since: Instant,
}

impl Seen {
    /// By how much the present sleep is too long already.
    fn late(&self) -> Duration {
        self.since.elapsed().saturating_sub(TICK)
    }
}

impl PauseDetector {
    /// Starts to record.
    #[must_use]
    pub fn watch() -> Self {
        let seen = Arc::new(Mutex::new(Seen { longest: Duration::ZERO, since: Instant::now() }));
        let is_over = Arc::new(AtomicBool::new(false));
        let (noted, ended) = (seen.clone(), is_over.clone());
        let watcher = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                std::thread::sleep(TICK);
                let mut seen = noted.lock().unwrap_or_else(PoisonError::into_inner);
                seen.longest = seen.longest.max(seen.late());
                seen.since = Instant::now();
            }
        });
        Self { seen, is_over, watcher: Some(watcher) }
    }

    /// The longest pause so far, also if it has just ended and the watcher has not run since.
    #[must_use]
    pub fn longest(&self) -> Duration {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.longest.max(seen.late())
    }

    /// Whether an attempt counts. It does if it succeeded, and not if the machine paused for longer than `allowed` meanwhile, or
    /// if it failed because a server was silent for too long.
    ///
    /// # Panics
    ///
    /// With the error of an attempt that failed without such a pause.
    fn judge(&self, allowed: Duration, ended: Result<(), String>) -> bool {
        match ended {
            Ok(()) => true,
            Err(what) if SILENCE.iter().any(|silence| what.contains(silence)) => {
                eprintln!("a server was too slow, so this failure does not count: {what}");
                false
            }
            Err(what) if self.longest() <= allowed => panic!("{what}"),
            Err(what) => {
                let longest = self.longest();
                eprintln!("the machine paused for {longest:?}, so this failure does not count: {what}");
                false
            }
        }
    }
}

impl Drop for PauseDetector {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

/// Repeats an attempt that failed or panicked, a few times, if the machine paused for longer than `allowed` meanwhile, or a server
/// did not answer in time. Any other failure is final.
///
/// # Panics
///
/// With the attempt's error, or if the machine paused during every attempt.
pub async fn retry_if_paused(allowed: Duration, attempt: impl AsyncFnMut() -> Result<(), String>) {
    retry_if_slow(allowed, || 0, attempt).await;
}

/// As [`retry_if_paused`], also if a server was too slow meanwhile: then `slowness` has risen, a count of what it had no time for.
///
/// # Panics
///
/// As [`retry_if_paused`].
pub async fn retry_if_slow(
    allowed: Duration,
    slowness: impl Fn() -> usize,
    mut attempt: impl AsyncFnMut() -> Result<(), String>,
) {
    for _ in 0..ATTEMPTS {
        let (pauses, before) = (PauseDetector::watch(), slowness());
        let mut attempt = pin!(attempt());
        let ended = poll_fn(|context| {
            let polled = catch_unwind(AssertUnwindSafe(|| attempt.as_mut().poll(context)));
            polled.unwrap_or_else(|panic| Poll::Ready(Err(text_of(&*panic))))
        });
        let ended = ended.await;
        if let Err(what) = &ended
            && slowness() > before
        {
            eprintln!("the server was too slow, so this failure does not count: {what}");
        } else if pauses.judge(allowed, ended) {
            return;
        }
    }
    panic!("the machine paused for longer than {allowed:?}, or a server was too slow, during every attempt");
}

/// As [`retry_if_paused`], for a test that fails by a panic only. Each attempt has servers and clients of its own.
///
/// # Panics
///
/// With the text of the attempt's panic, or if the machine paused during every attempt.
pub async fn unless_paused(allowed: Duration, test: impl AsyncFn()) {
    retry_if_paused(allowed, async || {
        test().await;
        Ok(())
    })
    .await;
}

/// As [`unless_paused`], for a test without a runtime.
///
/// # Panics
///
/// As [`unless_paused`].
pub fn unless_paused_blocking(allowed: Duration, test: impl Fn()) {
    for _ in 0..ATTEMPTS {
        let pauses = PauseDetector::watch();
        let ended = catch_unwind(AssertUnwindSafe(&test)).map_err(|panic| text_of(&*panic));
        if pauses.judge(allowed, ended) {
            return;
        }
    }
    panic!("the machine paused for longer than {allowed:?}, or a server was too slow, during every attempt");
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("the test failed").to_owned()
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::*;
    use crate::wait::wait_until;

    #[test]
    #[should_panic(expected = "it went wrong")]
    fn a_failure_without_a_pause_is_final() {
        let attempt = async || Err("it went wrong".to_owned());
        let mut attempts = pin!(retry_if_paused(Duration::from_secs(60), attempt));
        let _ = attempts.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    }

    #[test]
    #[should_panic(expected = "it went wrong")]
    fn a_panic_without_a_pause_is_final() {
        let mut attempts = pin!(unless_paused(Duration::from_secs(60), async || panic!("it went wrong")));
        let _ = attempts.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    }

    #[test]
    fn a_failure_after_a_pause_that_has_just_ended_does_not_count() {
        let pauses = PauseDetector::watch();
        // The watcher has not run since.
        let mut seen = pauses.seen.lock().unwrap();
        seen.longest = Duration::ZERO;
        seen.since = Instant::now().checked_sub(Duration::from_secs(1)).unwrap();
        drop(seen);
        assert!(!pauses.judge(Duration::from_millis(500), Err("late".to_owned())));
        assert!(pauses.judge(Duration::ZERO, Ok(())));
    }

    #[test]
    fn a_failure_while_a_server_was_too_slow_does_not_count() {
        let attempts = std::cell::Cell::new(0);
        let attempt = async || {
            attempts.set(attempts.get() + 1);
            if attempts.get() == 3 { Ok(()) } else { Err("late".to_owned()) }
        };
        let mut attempts = pin!(retry_if_slow(Duration::from_secs(60), || attempts.get(), attempt));
        assert!(attempts.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
    }

    #[test]
    fn a_failure_for_want_of_an_answer_does_not_count() {
        let attempts = std::cell::Cell::new(0);
        unless_paused_blocking(Duration::from_secs(60), || {
            attempts.set(attempts.get() + 1);
            assert!(attempts.get() == 3, "mutex \"a\": no answer within 1s");
        });
        assert_eq!(attempts.get(), 3);
    }

    #[test]
    #[should_panic(expected = "during every attempt")]
    fn a_test_is_not_attempted_for_ever() {
        // Each attempt is a pause of the thread, which is longer than none.
        unless_paused_blocking(Duration::ZERO, || {
            let pauses = PauseDetector::watch();
            wait_until("the watcher was late", || !pauses.longest().is_zero());
            panic!("late");
        });
    }
}
