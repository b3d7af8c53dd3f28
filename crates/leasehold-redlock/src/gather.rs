//! Gathers the replies of all nodes.

use std::pin::pin;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use leasehold_core::{NodeReplies, NodeReply};

use super::runtime::Runtime;

/// Passes the nodes' responses to `handle` until the tally of each command is decided, and returns the later ones, which decide nothing.
/// Nodes that have not responded within `limit` count as failed.
pub(super) async fn gather<T, F: Future<Output = (usize, T)>>(
    runtime: &Runtime,
    mut responses: FuturesUnordered<F>,
    limit: Duration,
    replies: &mut [NodeReplies],
    mut handle: impl FnMut(&mut [NodeReplies], usize, T),
) -> FuturesUnordered<F> {
    let mut limit = pin!(runtime.sleep(limit));
    while replies.iter().any(|replies| replies.poll_tally().is_none()) {
        tokio::select! {
            // A response that has arrived counts, even if the whole process was suspended until the time was over.
            biased;
            Some((node, response)) = responses.next() => handle(replies, node, response),
            () = &mut limit => replies.iter_mut().for_each(NodeReplies::handle_timeout),
        }
    }
    responses
}

/// Marks a node as failed for all commands.
pub(super) fn fail(replies: &mut [NodeReplies], node: usize) {
    replies.iter_mut().for_each(|replies| replies.handle_reply(node, NodeReply::Failed));
}
