//! Writes the golden vectors, and with a second argument the texts of the scripts:
//!
//! ```sh
//! cargo run -p leasehold-redis-protocol --example vectors -- crates/leasehold-redis-protocol/vectors
//! cargo run -p leasehold-redis-protocol --example vectors -- FOLDER SCRIPTS_FOLDER
//! ```

#[path = "../vectors/generate.rs"]
mod generate;

use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let mut folders = std::env::args_os().skip(1).map(PathBuf::from);
    let Some(folder) = folders.next() else {
        eprintln!("usage: vectors FOLDER [SCRIPTS_FOLDER]");
        std::process::exit(2);
    };
    std::fs::create_dir_all(&folder)?;
    for (name, content) in generate::files() {
        std::fs::write(folder.join(name), content)?;
    }
    if let Some(folder) = folders.next() {
        std::fs::create_dir_all(&folder)?;
        for (name, text) in generate::script_texts() {
            std::fs::write(folder.join(name), text)?;
        }
    }
    Ok(())
}
