//! Opens a quorum: connects to its nodes.

use std::sync::{Arc, Weak};

use leasehold_core::{ClientId, quorum_of};
use leasehold_redis::{Redis, Voting, diagnose_voters};
use leasehold_store::clock::Clock;
use leasehold_store::tasks::Tasks;
use leasehold_store::{BoxFuture, Inbox, OpenError, QuorumNode};
use tokio::runtime::Handle;

use super::runtime::Runtime;
use super::{Quorum, Redlock, RedlockUrl, STRAGGLER_GRACE, VoteOptions};

impl Redlock {
    /// Connects to all nodes, and waits until a quorum is connected or cannot be. Runs on the runtime of the client's thread.
    ///
    /// # Errors
    ///
    /// No quorum is reached, or two addresses lead to one server.
    pub async fn open(
        url: &RedlockUrl,
        clock: Clock,
        client: ClientId,
        inbox: Weak<dyn Inbox>,
        caller: Option<Handle>,
    ) -> Result<Arc<Self>, OpenError> {
        let mut targets = Vec::new();
        for place in &url.nodes {
            targets.push((place, Redis::voter_target(place).await?));
        }
        let runtime = Runtime::new(Tasks::current());
        let max_ttl = url.max_ttl;
        let options = VoteOptions { is_fenced: url.is_fenced, node_timeout: url.node_timeout, max_ttl };
        let voting = Voting { abstains_for: max_ttl };
        let mut voters = Vec::new();
        let quorum =
            Quorum::over(targets, &clock, client, options, inbox, runtime, |(place, target), inbox| {
                let store = Redis::open_voter(place, target, voting, client, inbox, caller.clone());
                voters.push((place.to_string(), store.clone()));
                (store as Arc<dyn QuorumNode>, place.to_string())
            });
        quorum.connect(url).await?;
        let voters: Arc<[_]> = voters.into();
        let diagnose = move || -> BoxFuture<_> {
            let voters = voters.clone();
            Box::pin(async move {
                let voters: Vec<_> = voters.iter().map(|(name, store)| (name.as_str(), &**store)).collect();
                diagnose_voters(&voters, max_ttl).await
            })
        };
        Ok(Arc::new(Self::of(quorum, Box::new(diagnose))))
    }
}

impl Quorum {
    /// Waits until a quorum is connected or cannot be, and as long again for the others. Otherwise the first lease would often
    /// have a bare quorum, only because a node connected a little later.
    async fn connect(self: &Arc<Self>, url: &RedlockUrl) -> Result<(), OpenError> {
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
            return Err(OpenError::unavailable(format!("{url}: {what}")));
        }
        for (node, duplicate) in self.nodes.iter().zip(self.duplicate_nodes()) {
            if let Some(what) = duplicate {
                return Err(OpenError::invalid(format!("{url}: {}: {what}", node.name)));
            }
        }
        Ok(())
    }
}
