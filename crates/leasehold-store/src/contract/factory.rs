//! How a client opens a store.

use std::sync::{Arc, Weak};

use leasehold_core::ClientId;

use super::{BoxFuture, Capabilities, Inbox, Store};
use crate::OpenError;

/// Opens a store for clients. A store that is not part of leasehold is used through one: `ClientBuilder::store` takes it as
/// `StoreConfig::factory`.
///
/// ```
/// use std::future::ready;
/// use std::sync::{Arc, Weak};
///
/// use leasehold_core::ClientId;
/// use leasehold_store::memory::Memory;
/// use leasehold_store::{
///     BoxFuture, Capabilities, EMBEDDED_POLL_INTERVALS, Inbox, OpenError, Store, StoreFactory,
/// };
///
/// /// The locks of a process under a name.
/// struct Named(String);
///
/// impl StoreFactory for Named {
///     fn name(&self) -> String {
///         format!("named:{}", self.0)
///     }
///
///     fn capabilities(&self) -> Capabilities {
///         Capabilities::new(EMBEDDED_POLL_INTERVALS)
///     }
///
///     fn open(
///         &self,
///         client: ClientId,
///         inbox: Weak<dyn Inbox>,
///     ) -> BoxFuture<Result<Arc<dyn Store>, OpenError>> {
///         let store = Memory::open(&self.0);
///         store.join(client, inbox);
///         Box::pin(ready(Ok(store as Arc<dyn Store>)))
///     }
/// }
///
/// assert_eq!(Named("jobs".into()).name(), "named:jobs");
/// ```
pub trait StoreFactory: Send + Sync {
    /// How messages name the store. It contains no password.
    fn name(&self) -> String;

    /// What sets its stores apart, which is known before one of them is open.
    fn capabilities(&self) -> Capabilities;

    /// Opens the store for one client, to which it sends its pushes while `inbox` lives. Once the client has ended, the store is
    /// dropped. `open` and the future run on the client's thread, in a tokio runtime with sockets and timers, beside the renewals of
    /// other clients: they must not block. The future may be dropped before it ends, and nothing stays then.
    ///
    /// # Errors
    ///
    /// Why the store can't be opened. The message begins with its name.
    fn open(&self, client: ClientId, inbox: Weak<dyn Inbox>) -> BoxFuture<Result<Arc<dyn Store>, OpenError>>;
}
