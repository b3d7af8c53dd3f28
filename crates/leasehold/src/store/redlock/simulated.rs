//! The quorum of a simulated process.

use std::sync::{Arc, Weak};

use leasehold_core::ClientId;

use super::node::Node;
use super::runtime::Runtime;
use super::voter::Voter;
use super::{NodeInbox, Quorum, Redlock, VoteOptions};
use crate::clock::Clock;
use crate::simulation::{QuorumHost, QuorumOptions};
use crate::store::Inbox;

impl Redlock {
    /// A quorum store, and what receives the pushes of each node.
    pub(crate) fn simulated(
        host: &Arc<dyn QuorumHost>,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
        options: QuorumOptions,
    ) -> (Arc<Self>, Vec<Arc<dyn Inbox>>) {
        let runtime = Runtime::Simulated(host.clone());
        let QuorumOptions { is_fenced, max_ttl } = options;
        let mut inboxes = Vec::new();
        let quorum = Arc::new_cyclic(|quorum: &Weak<Quorum>| {
            let mut nodes = Vec::new();
            for node in 0..host.nodes() {
                inboxes.push(Arc::new(NodeInbox { quorum: quorum.clone(), node }) as Arc<dyn Inbox>);
                let store = Voter::Simulated { host: host.clone(), node };
                nodes.push(Arc::new(Node::new(
                    store,
                    format!("node-{node}"),
                    Clock::System,
                    runtime.clone(),
                )));
            }
            let vote_options = VoteOptions { is_fenced, node_timeout: None, max_ttl };
            Quorum::new(Clock::System, client, nodes, inboxes.clone(), vote_options, inbox, runtime)
        });
        (Arc::new(Self::of(quorum)), inboxes)
    }
}
