//! Addresses of stores.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| leasehold::fuzzing::url(text));
