//! Opens a quorum: connects to its nodes.

use std::sync::{Arc, Weak};

use leasehold_core::{ClientId, quorum_of};
use tokio::runtime::Handle;

use super::node::Node;
use super::runtime::Runtime;
use super::voter::Voter;
use super::{NodeInbox, Quorum, Redlock, STRAGGLER_GRACE, VoteOptions};
use crate::clock::Clock;
use crate::error::{Error, ErrorKind};
use crate::store::Inbox;
use crate::store::redis::{Redis, Voting};
use crate::tasks::Tasks;
use crate::url::RedlockUrl;

impl Redlock {
    /// Connects to all nodes, and waits until a quorum is connected or cannot be. Runs on the runtime of the client's thread.
    pub(crate) async fn open(
        url: &RedlockUrl,
        clock: Clock,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
        caller: Option<Handle>,
    ) -> Result<Arc<Self>, Error> {
        let mut targets = Vec::new();
        for place in &url.nodes {
            targets.push(Redis::voter_target(place).await?);
        }
        let runtime = Runtime::Client(Tasks::current());
        let quorum = Arc::new_cyclic(|quorum: &Weak<Quorum>| {
            let (mut nodes, mut inboxes) = (Vec::new(), Vec::new());
            for (index, (place, target)) in url.nodes.iter().zip(targets).enumerate() {
                let inbox: Arc<dyn Inbox> = Arc::new(NodeInbox { quorum: quorum.clone(), node: index });
                let voting = Voting { abstains_for: url.max_ttl };
                let weak = Arc::downgrade(&inbox);
                inboxes.push(inbox);
                let store = Redis::open_voter(place, target, voting, client, weak, caller.clone());
                let node = Node::new(Voter::Redis(store), place.to_string(), clock.clone(), runtime.clone());
                nodes.push(Arc::new(node));
            }
            let options = VoteOptions {
                is_fenced: url.is_fenced,
                node_timeout: url.node_timeout,
                max_ttl: url.max_ttl,
            };
            Quorum::new(clock.clone(), client, nodes, inboxes, options, inbox, runtime)
        });
        quorum.connect(url).await?;
        Ok(Arc::new(Self::of(quorum)))
    }
}

impl Quorum {
    /// Waits until a quorum is connected or cannot be, and as long again for the others. Otherwise the first lease would often
    /// have a bare quorum, only because a node connected a little later.
    async fn connect(self: &Arc<Self>, url: &RedlockUrl) -> Result<(), Error> {
        let began = self.now();
        let mut waiting = futures_util::stream::FuturesUnordered::new();
        for (index, node) in self.nodes.iter().enumerate() {
            waiting.push(async move {
                let connected = node.store.await_connected().await;
                if connected.is_ok() {
                    node.clone().learn_clock().await;
                }
                (index, connected)
            });
        }
        let (mut there, mut errors) = (0, Vec::new());
        while let Some((index, connected)) = futures_util::StreamExt::next(&mut waiting).await {
            match connected {
                Ok(()) => there += 1,
                Err(error) => errors.push(format!("{}: {}", self.nodes[index].name, error.message)),
            }
            if there >= quorum_of(self.nodes.len()) {
                break;
            }
        }
        let as_long_again = self.now().since(began).max(STRAGGLER_GRACE);
        let others = futures_util::StreamExt::count(&mut waiting);
        let _ = self.runtime.timeout(as_long_again, others).await;
        drop(waiting);
        if there < quorum_of(self.nodes.len()) {
            let (nodes, needed) = (self.nodes.len(), quorum_of(self.nodes.len()));
            let what =
                format!("{there} of {nodes} nodes are connected, {needed} are needed: {}", errors.join("; "));
            return Err(Error::new(ErrorKind::Unavailable, format!("{url}: {what}")));
        }
        for (node, duplicate) in self.nodes.iter().zip(self.duplicate_nodes()) {
            if let Some(what) = duplicate {
                return Err(Error::new(ErrorKind::Invalid, format!("{url}: {}: {what}", node.name)));
            }
        }
        Ok(())
    }
}
