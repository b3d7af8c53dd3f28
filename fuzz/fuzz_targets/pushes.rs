//! Messages of an inbox.

#![no_main]

use leasehold_core::{ClientId, PushKind};
use leasehold_redis_protocol::{decode_push, slot_of_inbox};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|message: &[u8]| {
    if let Ok(push) = decode_push(ClientId::new(7), message)
        && let PushKind::Granted(grant, _) = push.kind
    {
        assert!(grant.tokens.first <= grant.tokens.last, "{push:?}");
    }
    let _ = slot_of_inbox(message);
});
