//! The golden vectors are what the code sends and reads.

#[path = "../vectors/generate.rs"]
mod generate;

use std::path::Path;

#[test]
fn vectors_are_those_of_the_code() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors");
    for (name, content) in generate::files() {
        let stored = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        let different = stored.lines().zip(content.lines()).find(|(stored, content)| stored != content);
        assert!(
            stored == content,
            "{name} is stale, or clients in other languages no longer speak this protocol: {different:?}\n\
             cargo run -p leasehold-redis-protocol --example vectors -- crates/leasehold-redis-protocol/vectors"
        );
    }
    assert_eq!(generate::script_texts().len(), 45);
}
