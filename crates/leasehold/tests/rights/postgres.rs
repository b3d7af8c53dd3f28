//! Roles of PostgreSQL without one of the documented grants.

use std::sync::Arc;

use leasehold::Client;
use leasehold_testkit::{Postgres, unless_paused};

use crate::commands::{Faults, PAUSE, Trial};
use crate::{page, try_all};

/// How many grants are tried at a time. Each has two clients, with a few connections.
const AT_A_TIME: usize = 7;

const TABLES: [&str; 6] = ["layout", "resource", "lease", "waiter", "tombstone", "mail"];

/// Each right of the documented statements.
fn rights() -> Vec<String> {
    let of_tables = TABLES.iter().flat_map(|table| {
        ["SELECT", "INSERT", "UPDATE", "DELETE"].map(|right| format!("{right} ON leasehold.{table}"))
    });
    of_tables.chain(["USAGE ON SCHEMA leasehold".to_owned()]).collect()
}

fn trial(server: &Arc<Postgres>, number: usize, right: String) -> Trial {
    let role = format!("app_{number:02}");
    server.run(&format!(
        "CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA leasehold TO {role};
        GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA leasehold TO {role}"
    ));
    let run = |statement: String| {
        let server = Arc::clone(server);
        Box::new(move || drop(server.run(&statement)))
    };
    let grant = format!("GRANT {right} TO {role}");
    Trial {
        url: server.url().replace("postgres@", &format!("{role}@")),
        name: role.clone(),
        remedy: grant.clone(),
        take_away: run(format!("REVOKE {right} FROM {role}")),
        give_back: run(grant),
        check: Box::new(|| {}),
        has_replicas: false,
        faults: Faults::default(),
        right,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_that_a_role_lacks_is_named_and_lets_no_second_holder_in() {
    unless_paused(PAUSE, async || {
        let server = Arc::new(Postgres::on_port());
        let healthy = Client::connect(&server.url()).await.unwrap();
        healthy.mutex("first").lock().await.unwrap().release().await.unwrap();
        let trials = rights().into_iter().enumerate().map(|(number, right)| trial(&server, number, right));
        let rows = try_all(&healthy, trials.collect(), AT_A_TIME).await;
        page::compare("postgres", &[("PostgreSQL", rows)]);
    })
    .await;
}
