//! The same pairs as `compare.py`, by the blocking API of the library: what Python adds is the difference.
//!
//! Usage: blocking URL. Each line of the standard input has a number of pairs, and is answered by an empty line when they are done.

use std::error::Error;
use std::io::Write as _;

fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).ok_or("usage: blocking URL")?;
    let client = leasehold::blocking::Client::connect(&url)?;
    for line in std::io::stdin().lines() {
        for _ in 0..line?.parse()? {
            client.mutex("blocking").lock()?.release()?;
        }
        println!();
        std::io::stdout().flush()?;
    }
    Ok(client.close()?)
}
