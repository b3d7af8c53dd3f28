//! What holders and waiters publish about themselves, stored as JSON.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The maximum length of a label in bytes.
pub const MAX_LABEL_BYTES: usize = 1024;

/// What a holder or a waiter publishes about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HolderMetadata {
    /// The host name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The process id on that host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The program's file name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// Text that the caller added. The stored JSON calls it `note`.
    #[serde(rename = "note", default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
}

impl HolderMetadata {
    pub(crate) fn this_process() -> Self {
        let program = std::env::current_exe().ok();
        let program = program.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        Self { host: host_name(), pid: Some(std::process::id()), program, label: None }
    }

    pub(crate) fn encode(&self) -> Arc<str> {
        // Strings and a number always serialize.
        serde_json::to_string(self).unwrap_or_default().into()
    }

    /// Decodes stored metadata. Text that is not such JSON, from another client, becomes the label.
    pub(crate) fn decode(stored: &str) -> Self {
        serde_json::from_str(stored).unwrap_or_else(|_| {
            let label = Some(stored.to_owned()).filter(|text| !text.is_empty());
            Self { label, ..Self::default() }
        })
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
        assert_eq!(HolderMetadata::decode(&metadata.encode()), metadata);
        assert_eq!(HolderMetadata::decode("from elsewhere").label.as_deref(), Some("from elsewhere"));
        assert_eq!(HolderMetadata::decode(""), HolderMetadata::default());
    }
}
