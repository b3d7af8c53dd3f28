//! Without async: every call blocks its thread.

use std::time::Duration;

use leasehold::Error;
use leasehold::blocking::Client;

pub(crate) fn main() -> Result<(), Error> {
    let client = Client::connect("memory:")?;
    let guard = client.mutex("orders:42").lock()?;
    for step in 1..=3 {
        if !guard.is_held() {
            println!("the lease was lost before step {step}");
            break;
        }
        println!("step {step}, {:?} left", guard.remaining());
    }
    assert!(guard.lost_within(Duration::from_millis(1)).is_none());
    guard.release()?;
    client.close()
}
