//! What a lock library has to be for the loops that acquire.

use crate::protocol::{Hello, Open, Run};

/// Why something did not work, for people.
pub type Failure = Box<dyn std::error::Error>;

/// A lock library, as the loop needs it.
pub trait Library: 'static {
    /// One client, with connections of its own.
    type Client: 'static;
    /// One task's way to one lock.
    type Lock: Lock;

    /// Who this is.
    fn hello(&self) -> Hello;

    /// Connects one of the clients that the order asks for.
    ///
    /// # Errors
    ///
    /// When that can't be done.
    fn connect(&self, open: &Open, number: u32) -> impl Future<Output = Result<Self::Client, Failure>>;

    /// The lock of this name, for one task.
    ///
    /// # Errors
    ///
    /// When the library has no such lock.
    fn lock(&self, client: &Self::Client, run: &Run, name: &str, task: u32) -> Result<Self::Lock, Failure>;

    /// How many holders and waiters the store has, if the library can list them.
    ///
    /// # Errors
    ///
    /// When the store does not answer.
    fn left(&self, client: &Self::Client) -> impl Future<Output = Result<Option<u32>, Failure>> {
        let _ = client;
        async { Ok(None) }
    }
}

/// What is acquired and released.
pub trait Lock: 'static {
    /// What is had while it is held.
    type Held: 'static;

    /// Chooses what the next attempts ask for, by a number that a seed repeats, and says it to the resource of `contend`. Empty: the
    /// whole of one lock.
    fn plan(&mut self, chance: u64) -> String {
        let _ = chance;
        String::new()
    }

    /// Waits for it.
    ///
    /// # Errors
    ///
    /// When the library gives up.
    fn take(&mut self, is_shared: bool) -> impl Future<Output = Result<Self::Held, Failure>>;

    /// Gives it back, and knows.
    ///
    /// # Errors
    ///
    /// When the library can't, or it was lost.
    fn give(&mut self, held: Self::Held) -> impl Future<Output = Result<(), Failure>>;

    /// Whether it is still held, as far as the library knows.
    fn is_held(held: &Self::Held) -> bool {
        let _ = held;
        true
    }

    /// The fencing token of this lock, if the library has tokens.
    fn token(held: &Self::Held) -> Option<u64> {
        let _ = held;
        None
    }

    /// The fencing tokens, one for each part of the plan.
    fn tokens(held: &Self::Held) -> Vec<u64> {
        vec![Self::token(held).unwrap_or(0)]
    }

    /// When the attempt began that was granted, if [`take`](Self::take) makes several.
    fn asked(held: &Self::Held) -> Option<u64> {
        let _ = held;
        None
    }
}
