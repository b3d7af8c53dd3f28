//! Every combination of answers of one to seven nodes, in several orders.

use super::*;
use crate::command::{Queued, Refusal};
use crate::time::StoreTime;
use crate::token::Token;

const LASTS: Duration = Duration::from_secs(10);

fn range(first: u64) -> TokenRange {
    TokenRange { first: Token::new(first).unwrap(), last: Token::new(first).unwrap() }
}

fn yes(token: u64) -> Vote {
    Vote::Yes(Grant { tokens: range(token), valid_for: LASTS, is_plain: false })
}

fn at(ms: u64) -> LocalTime {
    LocalTime::ZERO + Duration::from_millis(ms)
}

/// All lists of this length over these.
fn each_list<T: Copy>(of: &[T], length: usize, with: &mut impl FnMut(&[T])) {
    fn go<T: Copy>(of: &[T], length: usize, list: &mut Vec<T>, with: &mut impl FnMut(&[T])) {
        if list.len() == length {
            return with(list);
        }
        for item in of {
            list.push(*item);
            go(of, length, list, with);
            list.pop();
        }
    }
    go(of, length, &mut Vec::new(), with);
}

/// Forwards, backwards, and from the middle on.
fn orders(nodes: usize) -> [Vec<usize>; 3] {
    let middle = nodes / 2;
    [
        (0..nodes).collect(),
        (0..nodes).rev().collect(),
        (0..nodes).map(|node| (node + middle) % nodes).collect(),
    ]
}

#[test]
fn any_two_quorums_share_a_node() {
    for nodes in 1..=7 {
        assert!(2 * quorum_of(nodes) > nodes && quorum_of(nodes) <= nodes);
        // Without a minority that can be missing there is no use in it.
        assert_eq!(nodes - quorum_of(nodes), (nodes - 1) / 2);
    }
}

/// The verdict on all votes at once, computed independently of `Round`.
fn expected(votes: &[Vote]) -> Verdict {
    let quorum = votes.len() / 2 + 1;
    let count = |counts: fn(&Vote) -> bool| votes.iter().filter(|vote| counts(vote)).count();
    let (yeses, noes) = (count(|vote| matches!(vote, Vote::Yes(_))), count(|vote| matches!(vote, Vote::No)));
    if yeses >= quorum {
        Verdict::Granted(Grant { tokens: range(1), valid_for: LASTS, is_plain: false })
    } else if votes.len() - noes < quorum {
        Verdict::Busy
    } else if yeses + noes >= quorum {
        Verdict::Split
    } else {
        Verdict::NoQuorum
    }
}

fn is_same(found: Verdict, expected: Verdict) -> bool {
    core::mem::discriminant(&found) == core::mem::discriminant(&expected)
}

#[test]
fn every_combination_of_votes_has_a_final_verdict() {
    let each = [yes(5), Vote::No, Vote::Failed, Vote::Abstains(Duration::from_micros(9))];
    for nodes in 1..=7 {
        each_list(&each, nodes, &mut |votes| {
            for order in orders(nodes) {
                let mut round = Round::new(nodes, true, at(0));
                let mut verdict = None;
                for node in order {
                    let before = round.poll_verdict(at(1));
                    round.handle_vote(node, votes[node]);
                    assert_eq!(round.poll_propagate(), None, "all tokens are the same");
                    verdict = round.poll_verdict(at(1));
                    if let Some(before) = before {
                        assert_eq!(verdict, Some(before), "{votes:?} after {node}");
                    }
                }
                let verdict = verdict.unwrap_or_else(|| panic!("{votes:?} is undecided"));
                assert!(is_same(verdict, expected(votes)), "{votes:?}: {verdict:?}");
            }
        });
    }
}

#[test]
fn decided_round_awaits_no_further_vote() {
    for nodes in 1..=7 {
        let quorum = quorum_of(nodes);
        let mut round = Round::new(nodes, true, at(0));
        for node in 0..quorum {
            assert_eq!(round.poll_verdict(at(1)), None);
            round.handle_vote(node, yes(5));
        }
        assert!(matches!(round.poll_verdict(at(1)), Some(Verdict::Granted(_))));
        let mut round = Round::new(nodes, true, at(0));
        // The others could still refuse it, or with an odd number of nodes grant it.
        for node in 0..quorum {
            assert_eq!(round.poll_verdict(at(1)), None);
            round.handle_vote(node, Vote::Failed);
        }
        assert_eq!(round.poll_verdict(at(1)), Some(Verdict::NoQuorum));
        let mut round = Round::new(nodes, true, at(0));
        for node in 0..=nodes - quorum {
            assert_eq!(round.poll_verdict(at(1)), None);
            round.handle_vote(node, Vote::No);
        }
        assert_eq!(round.poll_verdict(at(1)), Some(Verdict::Busy));
    }
}

#[test]
fn token_counts_once_a_quorum_has_one_as_high() {
    let each = [yes(3), yes(4), yes(5), Vote::No, Vote::Failed];
    for nodes in 1..=6 {
        each_list(&each, nodes, &mut |votes| {
            for order in orders(nodes) {
                // What each node has as its last token when all is said.
                let mut last = vec![0; nodes];
                let mut round = Round::new(nodes, true, at(0));
                let mut granted = None;
                for node in order {
                    if granted.is_some() {
                        break;
                    }
                    if let Vote::Yes(grant) = votes[node] {
                        last[node] = grant.tokens.last.get();
                    }
                    round.handle_vote(node, votes[node]);
                    if let Some((nodes, tokens)) = round.poll_propagate() {
                        assert_eq!(round.poll_verdict(at(1)), None, "propagated, but not answered yet");
                        for node in nodes {
                            last[node] = last[node].max(tokens.last.get());
                            round.handle_propagated(node, true);
                        }
                    }
                    granted = match round.poll_verdict(at(1)) {
                        Some(Verdict::Granted(grant)) => Some(grant),
                        _ => None,
                    };
                }
                let Some(granted) = granted else { continue };
                let known = last.iter().filter(|last| **last >= granted.tokens.last.get()).count();
                assert!(known >= quorum_of(nodes), "{votes:?}: {granted:?}, {last:?}");
            }
        });
    }
}

#[test]
fn token_without_a_quorum_is_no_grant() {
    for failing in 0..4_u32 {
        let mut round = Round::new(3, true, at(0));
        round.handle_vote(0, yes(9));
        round.handle_vote(1, yes(5));
        let (nodes, tokens) = round.poll_propagate().unwrap();
        assert_eq!((nodes, tokens), (vec![1], range(9)));
        assert_eq!(round.poll_propagate(), None, "it is propagated once");
        if failing & 1 == 0 {
            // A third one that has given a higher token does where the other one can't be reached.
            round.handle_vote(2, yes(10));
            assert_eq!(round.poll_verdict(at(1)), None);
            round.handle_propagated(1, failing & 2 == 0);
            if failing & 2 != 0 {
                assert_eq!(round.poll_propagate(), Some((vec![2], range(9))));
                round.handle_propagated(2, true);
            }
            let Some(Verdict::Granted(grant)) = round.poll_verdict(at(1)) else { panic!() };
            assert_eq!(grant.tokens, range(9), "what was decided stays");
        } else {
            round.handle_propagated(1, failing & 2 == 0);
            round.handle_vote(2, Vote::Failed);
            let is_granted = matches!(round.poll_verdict(at(1)), Some(Verdict::Granted(_)));
            assert_eq!(is_granted, failing & 2 == 0);
            assert_eq!(round.poll_verdict(at(1)) == Some(Verdict::NoQuorum), failing & 2 != 0);
        }
    }
}

#[test]
fn late_grant_receives_the_token_if_needed() {
    let mut round = Round::new(3, true, at(0));
    round.handle_vote(0, yes(9));
    round.handle_vote(1, yes(5));
    assert_eq!(round.poll_propagate().unwrap().0, [1]);
    round.handle_propagated(1, false);
    assert_eq!(round.poll_verdict(at(1)), None, "the third may still know");
    round.handle_vote(2, yes(6));
    assert_eq!(round.poll_propagate(), Some((vec![2], range(9))));
    round.handle_propagated(2, true);
    assert!(matches!(round.poll_verdict(at(1)), Some(Verdict::Granted(_))));
}

#[test]
fn node_that_is_slow_to_learn_the_token_does_not_stop_the_others() {
    let mut round = Round::new(3, true, at(0));
    round.handle_vote(0, yes(9));
    round.handle_vote(1, yes(5));
    assert_eq!(round.poll_propagate().unwrap().0, [1]);
    round.handle_vote(2, yes(6));
    assert_eq!(round.poll_propagate(), Some((vec![2], range(9))));
    assert_eq!(round.poll_propagate(), None, "each gets it once");
    round.handle_propagated(2, true);
    assert!(matches!(round.poll_verdict(at(1)), Some(Verdict::Granted(_))));
}

#[test]
fn late_yes_with_a_shorter_lease_shortens_the_trust() {
    let lasting = |token, ms| {
        Vote::Yes(Grant { tokens: range(token), valid_for: Duration::from_millis(ms), is_plain: false })
    };
    let mut round = Round::new(3, true, at(0));
    round.handle_vote(0, lasting(9, 10_000));
    round.handle_vote(1, lasting(5, 10_000));
    assert_eq!(round.poll_propagate().unwrap().0, [1]);
    // The third grant comes after the quorum, whose second member then fails to learn the token: it takes its place.
    round.handle_vote(2, lasting(9, 2_000));
    round.handle_propagated(1, false);
    let Some(Verdict::Granted(grant)) = round.poll_verdict(at(1)) else { panic!() };
    assert_eq!((grant.tokens, grant.valid_for), (range(9), Duration::from_millis(2_000)));
    assert_eq!(round.poll_verdict(at(2_000)), Some(Verdict::TooLate));

    // A longer one does not prolong it, and neither does any that comes once the lease stands without it.
    let mut round = Round::new(3, true, at(0));
    round.handle_vote(0, lasting(9, 3_000));
    round.handle_vote(1, lasting(9, 3_000));
    round.handle_vote(2, lasting(9, 2_000));
    let Some(Verdict::Granted(grant)) = round.poll_verdict(at(1)) else { panic!() };
    assert_eq!(grant.valid_for, Duration::from_millis(3_000));
    let mut round = Round::new(3, true, at(0));
    round.handle_vote(0, lasting(9, 3_000));
    round.handle_vote(1, lasting(5, 3_000));
    round.handle_vote(2, lasting(9, 10_000));
    let Some(Verdict::Granted(grant)) = round.poll_verdict(at(1)) else { panic!() };
    assert_eq!(grant.valid_for, Duration::from_millis(3_000));
}

#[test]
fn timeout_decides_the_round() {
    for is_propagated in [false, true] {
        let mut round = Round::new(3, true, at(0));
        round.handle_vote(0, yes(9));
        round.handle_vote(1, yes(5));
        if is_propagated {
            assert!(round.poll_propagate().is_some());
        }
        assert_eq!(round.poll_verdict(at(1)), None);
        round.handle_timeout();
        assert_eq!(round.poll_verdict(at(1)), Some(Verdict::NoQuorum));
    }
}

#[test]
fn unfenced_round_propagates_no_token() {
    let mut round = Round::new(3, false, at(0));
    round.handle_vote(0, yes(9));
    round.handle_vote(1, yes(5));
    assert_eq!(round.poll_propagate(), None);
    assert!(matches!(round.poll_verdict(at(1)), Some(Verdict::Granted(_))));
}

#[test]
fn grant_older_than_its_validity_is_too_late() {
    let short =
        |ms| Vote::Yes(Grant { tokens: range(5), valid_for: Duration::from_millis(ms), is_plain: false });
    let mut round = Round::new(3, true, at(100));
    round.handle_vote(0, short(10_000));
    round.handle_vote(1, short(2_000));
    // 1 % of 2 s, and 2 ms.
    let last = at(100 + 2_000 - 20 - 2);
    assert!(matches!(round.poll_verdict(at(2_077)), Some(Verdict::Granted(_))));
    assert_eq!(round.poll_verdict(last), Some(Verdict::TooLate));
    let Some(Verdict::Granted(grant)) = round.poll_verdict(at(101)) else { panic!() };
    assert_eq!(grant.valid_for, Duration::from_millis(2_000), "the shortest of the quorum");
}

#[test]
fn time_to_quorum_counts_abstaining_nodes() {
    let abstains = |micros| Vote::Abstains(Duration::from_micros(micros));
    let within = |votes: [Vote; 3]| {
        let mut round = Round::new(3, true, at(0));
        for (node, vote) in votes.into_iter().enumerate() {
            round.handle_vote(node, vote);
        }
        assert_eq!(round.poll_verdict(at(1)), Some(Verdict::NoQuorum));
        round.time_to_quorum().map(|span| span.as_micros())
    };
    assert_eq!(within([abstains(7), abstains(9), abstains(8)]), Some(8));
    assert_eq!(within([abstains(7), yes(5), abstains(9)]), Some(7));
    assert_eq!(within([abstains(7), Vote::Failed, Vote::Failed]), None);
}

#[test]
fn pending_votes_may_complete_a_quorum() {
    let mut round = Round::new(5, true, at(0));
    round.handle_vote(0, Vote::Failed);
    for (node, micros) in [(1, 7), (2, 9)] {
        assert_eq!(round.poll_verdict(at(1)), None);
        round.handle_vote(node, Vote::Abstains(Duration::from_micros(micros)));
    }
    assert_eq!(round.poll_verdict(at(1)), Some(Verdict::NoQuorum));
    assert_eq!(round.time_to_quorum(), Some(Duration::from_micros(7)));
}

#[test]
fn abstention_is_measured_by_the_nodes_own_clock() {
    let at = |micros| StoreTime::from_micros(micros);
    let vote = Vote::of(&Answer { at: at(40), reply: Reply::Abstains(at(100)) });
    assert_eq!(vote, Vote::Abstains(Duration::from_micros(60)));
}

#[test]
fn every_combination_of_replies_has_its_tally() {
    let held = |ms| NodeReply::Held { valid_for: Duration::from_millis(ms) };
    let each = [held(9), held(7), NodeReply::NotHeld, NodeReply::Failed];
    for nodes in 1..=7 {
        let quorum = quorum_of(nodes);
        each_list(&each, nodes, &mut |said| {
            let count = |reply: NodeReply| said.iter().filter(|said| **said == reply).count();
            let (nine, seven, gone) = (count(held(9)), count(held(7)), count(NodeReply::NotHeld));
            let expected = if nine >= quorum {
                Tally::Held { valid_for: Duration::from_millis(9) }
            } else if nine + seven >= quorum {
                Tally::Held { valid_for: Duration::from_millis(7) }
            } else if nodes - gone < quorum {
                Tally::NotHeld
            } else {
                Tally::Unknown
            };
            for order in orders(nodes) {
                let mut replies = NodeReplies::new(nodes);
                let mut tally = None;
                for node in order {
                    replies.handle_reply(node, said[node]);
                    if let Some(Tally::NotHeld | Tally::Unknown) = tally {
                        assert_eq!(replies.poll_tally(), tally);
                    }
                    tally = replies.poll_tally();
                }
                assert_eq!(tally, Some(expected), "{said:?}");
            }
            let mut replies = NodeReplies::new(nodes);
            replies.handle_timeout();
            assert_eq!(replies.poll_tally(), Some(Tally::Unknown));
        });
    }
}

#[test]
fn each_reply_to_an_acquire_is_a_vote() {
    let grant = Grant { tokens: range(5), valid_for: LASTS, is_plain: true };
    let queued = Queued { is_head: true, repoll_at: StoreTime::NEVER };
    let votes = [
        (Reply::Granted(grant), Vote::Yes(grant)),
        (Reply::Busy, Vote::No),
        (Reply::Queued(queued), Vote::No),
        (Reply::QueueFull, Vote::No),
        (Reply::Cancelled, Vote::Failed),
        (Reply::Refused(Refusal::NotHeld), Vote::Failed),
    ];
    for (reply, vote) in votes {
        assert_eq!(Vote::of(&Answer { at: StoreTime::ZERO, reply }), vote);
    }
}

#[test]
fn votes_and_replies_are_listed_by_node() {
    let mut round = Round::new(3, true, at(0));
    round.handle_vote(2, Vote::No);
    assert_eq!(round.votes(), [None, None, Some(Vote::No)]);
    let mut replies = NodeReplies::new(3);
    replies.handle_reply(1, NodeReply::NotHeld);
    assert_eq!(replies.replies(), [None, Some(NodeReply::NotHeld), None]);
}

#[test]
fn timeout_keeps_the_votes_that_arrived() {
    let mut round = Round::new(5, true, at(0));
    for (node, vote) in [Vote::No, Vote::No, yes(5)].into_iter().enumerate() {
        round.handle_vote(node, vote);
    }
    assert_eq!(round.poll_verdict(at(1)), None);
    round.handle_timeout();
    assert_eq!(round.poll_verdict(at(1)), Some(Verdict::Split), "a quorum answered");
}

#[test]
fn highest_token_of_the_quorum_is_granted() {
    for is_fenced in [false, true] {
        for tokens in [[5, 9], [9, 5], [7, 7]] {
            let mut round = Round::new(3, is_fenced, at(0));
            for (node, token) in tokens.into_iter().enumerate() {
                round.handle_vote(node, yes(token));
            }
            for node in round.poll_propagate().map_or(Vec::new(), |(nodes, _)| nodes) {
                round.handle_propagated(node, true);
            }
            let Some(Verdict::Granted(grant)) = round.poll_verdict(at(1)) else { panic!("{round:?}") };
            assert_eq!(grant.tokens, range(*tokens.iter().max().unwrap()), "{tokens:?}");
        }
    }
}

#[test]
fn failed_and_missing_replies_make_no_quorum() {
    let each = [NodeReply::Held { valid_for: LASTS }, NodeReply::NotHeld, NodeReply::Failed];
    for nodes in 1..=5 {
        each_list(&each, nodes, &mut |given| {
            let mut replies = NodeReplies::new(nodes);
            let mut answered = 0;
            assert!(!replies.has_quorum());
            for (node, reply) in given.iter().enumerate() {
                replies.handle_reply(node, *reply);
                answered += usize::from(*reply != NodeReply::Failed);
                assert_eq!(replies.has_quorum(), 2 * answered > nodes, "{given:?} up to {node}");
            }
        });
    }
}
