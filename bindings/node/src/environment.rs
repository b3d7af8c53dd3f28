//! What one environment of Node.js has: the main thread, or a worker. It keeps its calls and leases by numbers, which cost JavaScript less than objects.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::{Arc, Once};
use std::time::Duration;

use leasehold_binding::{Answer, Exit, Failure, Lease, Notify, Operation, Queue};
use napi::bindgen_prelude::{BigInt, Either, Function, Null};
use napi::threadsafe_function::{ThreadsafeFunction, ThreadsafeFunctionCallMode};
use napi::{Env, Result, Status};
use napi_derive::napi;

use crate::answer::{Failed, Granted, Record, Started};
use crate::time::{duration, limit, milliseconds, optional_duration};

/// How long the end of an environment waits for the releases of its leases.
const RELEASES: Duration = Duration::from_secs(1);

/// It keeps no process alive.
type Wake = ThreadsafeFunction<(), (), (), Status, false, true>;

struct Loop(Wake);

impl Notify for Loop {
    fn notify(&self) {
        // It fails once the environment ends. No call is pending then.
        let _ = self.0.call((), ThreadsafeFunctionCallMode::NonBlocking);
    }
}

#[napi]
pub struct Environment {
    pub(crate) queue: Arc<Queue>,
    pub(crate) exit: Arc<Exit>,
    /// Those without a result, by their keys.
    calls: RefCell<HashMap<u64, Arc<Operation>>>,
    leases: RefCell<HashMap<u64, Arc<Lease>>>,
    last_lease: Cell<u64>,
}

impl Environment {
    /// The result of a call, or its key.
    pub(crate) fn started(&self, call: std::result::Result<Arc<Operation>, Failure>) -> Started {
        match call {
            Err(failure) => Started::A(failure.into()),
            Ok(call) if call.is_done() => self.result_of(&call),
            Ok(call) => {
                let key = call.key();
                self.calls.borrow_mut().insert(key, call);
                Started::F(to_number(key))
            }
        }
    }

    fn result_of(&self, call: &Operation) -> Started {
        match call.take() {
            None => Started::A(not_running()),
            Some(Err(failure)) => Started::A(failure.into()),
            Some(Ok(Answer::Nothing)) => Started::E(Null),
            Some(Ok(Answer::Text(text))) => Started::C(text),
            Some(Ok(Answer::Loss(reason))) => Started::C(reason.to_owned()),
            Some(Ok(Answer::Lease(granted))) => Started::B(self.keep(Lease::new(granted))),
            Some(Ok(Answer::Records(records))) => {
                let records = records.into_iter();
                Started::D(
                    records.map(|record| Record { level: record.level, message: record.message }).collect(),
                )
            }
        }
    }

    fn keep(&self, lease: Lease) -> Granted {
        let number = self.last_lease.get() + 1;
        self.last_lease.set(number);
        let granted =
            Granted { lease: to_number(number), name: lease.name().to_owned(), token: lease.token().into() };
        self.leases.borrow_mut().insert(number, Arc::new(lease));
        granted
    }

    fn lease(&self, lease: f64) -> Option<Arc<Lease>> {
        self.leases.borrow().get(&to_key(lease)).cloned()
    }

    fn remove(&self, lease: f64) -> Option<Arc<Lease>> {
        self.leases.borrow_mut().remove(&to_key(lease))
    }

    /// Starts a call of a lease.
    fn start(
        &self,
        lease: f64,
        start: impl FnOnce(&Lease, Option<&Arc<Queue>>) -> std::result::Result<Arc<Operation>, Failure>,
    ) -> Started {
        match self.lease(lease) {
            Some(lease) => self.started(start(&lease, Some(&self.queue))),
            None => Started::A(Failure::invalid("the lease was released or detached before").into()),
        }
    }

    /// The same for a call that ends it, unless it is refused.
    fn end(
        &self,
        lease: f64,
        start: impl FnOnce(&Lease, Option<&Arc<Queue>>) -> std::result::Result<Arc<Operation>, Failure>,
    ) -> Started {
        let call = match self.lease(lease) {
            Some(lease) => start(&lease, Some(&self.queue)),
            None => Err(Failure::invalid("the lease was released or detached before")),
        };
        if call.is_ok() {
            self.remove(lease);
        }
        self.started(call)
    }
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
        Ok(Self {
            queue,
            exit,
            calls: RefCell::default(),
            leases: RefCell::default(),
            last_lease: Cell::new(0),
        })
    }

    /// Whether `take` should be called now.
    #[napi(getter)]
    pub fn is_ready(&self) -> bool {
        self.queue.is_ready()
    }

    /// Lets the calls go on that were woken. The keys of those that have a result.
    #[napi]
    pub fn take(&self) -> Vec<f64> {
        self.queue.take().into_iter().map(to_number).collect()
    }

    /// The result of a call that `take` has named, once.
    #[napi]
    pub fn result(&self, key: f64) -> Started {
        let call = self.calls.borrow_mut().remove(&to_key(key));
        call.map_or_else(|| Started::A(not_running()), |call| self.result_of(&call))
    }

    /// Ends a call without a result. A lease that it was granted is released in the background.
    #[napi]
    pub fn cancel(&self, key: f64) {
        let call = self.calls.borrow_mut().remove(&to_key(key));
        if let Some(call) = call {
            call.cancel();
        }
    }

    /// Closes all clients, and waits at most a second for their releases. Later calls of clients fail.
    #[napi]
    pub fn shut_down(&self) {
        self.exit.run(RELEASES);
    }

    /// What the library has reported since the last call. Ends once there is something.
    #[napi]
    pub fn records(&self) -> Started {
        self.started(Ok(leasehold_binding::records(Some(&self.queue))))
    }

    /// Whether it has this lease, which a refused call leaves as it was.
    #[napi]
    pub fn has(&self, lease: f64) -> bool {
        self.leases.borrow().contains_key(&to_key(lease))
    }

    /// The names of a lease, each followed by its token.
    #[napi]
    pub fn tokens(&self, lease: f64) -> Vec<Either<String, BigInt>> {
        let Some(lease) = self.lease(lease) else { return Vec::new() };
        let tokens = lease.tokens().iter();
        tokens.flat_map(|(name, token)| [Either::A(name.clone()), Either::B((*token).into())]).collect()
    }

    /// Milliseconds for which a lease may be trusted.
    #[napi]
    pub fn remaining(&self, lease: f64) -> f64 {
        self.lease(lease).map_or(0.0, |lease| milliseconds(lease.remaining()))
    }

    /// Why a lease is lost.
    #[napi]
    pub fn loss(&self, lease: f64) -> Option<Failed> {
        let (reason, message) = self.lease(lease)?.loss()?;
        Some(Failed::lost(reason, message))
    }

    #[napi]
    pub fn lost(&self, lease: f64) -> Started {
        self.start(lease, |lease, queue| Ok(lease.lost(queue)))
    }

    #[napi]
    pub fn renew(&self, lease: f64) -> Started {
        self.start(lease, |lease, queue| Ok(lease.renew(queue)))
    }

    #[napi]
    pub fn release(&self, lease: f64, timeout: Option<f64>) -> Started {
        self.end(lease, |lease, queue| Ok(lease.release(optional_duration(timeout)?, queue)))
    }

    #[napi]
    pub fn detach(&self, lease: f64) -> Started {
        self.end(lease, Lease::detach)
    }

    #[napi]
    pub fn downgrade(&self, lease: f64) -> Started {
        self.end(lease, Lease::downgrade)
    }

    /// If it succeeds, the lease is to be forgotten.
    #[napi]
    pub fn upgrade(&self, lease: f64, wait: Option<f64>) -> Started {
        self.start(lease, |lease, queue| lease.upgrade(limit(wait)?, queue))
    }

    /// Why it could not be set.
    #[napi]
    pub fn set_min_hold(&self, lease: f64, milliseconds: f64) -> Option<Failed> {
        let lease = self.lease(lease)?;
        let set = duration(milliseconds).and_then(|min_hold| lease.set_min_hold(min_hold));
        set.err().map(Failed::from)
    }

    /// Forgets a lease, and releases it in the background if it is held.
    #[napi]
    pub fn abandon(&self, lease: f64) {
        if let Some(lease) = self.remove(lease) {
            lease.abandon();
        }
    }
}

impl Drop for Environment {
    fn drop(&mut self) {
        for call in self.calls.get_mut().drain() {
            call.1.cancel();
        }
    }
}

fn not_running() -> Failed {
    Failure::Own("LeaseholdError", "the call runs, was cancelled, or its result was taken".to_owned()).into()
}

/// A key as JavaScript has it. An environment makes fewer than 2^53.
#[expect(clippy::cast_precision_loss, reason = "there are fewer than 2^53")]
fn to_number(key: u64) -> f64 {
    key as f64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it was a key")]
fn to_key(number: f64) -> u64 {
    number as u64
}
