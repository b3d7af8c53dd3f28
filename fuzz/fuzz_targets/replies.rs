//! Replies of the scripts, for each command.

#![no_main]

use std::time::Duration;

use leasehold_core::{Acquire, Acquisition, ClientId, Command, Release, Renew, Reply};
use leasehold_fuzz::AnyValue;
use leasehold_redis_protocol::{decode_answer, decode_renewals};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, AnyValue)| {
    let (kind, AnyValue(value)) = input;
    let acquisition = Acquisition { client: ClientId::new(7), sequence: 1 };
    let ttl = Duration::from_secs(10);
    let renew = |reserve| Command::Renew(Renew { acquisition, ttl, reserve });
    let command = match kind % 6 {
        0 => Command::from(Acquire::exclusive(acquisition, ttl)),
        1 => renew(0),
        2 => renew(4),
        3 => Command::Release(Release::now(acquisition)),
        4 => Command::Inspect,
        _ => Command::ForceRelease,
    };
    if let Ok(answer) = decode_answer(&command, &value)
        && let Reply::Granted(grant) = &answer.reply
    {
        assert!(grant.tokens.first <= grant.tokens.last, "{answer:?}");
    }
    let renewals = [renew(0), renew(4)];
    if let Ok(answers) = decode_renewals(renewals.iter(), &value) {
        assert_eq!(answers.len(), renewals.len());
    }
});
