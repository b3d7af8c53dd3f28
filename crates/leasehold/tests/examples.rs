//! Every example runs.

use std::path::Path;

macro_rules! examples {
    ($($name:ident: $path:literal)*) => {
        const EXAMPLES: &[&str] = &[$(stringify!($name)),*];
        $(
            #[path = $path]
            mod $name;

            #[test]
            fn $name() {
                if let Err(error) = $name::main() {
                    panic!("{error}");
                }
            }
        )*
    };
}

examples! {
    blocking: "../examples/blocking.rs"
    election: "../examples/election.rs"
    fencing_file: "../examples/fencing_file.rs"
    fencing_object: "../examples/fencing_object.rs"
    fencing_sql: "../examples/fencing_sql.rs"
    latch_and_barrier: "../examples/latch_and_barrier.rs"
    mutex: "../examples/mutex.rs"
    once_per: "../examples/once_per.rs"
    read_write: "../examples/read_write.rs"
    reentrant: "../examples/reentrant.rs"
    semaphore: "../examples/semaphore.rs"
    several: "../examples/several.rs"
    testing: "../examples/testing.rs"
}

#[test]
fn every_example_is_run() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> =
        files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    found.sort();
    assert_eq!(found, EXAMPLES);
}
