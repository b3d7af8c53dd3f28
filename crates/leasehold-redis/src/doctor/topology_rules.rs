//! What several servers mean together: sentinels, a cluster, clocks. Pure: no server is asked here.

use std::collections::HashMap;
use std::time::Duration;

use leasehold_core::quorum_of;
use leasehold_store::{Check, Component};

use super::super::slot_map::SlotRange;
use super::probe::{FailoverMode, SentinelView, Snapshot};
use super::time_rules::{differ, span};
use crate::url::Host;

const SLOTS: u32 = 16_384;

/// With fewer, the loss of one leaves no majority.
const MIN_SENTINELS: u32 = 3;

pub(super) fn unreachable(name: String, error: &str) -> Component {
    let mut component = Component::new(name);
    component.advice(Check::NotExamined, "it could not be examined", error, None);
    component
}

/// The replicas that a master names: `slave0:ip=127.0.0.1,port=6380,state=online,…`.
pub(super) fn replicas_of(info: &HashMap<String, String>) -> Vec<Host> {
    let named = (0..).map_while(|number| info.get(&format!("slave{number}")));
    let host = |line: &String| {
        let part = |name: &str| line.split(',').find_map(|part| part.strip_prefix(name));
        Some(Host { name: part("ip=")?.to_owned(), port: part("port=")?.parse().ok()? })
    };
    named.filter_map(host).collect()
}

pub(super) fn check_sentinels(
    service: &str,
    opinions: &[(String, Result<SentinelView, String>)],
) -> Component {
    let mut component = Component::new(format!("sentinels of {service}"));
    for (name, opinion) in opinions {
        if let Err(error) = opinion {
            component.advice(
                Check::SilentSentinel,
                format!("the sentinel {name} did not answer"),
                error.as_str(),
                None,
            );
        }
    }
    let answered: Vec<&SentinelView> =
        opinions.iter().filter_map(|(_, opinion)| opinion.as_ref().ok()).collect();
    let Some(first) = answered.first() else { return component };
    let count = first.other_sentinels + 1;
    component.fact("master", &first.master);
    component.fact("sentinels", count);
    component.fact("quorum", first.quorum);
    if answered.iter().any(|opinion| opinion.master != first.master) {
        let mut named: Vec<&str> = answered.iter().map(|opinion| opinion.master.as_str()).collect();
        named.sort_unstable();
        named.dedup();
        let why = "clients of different sentinels acquire locks on different servers. During a failover this lasts for \
                   seconds";
        component.danger(
            Check::SentinelsDisagree,
            format!("the sentinels name different masters: {}", named.join(", ")),
            why,
            None,
        );
    }
    if let Some(objection) = answered.iter().find_map(|opinion| opinion.objection.as_ref()) {
        let why =
            format!("when the master fails, no server replaces it, and no lock can be acquired: {objection}");
        component.danger(Check::NoFailover, "the sentinels could not replace the master", why, None);
    }
    if count < MIN_SENTINELS {
        let why =
            "a failover needs a majority of them: with fewer than three, the loss of one can prevent it";
        component.advice(Check::FewSentinels, format!("there are {count} sentinels"), why, None);
    }
    if (1..=count / 2).contains(&first.quorum) && count >= MIN_SENTINELS {
        let why = "a minority of the sentinels can start a failover of a master that only they cannot reach; a majority \
                   must still confirm it";
        let remedy = format!("SENTINEL SET {service} quorum {}", count / 2 + 1);
        component.advice(
            Check::SentinelQuorum,
            format!("the quorum is {} of {count}", first.quorum),
            why,
            Some(remedy),
        );
    }
    if component.findings.is_empty() {
        component.fine(
            Check::Sentinels,
            "the sentinels agree and can replace the master",
            "a failover needs a majority of them",
        );
    }
    component
}

/// A node of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) host: Host,
    /// Its own, or those of its master.
    pub(super) slots: Vec<(u16, u16)>,
    /// None for a replica.
    pub(super) replicas: Option<usize>,
}

/// The nodes of a slot map, each with all of its ranges.
pub(super) fn nodes_of(ranges: &[SlotRange]) -> Vec<Node> {
    let mut nodes: Vec<Node> = Vec::new();
    for range in ranges {
        let replicas = range.replicas.iter().map(|host| (host, None));
        for (host, replicas) in [(&range.master, Some(range.replicas.len()))].into_iter().chain(replicas) {
            let slots = (range.first, range.last);
            match nodes.iter_mut().find(|node| node.host == *host) {
                Some(node) => node.slots.push(slots),
                None => nodes.push(Node { host: host.clone(), slots: vec![slots], replicas }),
            }
        }
    }
    nodes
}

pub(super) fn check_cluster(nodes: &[Node], snapshots: &[Snapshot]) -> Component {
    let mut component = Component::new("cluster");
    let masters: Vec<&Node> = nodes.iter().filter(|node| node.replicas.is_some()).collect();
    let slots = masters.iter().flat_map(|node| &node.slots);
    let covered: u32 = slots.map(|(first, last)| u32::from(last - first) + 1).sum();
    component.fact("masters", masters.len());
    component.fact("replicas", nodes.len() - masters.len());
    component.fact("slots", format_args!("{covered} of {SLOTS} have a master"));
    let setting = |name: &str| snapshots.iter().find_map(|snapshot| snapshot.setting(name));
    if let Some(value) = setting("cluster-node-timeout") {
        component.fact("cluster-node-timeout", format_args!("{value} ms"));
    }
    if let Some(value) = setting("cluster-require-full-coverage") {
        component.fact("cluster-require-full-coverage", value);
    }
    let is_down =
        |snapshot: &&Snapshot| snapshot.info.get("cluster_state").is_some_and(|state| state != "ok");
    let down: Vec<&str> = snapshots.iter().filter(is_down).map(|snapshot| snapshot.name.as_str()).collect();
    if !down.is_empty() {
        let what = format!("the cluster is down for {}", down.join(", "));
        component.danger(
            Check::ClusterDown,
            what,
            "no lock can be acquired there",
            Some("CLUSTER NODES".to_owned()),
        );
    }
    if covered < SLOTS {
        let why =
            "no lock in these slots can be acquired; with cluster-require-full-coverage yes, none at all";
        let what = format!("{} hash slots have no master", SLOTS.saturating_sub(covered));
        component.danger(
            Check::UncoveredSlots,
            what,
            why,
            Some("redis-cli --cluster fix HOST:PORT".to_owned()),
        );
    }
    // A replica that has not replicated anything yet is not named, but its master knows of it.
    let is_followed = |name: &String| {
        let master = snapshots.iter().find(|snapshot| snapshot.name.ends_with(name));
        master.and_then(|master| master.number("connected_slaves")).is_some_and(|replicas| replicas > 0)
    };
    let lonely = masters.iter().filter(|node| node.replicas == Some(0));
    let lonely = lonely.map(|node| format!(" {}:{}", node.host.name, node.host.port));
    let lonely: Vec<String> = lonely.filter(|name| !is_followed(name)).collect();
    if !lonely.is_empty() {
        let why = "when it fails, no server replaces it, and the locks in its slots cannot be acquired";
        component.advice(
            Check::ClusterReplicas,
            format!("masters without a replica:{}", lonely.join(",")),
            why,
            None,
        );
    }
    if component.findings.is_empty() {
        component.fine(
            Check::Cluster,
            "every hash slot has a master, and every master a replica",
            "each master has a replacement",
        );
    }
    component
}

/// A server that votes, or a master: its name and its snapshot.
pub(super) type Voter<'a> = (&'a str, Option<&'a Snapshot>);

/// Whether servers that vote are independent of each other, so that the loss of one is not the loss of two.
pub(super) fn check_voters(voters: &[Voter<'_>], abstains_for: Option<Duration>) -> Component {
    let mut component = Component::new("quorum");
    let (count, needed) = (voters.len(), quorum_of(voters.len()));
    component.fact("nodes", format_args!("{count}, of which {needed} must agree"));
    match abstains_for {
        Some(longest) => {
            component.fact("after a restart", format_args!("a node does not vote for {}", span(longest)));
        }
        None => component.fact("after a restart", "a node votes at once"),
    }
    let away = voters.iter().filter(|(_, snapshot)| snapshot.is_none()).count();
    if count - away < needed {
        let why = "no lock can be acquired or renewed";
        component.danger(
            Check::QuorumUnreachable,
            format!("{away} of {count} nodes are unreachable"),
            why,
            None,
        );
    }
    if count < 3 {
        let why = "if one node fails, no lock can be acquired: use three or five nodes";
        component.advice(Check::FewNodes, format!("a quorum of {count} tolerates no failure"), why, None);
    } else if count % 2 == 0 {
        let why = "it needs one more vote than with one node fewer, and tolerates no more failures";
        component.advice(Check::EvenNodes, format!("{count} nodes are an even number"), why, None);
    }
    let snapshots: Vec<(&str, &Snapshot)> =
        voters.iter().filter_map(|(name, snapshot)| snapshot.map(|snapshot| (*name, snapshot))).collect();
    for (index, (name, one)) in snapshots.iter().enumerate() {
        for (other_name, other) in &snapshots[index + 1..] {
            if let Some(what) = depend(one, other) {
                let why = "they fail together, and each vote counts twice";
                component.danger(Check::DependentNodes, format!("{name} and {other_name} {what}"), why, None);
            }
        }
        if abstains_for.is_some_and(|longest| hides_promotions(one, longest)) {
            let remedy = "CONFIG SET repl-backlog-ttl 0, and in its configuration file".to_owned();
            component.advice(
                Check::ForgetfulNode,
                format!("{name} has a repl-backlog-ttl that is shorter than max_ttl"),
                "after a promotion that lost votes it may vote before max_ttl has passed",
                Some(remedy),
            );
        }
        if abstains_for.is_none()
            && let Some(why) = forgets(one)
        {
            let remedy = match one.failover {
                FailoverMode::Sentinels => {
                    "max_ttl_ms=MILLISECONDS in every client's address, or a single server as the node"
                }
                _ => "max_ttl_ms=MILLISECONDS in every client's address, or CONFIG SET appendfsync always",
            };
            let why = format!(
                "{why}, and it may then vote for another holder: together with a second such node, or one that had not voted, \
                 that is a quorum"
            );
            component.advice(
                Check::ForgetfulNode,
                format!("{name} may lose its votes"),
                why,
                Some(remedy.to_owned()),
            );
        }
    }
    if component.findings.is_empty() {
        component.fine(
            Check::Quorum,
            "the nodes are independent of each other",
            "any minority of them may fail",
        );
    }
    component
}

/// The default of `repl-backlog-ttl`. If the maximum ttl is longer, nodes abstain whatever the setting is: see `restart_guard.lua`.
const USUAL_BACKLOG_TTL: Duration = Duration::from_secs(3_600);

/// Whether a server forgets its promotion while leases that this lost may be held.
fn hides_promotions(voter: &Snapshot, longest: Duration) -> bool {
    let backlog_ttl = voter.number("repl-backlog-ttl").filter(|seconds| *seconds > 0);
    longest <= USUAL_BACKLOG_TTL && backlog_ttl.is_some_and(|seconds| Duration::from_secs(seconds) < longest)
}

/// How a server may lose the latest leases, if it may.
fn forgets(voter: &Snapshot) -> Option<&'static str> {
    if voter.failover == FailoverMode::Sentinels {
        return Some("a failover can lose the latest leases of a service with Sentinels");
    }
    let is_synced_later =
        voter.number("aof_enabled") == Some(1) && voter.setting("appendfsync") != Some("always");
    is_synced_later.then_some("a power failure can lose the leases of its last two seconds")
}

/// Why two servers are not independent of each other, if they are not.
fn depend(one: &Snapshot, other: &Snapshot) -> Option<&'static str> {
    let same = |name: &str| one.info.get(name).is_some_and(|value| Some(value) == other.info.get(name));
    if same("run_id") {
        return Some("are the same server");
    }
    // A history that was forked by a failover keeps the earlier one's name beside its own.
    let history = |snapshot: &Snapshot, name: &str| {
        snapshot.info.get(name).filter(|id| id.bytes().any(|byte| byte != b'0')).cloned()
    };
    let ids = |snapshot: &Snapshot| [history(snapshot, "master_replid"), history(snapshot, "master_replid2")];
    let shared = ids(one).into_iter().flatten().any(|id| ids(other).contains(&Some(id)));
    shared.then_some("are replicas of one another, or of the same master")
}

/// Compares the clocks of servers that may replace each other.
pub(super) fn check_clocks(snapshots: &[Snapshot], is_voting: bool) -> Option<Component> {
    let mut clocks: Vec<_> =
        snapshots.iter().filter_map(|snapshot| Some((snapshot.clock?, &snapshot.name))).collect();
    clocks.sort_by_key(|(clock, _)| clock.ahead_micros);
    let ((last, behind), (first, ahead)) = (clocks.first()?, clocks.last()?);
    let apart = differ(*last, *first)?;
    let mut component = Component::new("clocks");
    let what = format!("the clock of {ahead} is {} ahead of that of {behind}", span(apart));
    if is_voting {
        let why = "tokens follow the clock that is ahead. They rise as long as a quorum remembers them; if that is lost, \
                   they can fall by as much as the clocks differ";
        component.advice(Check::ClocksApart, what, why, Some("timedatectl set-ntp true".to_owned()));
        return Some(component);
    }
    let why = "when one replaces the other as master, every lease ends too early by the difference, while its holder still \
               works: two holders are possible";
    component.danger(Check::ClocksApart, what, why, Some("timedatectl set-ntp true".to_owned()));
    Some(component)
}

#[cfg(test)]
mod tests {
    use leasehold_store::Severity;

    use super::super::probe::Clock;
    use super::*;

    fn findings(component: &Component) -> Vec<(Severity, &str)> {
        component.findings.iter().map(|finding| (finding.severity, finding.what.as_str())).collect()
    }

    fn opinion(master: &str, quorum: u32, other_sentinels: u32) -> SentinelView {
        SentinelView { master: master.to_owned(), quorum, other_sentinels, objection: None }
    }

    fn sentinels(opinions: Vec<Result<SentinelView, String>>) -> Component {
        let name = |(number, opinion)| (format!("s{number}"), opinion);
        check_sentinels("locks", &opinions.into_iter().enumerate().map(name).collect::<Vec<_>>())
    }

    #[test]
    fn three_agreeing_sentinels_are_fine() {
        let component = sentinels(vec![Ok(opinion("a:1", 2, 2)), Ok(opinion("a:1", 2, 2))]);
        assert_eq!(
            findings(&component),
            [(Severity::Fine, "the sentinels agree and can replace the master")]
        );
    }

    #[test]
    fn few_silent_or_disagreeing_sentinels_are_reported() {
        let component = sentinels(vec![Ok(opinion("a:1", 2, 1)), Err("gone".to_owned())]);
        assert_eq!(
            findings(&component),
            [
                (Severity::Advice, "the sentinel s1 did not answer"),
                (Severity::Advice, "there are 2 sentinels")
            ]
        );
        let component = sentinels(vec![Ok(opinion("a:1", 1, 2)), Ok(opinion("b:1", 1, 2))]);
        assert_eq!(
            findings(&component),
            [
                (Severity::Danger, "the sentinels name different masters: a:1, b:1"),
                (Severity::Advice, "the quorum is 1 of 3")
            ]
        );
        let objection = Some("NOQUORUM".to_owned());
        let component = sentinels(vec![Ok(SentinelView { objection, ..opinion("a:1", 2, 2) })]);
        assert_eq!(findings(&component), [(Severity::Danger, "the sentinels could not replace the master")]);
    }

    fn node(port: u16, slots: (u16, u16), replicas: Option<usize>) -> Node {
        Node { host: Host { name: "h".to_owned(), port }, slots: vec![slots], replicas }
    }

    #[test]
    fn uncovered_slots_and_masters_without_replicas_are_reported() {
        let whole = [node(1, (0, 16_383), Some(1)), node(2, (0, 16_383), None)];
        assert_eq!(check_cluster(&whole, &[]).findings[0].severity, Severity::Fine);
        let part = [node(1, (0, 99), Some(0))];
        let down = Snapshot {
            name: "server h:1".to_owned(),
            info: HashMap::from([("cluster_state".to_owned(), "fail".to_owned())]),
            ..Snapshot::default()
        };
        assert_eq!(
            findings(&check_cluster(&part, &[down])),
            [
                (Severity::Danger, "the cluster is down for server h:1"),
                (Severity::Danger, "16284 hash slots have no master"),
                (Severity::Advice, "masters without a replica: h:1")
            ]
        );
    }

    #[test]
    fn cluster_masters_and_replicas_are_distinguished() {
        let host = |port| Host { name: "h".to_owned(), port };
        let range = |first, last, master, replicas: &[u16]| SlotRange {
            first,
            last,
            master: host(master),
            replicas: replicas.iter().copied().map(host).collect(),
            ids: Vec::new(),
        };
        let nodes = nodes_of(&[range(0, 5, 1, &[2]), range(6, 9, 3, &[]), range(20, 21, 1, &[2])]);
        let master = Node { slots: vec![(0, 5), (20, 21)], ..node(1, (0, 0), Some(1)) };
        let replica = Node { slots: vec![(0, 5), (20, 21)], ..node(2, (0, 0), None) };
        assert_eq!(nodes, [master, replica, node(3, (6, 9), Some(0))]);
    }

    #[test]
    fn clocks_of_servers_that_may_replace_each_other_must_agree() {
        let snapshot = |name: &str, ahead_micros| Snapshot {
            name: name.to_owned(),
            clock: Some(Clock { ahead_micros, error: Duration::from_millis(50) }),
            ..Snapshot::default()
        };
        assert!(
            check_clocks(&[snapshot("a", 300_000), snapshot("b", -290_000)], false).is_none(),
            "it may be the network"
        );
        let component =
            check_clocks(&[snapshot("a", 400_000), snapshot("c", 0), snapshot("b", -300_000)], false)
                .unwrap();
        assert_eq!(
            findings(&component),
            [(Severity::Danger, "the clock of a is 700.0 ms ahead of that of b")]
        );
        assert!(check_clocks(&[], false).is_none());
    }

    #[test]
    fn replicas_of_a_master_are_parsed() {
        let info = HashMap::from([(
            "slave0".to_owned(),
            "ip=10.0.0.2,port=6380,state=online,offset=1,lag=0".to_owned(),
        )]);
        assert_eq!(replicas_of(&info), [Host { name: "10.0.0.2".to_owned(), port: 6380 }]);
    }

    fn voter(run_id: &str, history: &str, earlier: &str) -> Snapshot {
        let info = [("run_id", run_id), ("master_replid", history), ("master_replid2", earlier)];
        let info = info.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Snapshot { info, abstains: true, ..Snapshot::default() }
    }

    fn said_of(
        voters: &[(&str, Option<&Snapshot>)],
        abstains_for: Option<Duration>,
    ) -> Vec<(Severity, String)> {
        let component = check_voters(voters, abstains_for);
        component.findings.into_iter().map(|finding| (finding.severity, finding.what)).collect()
    }

    #[test]
    fn dependent_voters_are_reported() {
        let (a, b, c) = (voter("1", "a1", "00"), voter("2", "b1", "00"), voter("3", "c1", "00"));
        let long = Some(Duration::from_secs(30));
        let fine = (Severity::Fine, "the nodes are independent of each other".to_owned());
        assert_eq!(said_of(&[("a", Some(&a)), ("b", Some(&b)), ("c", Some(&c))], long), [fine]);
        let danger = |what: &str| (Severity::Danger, what.to_owned());
        let same = voter("1", "a1", "00");
        assert_eq!(
            said_of(&[("a", Some(&a)), ("b", Some(&same)), ("c", Some(&c))], long),
            [danger("a and b are the same server")]
        );
        for (history, earlier) in [("a1", "00"), ("d1", "a1")] {
            let replica = voter("4", history, earlier);
            assert_eq!(
                said_of(&[("a", Some(&a)), ("b", Some(&b)), ("d", Some(&replica))], long),
                [danger("a and d are replicas of one another, or of the same master")]
            );
        }
        assert_eq!(
            said_of(&[("a", Some(&a)), ("b", None), ("c", None)], long),
            [danger("2 of 3 nodes are unreachable")]
        );
        let advice = |what: &str| (Severity::Advice, what.to_owned());
        assert_eq!(
            said_of(&[("a", Some(&a)), ("b", Some(&b))], long),
            [advice("a quorum of 2 tolerates no failure")]
        );
    }

    #[test]
    fn voter_that_forgets_its_promotion_too_soon_is_reported() {
        let (b, c) = (voter("2", "b1", "00"), voter("3", "c1", "00"));
        for (backlog_ttl, longest, is_reported) in
            [("29", 30, true), ("30", 30, false), ("0", 30, false), ("29", 3_600, true), ("29", 3_601, false)]
        {
            let mut a = voter("1", "a1", "00");
            a.settings.insert("repl-backlog-ttl".to_owned(), backlog_ttl.to_owned());
            let voters = [("a", Some(&a)), ("b", Some(&b)), ("c", Some(&c))];
            let (severity, what) = said_of(&voters, Some(Duration::from_secs(longest))).remove(0);
            assert_eq!(severity == Severity::Advice, is_reported, "{backlog_ttl} s, {longest} s: {what}");
        }
    }

    #[test]
    fn forgetful_voter_is_reported_unless_it_abstains() {
        let mut a = voter("1", "a1", "00");
        a.info.insert("aof_enabled".to_owned(), "1".to_owned());
        a.settings.insert("appendfsync".to_owned(), "everysec".to_owned());
        let (b, c) = (voter("2", "b1", "00"), voter("3", "c1", "00"));
        let voters = [("a", Some(&a)), ("b", Some(&b)), ("c", Some(&c))];
        assert_eq!(said_of(&voters, None), [(Severity::Advice, "a may lose its votes".to_owned())]);
        assert_eq!(said_of(&voters, Some(Duration::from_secs(30)))[0].0, Severity::Fine);
        // A failover, too, whatever is on disk.
        a.settings.insert("appendfsync".to_owned(), "always".to_owned());
        a.failover = FailoverMode::Sentinels;
        let voters = [("a", Some(&a)), ("b", Some(&b)), ("c", Some(&c))];
        assert_eq!(said_of(&voters, None), [(Severity::Advice, "a may lose its votes".to_owned())]);
        assert_eq!(said_of(&voters, Some(Duration::from_secs(30)))[0].0, Severity::Fine);
    }
}
