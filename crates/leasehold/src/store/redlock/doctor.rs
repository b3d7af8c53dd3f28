//! What an operator should know about servers that vote.

use std::sync::Arc;

use super::Quorum;
use crate::examination::{Examination, Subject};
use crate::store::{Store as _, StoreError};

impl Quorum {
    /// Each node by itself.
    pub(super) async fn examine(self: &Arc<Self>) -> Result<Examination, StoreError> {
        let mut examination = Examination::default();
        for node in &self.nodes {
            match node.store.examine().await {
                Ok(seen) => examination.subjects.extend(seen.subjects),
                Err(error) => {
                    let mut subject = Subject::new(&node.name);
                    subject.danger(
                        format!("it could not be looked at: {}", error.message),
                        "a node that is away is one fewer that may fail",
                        None,
                    );
                    examination.subjects.push(subject);
                }
            }
        }
        Ok(examination)
    }
}
