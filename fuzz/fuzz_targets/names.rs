//! Names of locks, and the keys that contain them.

#![no_main]

use leasehold_core::{Kind, Name, Resource};
use leasehold_redis_protocol::{resource_key, resource_of, slot_of};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some(resource) = resource_of(bytes) {
        let _ = slot_of(&resource);
        assert_eq!(resource_of(resource_key(&resource).as_bytes()), Some(resource));
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let _ = Kind::parse(text);
    if let Ok(name) = Name::new(text) {
        assert_eq!(name.as_str(), text);
        let resource = Resource { kind: Kind::Mutex, name };
        assert_eq!(resource_of(resource_key(&resource).as_bytes()), Some(resource));
    }
});
