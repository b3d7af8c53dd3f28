//! What holders and waiters publish about themselves, stored as JSON.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The maximum length of a label in bytes, and that of the host name and of the program's name in [`HolderMetadata`].
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let long = "x".repeat(leasehold::MAX_LABEL_BYTES + 1);
/// assert!(client.mutex("orders:42").label(long).lock().await.unwrap_err().is_invalid());
/// # Ok(()) });
/// ```
pub const MAX_LABEL_BYTES: usize = 1024;

/// The metadata that a holder or a waiter publishes. Other clients can read it, so a label must not contain a
/// secret.
///
/// ```
/// # leasehold::doc_test(async {
/// # let client = leasehold::Client::connect("memory:").await?;
/// let orders = client.mutex("orders:42").label("nightly export");
/// let guard = orders.lock().await?;
/// let metadata = &orders.inspect().await?.holders[0].metadata;
/// assert_eq!(metadata.pid, Some(std::process::id()));
/// assert_eq!(metadata.label.as_deref(), Some("nightly export"));
/// # Ok(()) });
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(Serialize))]
#[non_exhaustive]
pub struct HolderMetadata {
    /// The host name.
    pub host: Option<String>,
    /// The process id on that host.
    pub pid: Option<u32>,
    /// The program's file name.
    pub program: Option<String>,
    /// Text that the caller added.
    pub label: Option<String>,
    /// The id of the trace in which the lock was acquired, if the caller set it.
    pub trace_id: Option<String>,
}

/// The stored form, which clients of all versions read.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Stored {
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<String>,
}

impl HolderMetadata {
    /// That of this process, without a label.
    #[doc(hidden)]
    pub fn this_process() -> Self {
        let program = std::env::current_exe().ok();
        let program = program.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        Self { host: host_name(), pid: Some(std::process::id()), program, label: None, trace_id: None }
    }

    /// Checks the sizes, because every `Acquire` carries the metadata.
    ///
    /// # Errors
    ///
    /// What is too long.
    #[doc(hidden)]
    pub fn check(&self) -> Result<(), String> {
        let Self { host, pid: _, program, label, trace_id } = self;
        let texts =
            [("label", label), ("host name", host), ("program name", program), ("trace id", trace_id)];
        for (what, text) in texts {
            let bytes = text.as_ref().map_or(0, String::len);
            if bytes > MAX_LABEL_BYTES {
                return Err(format!("a {what} has at most {MAX_LABEL_BYTES} bytes, this one has {bytes}"));
            }
        }
        Ok(())
    }

    /// The stored form.
    #[doc(hidden)]
    pub fn encode(&self) -> Arc<str> {
        // Strings and a number always serialize.
        let Self { host, pid, program, label: note, trace_id } = self.clone();
        let stored = Stored { host, pid, program, note, trace_id };
        serde_json::to_string(&stored).unwrap_or_default().into()
    }

    /// What all holders and waiters of a client have in common; empty if that is nothing.
    #[doc(hidden)]
    pub fn encode_client(&self) -> Arc<str> {
        Self { label: None, trace_id: None, ..self.clone() }.encode_if_any()
    }

    /// The rest, for a store that keeps the client's part elsewhere.
    #[doc(hidden)]
    pub fn encode_label(&self) -> Arc<str> {
        let (label, trace_id) = (self.label.clone(), self.trace_id.clone());
        Self { label, trace_id, ..Self::default() }.encode_if_any()
    }

    /// Whether it has anything of what all holders and waiters of a client have in common.
    #[doc(hidden)]
    pub fn has_client(&self) -> bool {
        self.host.is_some() || self.pid.is_some() || self.program.is_some()
    }

    fn encode_if_any(&self) -> Arc<str> {
        if *self == Self::default() { Arc::from("") } else { self.encode() }
    }

    /// Merges the client's record into a holder's or a waiter's metadata.
    #[doc(hidden)]
    pub fn add_client(stored: &str, client: &str) -> Arc<str> {
        let own = Self::decode(stored);
        if own.has_client() {
            return Arc::from(stored);
        }
        let (label, trace_id) = (own.label, own.trace_id);
        Self { label, trace_id, ..Self::decode(client) }.encode()
    }

    /// Decodes stored metadata. Text that is not such JSON, from another client, becomes the label.
    #[doc(hidden)]
    pub fn decode(stored: &str) -> Self {
        let Ok(Stored { host, pid, program, note, trace_id }) = serde_json::from_str(stored) else {
            let label = Some(stored.to_owned()).filter(|text| !text.is_empty());
            return Self { label, ..Self::default() };
        };
        Self { host, pid, program, label: note, trace_id }
    }
}

#[cfg(unix)]
fn host_name() -> Option<String> {
    Some(rustix::system::uname().nodename().to_string_lossy().into_owned())
}

#[cfg(not(unix))]
fn host_name() -> Option<String> {
    std::env::var("COMPUTERNAME").ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_survives_a_round_trip_and_foreign_text_becomes_the_label() {
        let mut metadata = HolderMetadata::this_process();
        metadata.label = Some("\"quoted\"\n".to_owned());
        metadata.trace_id = Some("4bf92f3577b34da6a3ce929d0e0e4736".to_owned());
        assert_eq!(HolderMetadata::decode(&metadata.encode()), metadata);
        assert_eq!(HolderMetadata::decode("from elsewhere").label.as_deref(), Some("from elsewhere"));
        assert_eq!(HolderMetadata::decode(""), HolderMetadata::default());
    }

    #[test]
    fn metadata_of_the_client_and_of_the_lock_are_put_together() {
        let mut metadata = HolderMetadata::this_process();
        assert_eq!(&*metadata.encode_label(), "");
        metadata.label = Some("nightly".to_owned());
        metadata.trace_id = Some("4bf92f3577b34da6a3ce929d0e0e4736".to_owned());
        let both = HolderMetadata::add_client(&metadata.encode_label(), &metadata.encode_client());
        assert_eq!(HolderMetadata::decode(&both), metadata);
        // A client that stores everything with its leases.
        let other = HolderMetadata { host: Some("elsewhere".to_owned()), ..HolderMetadata::default() };
        let both =
            HolderMetadata::decode(&HolderMetadata::add_client(&other.encode(), &metadata.encode_client()));
        assert_eq!(both, other);
        assert_eq!(&*HolderMetadata::default().encode_client(), "");
    }
}
