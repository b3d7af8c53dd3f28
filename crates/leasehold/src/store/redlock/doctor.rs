//! What an operator should know about servers that vote.

use super::Quorum;
use crate::diagnostics::Diagnosis;
use crate::store::redis::{Redis, diagnose_voters};

impl Quorum {
    /// Each node, and whether they are independent of each other.
    pub(super) async fn diagnose(&self) -> Diagnosis {
        let voters: Vec<(&str, &Redis)> =
            self.nodes.iter().map(|node| (node.name.as_str(), &*node.store)).collect();
        diagnose_voters(&voters, self.max_ttl).await
    }
}
