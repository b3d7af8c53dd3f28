//! What one environment of Node.js has: the main thread, or a worker.

use std::sync::{Arc, Once};
use std::time::Duration;

use leasehold_binding::{Exit, Notify, Queue};
use napi::bindgen_prelude::Function;
use napi::threadsafe_function::{ThreadsafeFunction, ThreadsafeFunctionCallMode};
use napi::{Env, Result, Status};
use napi_derive::napi;

/// How long the end of an environment waits for the releases of its leases.
const RELEASES: Duration = Duration::from_secs(1);

/// It keeps no process alive.
type Wake = ThreadsafeFunction<(), (), (), Status, false, true>;

struct Loop(Wake);

impl Notify for Loop {
    fn notify(&self) {
        // It fails when the environment ends, where nobody waits any more.
        let _ = self.0.call((), ThreadsafeFunctionCallMode::NonBlocking);
    }
}

#[napi]
pub struct Environment {
    pub(crate) queue: Arc<Queue>,
    pub(crate) exit: Arc<Exit>,
}

#[napi]
impl Environment {
    /// `wake` is called on this environment's thread when `take` would return something.
    ///
    /// # Errors
    /// The environment ends.
    #[napi(constructor)]
    pub fn new(env: Env, wake: Function<'_, (), ()>) -> Result<Self> {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            leasehold_binding::capture();
            leasehold_binding::learn_wakers();
        });
        let wake = wake.build_threadsafe_function().weak::<true>().build()?;
        let (queue, exit) = (Queue::new(Box::new(Loop(wake))), Arc::new(Exit::default()));
        // Hooks run in the reverse order of their making: this one before the end of the function above.
        let _hook = env.add_env_cleanup_hook((queue.clone(), exit.clone()), |(queue, exit)| {
            exit.run(RELEASES);
            queue.close();
        })?;
        Ok(Self { queue, exit })
    }

    /// Whether `take` should be called now.
    #[napi(getter)]
    pub fn is_ready(&self) -> bool {
        self.queue.is_ready()
    }

    /// Lets the operations go on that were woken. The keys of those that have ended.
    #[napi]
    pub fn take(&self) -> Vec<f64> {
        self.queue.take().into_iter().map(key).collect()
    }

    /// Closes all clients, and waits at most a second for their releases. Later calls of clients fail.
    #[napi]
    pub fn shut_down(&self) {
        self.exit.run(RELEASES);
    }
}

/// A key as JavaScript has it. An environment makes fewer than 2^53.
#[expect(clippy::cast_precision_loss, reason = "there are fewer than 2^53")]
pub(crate) fn key(key: u64) -> f64 {
    key as f64
}
