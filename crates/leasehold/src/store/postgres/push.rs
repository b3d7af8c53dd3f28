//! Pushes as the text of notifications.

use std::time::Duration;

use leasehold_core::{
    Acquisition, ClientId, Grant, GrantProof, HeadHint, Push, PushKind, StoreTime, Token, TokenRange,
};

use super::params::micros;
use crate::digest::channel_name;

/// The channel of a client. Other roles see its name, and not the client's id.
pub(super) fn channel(client: ClientId) -> String {
    format!("leasehold_{}", channel_name(client))
}

/// `SEQUENCE AT KIND …`, with times in microseconds.
pub(super) fn encode(push: &Push) -> String {
    let (sequence, at) = (push.acquisition.sequence, push.at.as_micros());
    match push.kind {
        PushKind::Granted(Grant { tokens, valid_for, .. }, proof) => {
            let TokenRange { first, last } = tokens;
            let proof = u64::from_be_bytes(proof.bytes());
            format!("{sequence} {at} granted {first} {last} {} {proof}", micros(valid_for))
        }
        PushKind::Next(HeadHint { repoll_at }) => format!("{sequence} {at} next {}", repoll_at.as_micros()),
        PushKind::Revoked => format!("{sequence} {at} revoked"),
        PushKind::Contended => format!("{sequence} {at} contended"),
    }
}

/// A token that is further from the store's time than this is not believed before the store confirms it.
const FARTHEST_TOKEN: Duration = Duration::from_secs(24 * 3600);

fn is_far(token: Token, at: StoreTime) -> bool {
    let time = StoreTime::from_micros(token.get());
    time.since(at).max(at.since(time)) >= FARTHEST_TOKEN
}

/// `None` for a text that no store sends. Any role may have sent it. The proof of a grant whose token is a day or more from the
/// store's time is left out: the client then asks the store.
pub(super) fn decode(text: &str, client: ClientId) -> Option<Push> {
    let mut words = text.split(' ');
    let sequence = words.next()?.parse().ok()?;
    let at = StoreTime::from_micros(words.next()?.parse().ok()?);
    let kind = words.next()?;
    let mut number = || words.next()?.parse::<u64>().ok();
    let kind = match kind {
        "granted" => {
            let tokens = TokenRange { first: Token::new(number()?)?, last: Token::new(number()?)? };
            let valid_for = Duration::from_micros(number()?);
            let proof = GrantProof::new(number()?.to_be_bytes());
            let is_far = [tokens.first, tokens.last].into_iter().any(|token| is_far(token, at));
            let proof = if is_far { GrantProof::NONE } else { proof };
            PushKind::Granted(Grant { tokens, valid_for, is_plain: false }, proof)
        }
        "next" => PushKind::Next(HeadHint { repoll_at: StoreTime::from_micros(number()?) }),
        "revoked" => PushKind::Revoked,
        "contended" => PushKind::Contended,
        _ => return None,
    };
    Some(Push { acquisition: Acquisition { client, sequence }, at, kind })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn push_is_decoded_as_it_was_encoded() {
        let client = ClientId::new(7);
        let token = |number| Token::new(number).unwrap();
        for kind in [
            PushKind::Granted(
                Grant {
                    tokens: TokenRange { first: token(5), last: token(9) },
                    valid_for: Duration::from_secs(3),
                    is_plain: false,
                },
                GrantProof::new([255; 8]),
            ),
            PushKind::Next(HeadHint { repoll_at: StoreTime::from_micros(12) }),
            PushKind::Revoked,
            PushKind::Contended,
        ] {
            let acquisition = Acquisition { client, sequence: 3 };
            let push = Push { acquisition, at: StoreTime::from_micros(11), kind };
            assert_eq!(decode(&encode(&push), client), Some(push));
        }
        for text in ["", "1", "1 2", "1 2 other", "1 2 granted 0 1 1", "a 2 revoked"] {
            assert_eq!(decode(text, client), None, "{text}");
        }
    }
}
