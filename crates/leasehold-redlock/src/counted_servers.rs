//! Which servers' answers have counted in a round.

use std::sync::Arc;

use super::node::Node;
use super::same_server;

/// The servers whose answers have counted in a round, each with its node. The address of a node may lead to another server at any
/// reconnect, and the first of two nodes may not be connected any more when the other one answers.
#[derive(Default)]
pub(super) struct CountedServers(Vec<(usize, Arc<str>)>);

impl CountedServers {
    /// Records that a node has answered. An error if its answer does not count, because its server has counted as another node or
    /// is not known.
    pub(super) fn record(&mut self, nodes: &[Arc<Node>], node: usize) -> Result<(), String> {
        let Some(server) = nodes[node].store.run_id() else {
            return Err("its connection was lost with its answer, so its server is not known".to_owned());
        };
        if let Some((first, _)) = self.0.iter().find(|(other, counted)| *other != node && *counted == server)
        {
            return Err(same_server(&nodes[*first]));
        }
        self.0.push((node, server));
        Ok(())
    }
}
