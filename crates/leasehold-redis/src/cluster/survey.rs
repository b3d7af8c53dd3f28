//! What the nodes of a cluster say about its slots, and which of them are believed.

use std::collections::BTreeSet;
use std::mem::take;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::try_join;
use futures_util::stream::FuturesUnordered;
use leasehold_redis_protocol::Channels;
use leasehold_store::StoreError;
use tokio::time::{Instant, timeout_at};

use super::{Cluster, not_sent};
use crate::connect;
use crate::connections::Connections;
use crate::error::{explain, slot_unassigned};
use crate::limits::MAX_REFRESH_PAUSE;
use crate::slot_map::{
    self, Membership, OTHER_CLUSTER, SlotRange, UNCLEAR, Votes, membership, names_as_master, same_masters,
};
use crate::url::Host;

/// How long the slot maps of other nodes are waited for, to compare them: as long as a connection and a question take if a round trip takes
/// 250 ms. A command that does not wait has a second for its connection.
const STRAGGLER_GRACE: Duration = Duration::from_millis(750);

/// Until when other nodes are waited for, where the first answer has come now: if all are far, the others come soon after it.
fn straggler_limit(began: Instant) -> Instant {
    began + STRAGGLER_GRACE.max(2 * began.elapsed())
}

/// How long no node of the known cluster may have answered, until another one counts that answers at its addresses: it was made anew.
pub(super) const MADE_ANEW_AFTER: Duration = Duration::from_secs(60);

impl Cluster {
    /// Adopts the slot map on which most of the seeds that answer agree: one may be cut off from the others. Refuses addresses of several
    /// clusters, unless more than half of them are of one. The seeds are compared until all have answered or failed, or until
    /// [`straggler_limit`]; meanwhile the first master of the first map is connected.
    pub(super) async fn ask_seeds(&self) -> Result<Channels, StoreError> {
        let began = Instant::now();
        let mut asked: FuturesUnordered<_> = self.seeds.iter().cloned().map(|seed| self.ask(seed)).collect();
        let mut failure = slot_unassigned();
        let (seed, first) = loop {
            match asked.next().await {
                Some((seed, Ok(ranges))) => break (seed, ranges),
                Some((_, Err(message))) => failure = not_sent(message),
                None => return Err(failure),
            }
        };
        let until = straggler_limit(began);
        self.adopt(first.clone());
        let compare = async {
            let mut votes = Votes::new(self.seeds.clone(), BTreeSet::new());
            let (mut maps, mut has_strangers) = (vec![first.clone()], false);
            votes.add(seed, first.clone());
            while let Ok(Some((seed, answer))) = timeout_at(until, asked.next()).await {
                let Ok(other) = answer else { continue };
                has_strangers |= membership(&first, &other) == Membership::Stranger;
                maps.push(other.clone());
                votes.add(seed, other);
            }
            if !has_strangers {
                return Ok(votes.best().cloned());
            }
            // The address of a node that is gone may be given to a node of another cluster.
            let agreed = slot_map::agreed(&maps, self.seeds.len()).cloned();
            let Some(agreed) = agreed else {
                let what = "the addresses are of nodes of different clusters: name nodes of one";
                return Err(not_sent(what.to_owned()));
            };
            tracing::warn!("some addresses are of nodes of another cluster: that of most of them is used");
            Ok(Some(agreed))
        };
        let (channels, best) = try_join(self.channels(), compare).await?;
        if let Some(ranges) = best {
            self.adopt(ranges);
        }
        Ok(channels)
    }

    pub(super) async fn refresh(&self) -> Result<(), StoreError> {
        let doubted = take(&mut *self.doubted.lock().unwrap_or_else(PoisonError::into_inner));
        let found = self.query_connected_nodes(&doubted).await;
        let ranges = match found.filter(|ranges| !names_as_master(ranges, &doubted) || !self.must_survey()) {
            Some(ranges) => ranges,
            None => self.survey(doubted).await?,
        };
        self.adopt(ranges);
        Ok(())
    }

    /// Whether all nodes are asked for a node that is doubted, although connected ones name it as a master, too: these may be cut off
    /// together with it, unless they are most of the masters. Not always, since that costs connections to all nodes.
    fn must_survey(&self) -> bool {
        let (masters, connected) = (self.masters().len(), self.connected(&BTreeSet::new()).len());
        let surveyed = self.surveyed.lock().unwrap_or_else(PoisonError::into_inner);
        connected <= masters / 2 && surveyed.is_none_or(|surveyed| surveyed.elapsed() >= MAX_REFRESH_PAUSE)
    }

    /// The slot map, from new connections to all known nodes and the seeds: the one on which most of the known masters agree. If these do
    /// not answer, others count, too. A map with few of the known shards counts only if most of the known nodes that answer agree on it.
    /// A seed may be one of them by another name, so that seeds count only while no known node answers.
    async fn survey(&self, doubted: BTreeSet<Host>) -> Result<Vec<SlotRange>, StoreError> {
        let began = Instant::now();
        *self.surveyed.lock().unwrap_or_else(PoisonError::into_inner) = Some(began);
        let known = self.slots().nodes();
        let seeds = self.seeds.iter().filter(|seed| !known.contains(seed));
        let mut asked: FuturesUnordered<_> =
            known.iter().chain(seeds).cloned().map(|host| self.ask(host)).collect();
        let mut votes = Votes::new(self.masters(), doubted);
        let (mut maps, mut maps_of_seeds, mut failure) = (Vec::new(), Vec::new(), slot_unassigned());
        let mut strangers = Vec::new();
        let mut until = None;
        loop {
            let next = asked.next();
            let answer = match until {
                None => next.await,
                Some(until) => timeout_at(until, next).await.unwrap_or(None),
            };
            let Some((host, answer)) = answer else { break };
            if answer.is_ok() {
                until.get_or_insert_with(|| straggler_limit(began));
            }
            match answer.map(|ranges| (self.slots().membership_of(&ranges), ranges)) {
                Ok((Membership::Member, ranges)) => votes.add(host, ranges),
                Ok((Membership::Unclear, ranges)) if known.contains(&host) => maps.push(ranges),
                Ok((Membership::Unclear, ranges)) => maps_of_seeds.push(ranges),
                Ok((Membership::Stranger, ranges)) => {
                    failure = not_sent(OTHER_CLUSTER.to_owned());
                    strangers.push((host, ranges));
                }
                Err(message) => failure = not_sent(message),
            }
            if let Some(ranges) = votes.agreed().or_else(|| slot_map::agreed(&maps, known.len())) {
                return Ok(ranges.clone());
            }
        }
        if let Some(ranges) = votes.best() {
            return Ok(ranges.clone());
        }
        if maps.is_empty() && maps_of_seeds.is_empty() {
            return self.made_anew(&strangers).ok_or(failure);
        }
        let counted = if maps.is_empty() { maps_of_seeds } else { maps };
        let agreed = slot_map::agreed(&counted, counted.len()).cloned();
        agreed.ok_or_else(|| not_sent(UNCLEAR.to_owned()))
    }

    /// The map of another cluster that has taken the place of this one, as one does whose nodes have no disks: none of the known nodes has
    /// answered for a while, and at least half of the addresses with which the client was opened lead to that other one. A single node is
    /// replaced at once, as a single server is.
    pub(super) fn made_anew(&self, strangers: &[(Host, Vec<SlotRange>)]) -> Option<Vec<SlotRange>> {
        let is_single = self.masters().len() == 1;
        let maps: Vec<_> = strangers.iter().map(|(_, map)| map.clone()).collect();
        let agreed = slot_map::agreed(&maps, maps.len())?;
        let led = self.seeds.iter().filter(|seed| strangers.iter().any(|(host, _)| host == *seed)).count();
        let mut gone_since = self.gone_since.lock().unwrap_or_else(PoisonError::into_inner);
        let since = gone_since.get_or_insert_with(|| {
            if !is_single {
                tracing::warn!("{OTHER_CLUSTER}; it counts as the same once no known node has answered for {MADE_ANEW_AFTER:?}");
            }
            Instant::now()
        });
        let is_over = is_single || since.elapsed() >= MADE_ANEW_AFTER;
        (is_over && 2 * led >= self.seeds.len()).then(|| agreed.clone())
    }

    /// The slot map of connected nodes that are surely of the cluster: of one, if that knows of no change, or else of two that agree. Begins
    /// with a different one each time, because one may be wrong.
    async fn query_connected_nodes(&self, doubted: &BTreeSet<Host>) -> Option<Vec<SlotRange>> {
        let mut friends = self.connected(doubted);
        friends.sort_by(|(a, _), (b, _)| a.cmp(b));
        let first = self.asked.fetch_add(1, Ordering::Relaxed) % friends.len().max(1);
        friends.rotate_left(first);
        let mut changed = None;
        for (host, connections) in friends {
            let ranges = slot_map::query(&mut connections.driver_conn(), &host).await.ok();
            let is_member =
                |ranges: &Vec<SlotRange>| self.slots().membership_of(ranges) == Membership::Member;
            let Some(ranges) = ranges.filter(is_member) else { continue };
            match changed {
                None if self.slots().has_masters_of(&ranges) => return Some(ranges),
                None => changed = Some(ranges),
                Some(changed) => return same_masters(&changed, &ranges).then_some(ranges),
            }
        }
        None
    }

    /// The nodes that are connected, but for these.
    fn connected(&self, doubted: &BTreeSet<Host>) -> Vec<(Host, Arc<Connections>)> {
        let endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        let others = endpoints.iter().filter(|(host, _)| !doubted.contains(host));
        others.filter_map(|(host, endpoint)| Some((host.clone(), endpoint.current()?))).collect()
    }

    /// The same as [`Self::map_of`], and the host.
    async fn ask(&self, host: Host) -> (Host, Result<Vec<SlotRange>, String>) {
        let answer = self.map_of(host.clone()).await;
        (host, answer)
    }

    /// The slot map of a node, over a new connection.
    async fn map_of(&self, host: Host) -> Result<Vec<SlotRange>, String> {
        let say = |what: String| format!("the node {}:{}: {what}", host.name, host.port);
        let dial = self.credentials.at(&host).map_err(|error| format!("{error:#}"))?;
        let connection = dial.open(true, &connect::config()).await;
        let mut connection = connection.map_err(|error| say(explain(&error)))?;
        slot_map::query(&mut connection, &host).await.map_err(say)
    }
}
