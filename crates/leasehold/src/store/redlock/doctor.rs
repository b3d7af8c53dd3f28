//! Checks the nodes of a quorum.

use super::Quorum;
use crate::diagnostics::Diagnosis;
use crate::store::redis::{Redis, diagnose_voters};

impl Quorum {
    /// Checks each node, and whether the nodes are independent of each other.
    pub(super) async fn diagnose(&self) -> Diagnosis {
        let voters: Vec<(&str, &Redis)> =
            self.nodes.iter().filter_map(|node| Some((node.name.as_str(), node.store.redis()?))).collect();
        diagnose_voters(&voters, self.options.max_ttl).await
    }
}
