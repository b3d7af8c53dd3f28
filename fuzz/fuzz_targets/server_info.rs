//! What servers say about themselves: `CLUSTER SLOTS` and `CLIENT INFO`.

#![no_main]

use leasehold_fuzz::AnyValue;
use libfuzzer_sys::fuzz_target;
use redis::Value;

fuzz_target!(|input: (AnyValue, &str, &str)| {
    let (AnyValue(reply), now, earlier) = input;
    leasehold::fuzzing::cluster_slots(&reply);
    let text = |text: &str| Value::BulkString(text.into());
    leasehold::fuzzing::connection_info(&text(now), &text(earlier));
});
