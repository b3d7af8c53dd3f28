//! One leader, whose address every client can look up.

use leasehold::{Client, Error};

pub(crate) fn main() -> Result<(), Error> {
    pollster::block_on(async {
        let client = Client::connect("memory:").await?;
        let mut observer = client.election("scheduler").observe();
        assert!(observer.next().await?.is_none());

        for address in ["http://10.0.0.7:8080", "http://10.0.0.8:8080"] {
            let leadership = client.election("scheduler").label(address).campaign().await?;
            if let Some(leader) = observer.next().await? {
                println!("{} leads with token {}", leader.metadata.label.unwrap_or_default(), leader.token);
            }
            leadership.release().await?; // resigns
        }
        client.close().await
    })
}
