//! CPU time of the server for many idle leases.

use std::time::Duration;

use futures_util::future::join_all;
use leasehold::{Client, Guard};
use leasehold_testkit::Server;

use crate::report::Report;
use crate::runtime;
use crate::server_cost::server_seconds;

const LEASES: u32 = 100_000;
const TTL: Duration = Duration::from_secs(30);

/// `renewals`.
///
/// # Panics
///
/// If a server does not start or sends an unexpected reply.
pub fn run(report: &mut Report, span: Duration) {
    let server = Server::on_port();
    runtime().block_on(async {
        let client = Client::connect(&server.url()).await.expect("connects");
        let mut guards: Vec<Guard> = Vec::new();
        while guards.len() < LEASES as usize {
            let first = guards.len();
            let some = (first..first + 1_000).map(|number| client.mutex(format!("bench:{number}")).ttl(TTL));
            let some: Vec<_> = some.collect();
            for guard in join_all(some.iter().map(leasehold::Mutex::lock)).await {
                guards.push(guard.expect("it is free"));
            }
        }
        // The first renewals are due at a third of the ttl.
        let before = server_seconds(server.pid());
        tokio::time::sleep(span).await;
        let used = server_seconds(server.pid()) - before;
        let lost = guards.iter().filter(|guard| !guard.is_held()).count();
        report.title(&format!("{LEASES} held leases with a ttl of {TTL:?} in one client, for {span:?}"));
        report.at_most("percent of a core that the server spends", used / span.as_secs_f64() * 100.0, 10.0);
        report.at_most("leases lost", f64::from(u32::try_from(lost).unwrap_or(u32::MAX)), 0.0);
    });
}
