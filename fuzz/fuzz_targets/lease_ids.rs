//! Ids of detached leases.

#![no_main]

use leasehold::LeaseId;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match text.parse::<LeaseId>() {
        Ok(id) => {
            assert_eq!(id.to_string(), text);
            let secret = text.rsplit('.').next().unwrap_or_default();
            assert!(!format!("{id:?}").contains(secret) || id.name().contains(secret), "the secret is shown");
        }
        // The text may be a secret with a typing error, so it is not repeated: the message is always the same.
        Err(error) => assert_eq!(error.to_string(), "".parse::<LeaseId>().unwrap_err().to_string()),
    }
});
