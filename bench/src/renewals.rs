//! CPU time of the server for many idle leases.

use std::time::Duration;

use futures_util::future::join_all;
use leasehold::{Client, Guard};

use crate::compare::catalog::{LEASEHOLD, MUTEXES};
use crate::compare::leases;
use crate::program::Program;
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
pub fn run(report: &mut Report, program: Program, span: Duration) {
    let server = program.start();
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

/// Number of leases in the comparison with Redisson.
const COMPARED: u32 = 10_000;

/// `renewals-redisson`: the same leases held by leasehold and by Redisson, at the same time, on a server each. Returns false if one
/// of the two could not take part.
pub fn against_redisson(report: &mut Report, program: Program, span: Duration) -> bool {
    let rows = [LEASEHOLD, MUTEXES[0]];
    report.title(&format!("{COMPARED} held leases with a ttl of {TTL:?}, for {span:?}"));
    let found = leases::together(&rows, COMPARED, TTL, span, program);
    let percent = found.iter().map(|row| row.median("server_percent")).collect::<Option<Vec<f64>>>();
    let Some(percent) = percent else {
        for (row, why) in found.iter().filter_map(|row| Some((&row.row, row.missing.as_ref()?))) {
            report.missing(row, why);
        }
        return false;
    };
    for (row, percent) in rows.iter().zip(&percent) {
        report.figure(row.name, *percent, "% of a core of the server");
    }
    report.at_most("server CPU against Redisson", percent[0] / percent[1], 1.0);
    true
}
