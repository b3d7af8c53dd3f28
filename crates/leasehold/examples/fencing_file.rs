//! A holder that was stopped for longer than its lease, and a file that refuses its write.

use std::time::Duration;

use leasehold::blocking::Client;
use leasehold::fence::FencedFile;

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let report = FencedFile::new(folder.path().join("report"));
    let client = Client::connect("memory:")?;

    // It acquires the lock, and is stopped before it writes. Its lease expires.
    let stopped = client.mutex("report").ttl(Duration::from_millis(100)).auto_renew(false).lock()?;
    let _lost = stopped.lost_within(Duration::from_secs(10));
    let next = client.mutex("report").lock()?;
    report.write(next.token(), b"by the new holder")?;

    // It continues, and does not know that it was stopped.
    let error = report.write(stopped.token(), b"by the old holder").unwrap_err();
    assert!(error.is_stale());
    println!("{error}");
    assert_eq!(std::fs::read(report.path())?, b"by the new holder");
    Ok(())
}
