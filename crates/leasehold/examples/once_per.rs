//! The lottery at noon: all hosts try to start it, and one does.

use std::time::Duration;

use leasehold::Error;
use leasehold::blocking::Client;

const HOUR: Duration = Duration::from_secs(3_600);

pub(crate) fn main() -> Result<(), Error> {
    // Three clients stand for three processes that share a store.
    let connect = |_| Client::connect("memory:example-lottery");
    let hosts: Vec<Client> = (1..=3).map(connect).collect::<Result<_, _>>()?;
    let mut drawn = 0;
    for (number, host) in hosts.iter().enumerate() {
        if let Some(guard) = host.once_per("lottery", HOUR).start()? {
            println!("host {number} draws with token {}", guard.token());
            drawn += 1;
            guard.release()?;
        }
    }
    assert_eq!(drawn, 1);
    Ok(())
}
