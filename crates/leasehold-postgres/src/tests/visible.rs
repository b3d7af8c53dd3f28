//! What every role can see of a client, without a right to the tables.

use std::sync::Arc;

use leasehold_store::Inbox;
use leasehold_store::histories::client_id;
use leasehold_testkit::{Postgres as Server, until};

use super::super::Postgres;
use super::NoInbox;
use super::search_path::address;

#[tokio::test]
async fn sessions_locks_and_statistics_show_no_id_of_a_client_and_grow_with_none() {
    let server = Server::builder().setting("shared_preload_libraries=pg_stat_statements").start();
    server.run("CREATE EXTENSION pg_stat_statements");
    let inbox: Arc<dyn Inbox> = Arc::new(NoInbox);
    let url = address(&server.url());
    let mut counts = Vec::new();
    for number in 0..3 {
        let client = client_id(number + 1);
        let store = Postgres::open(&url, client, Arc::downgrade(&inbox)).await.unwrap();
        let (id, half) = (client.to_string(), client.get() >> 64);
        let shown = "SELECT string_agg(query, ' ') FROM pg_stat_statements UNION ALL SELECT string_agg(query, ' ') FROM \
             pg_stat_activity";
        let shown = server.run(shown);
        assert!(shown.contains("leasehold.channel") && !shown.contains(&id), "{shown}");
        let locks = "SELECT string_agg(((classid::int8 << 32) | objid::int8)::text, ' ') FROM pg_locks WHERE locktype = 'advisory'";
        let locks = server.run(locks);
        let half = i64::from_be_bytes(u64::try_from(half).unwrap().to_be_bytes());
        assert!(!locks.is_empty() && !locks.contains(&half.to_string()), "{locks}");
        drop(store);
        until(async || server.run("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == "0").await;
        counts.push(server.run(
            "SELECT count(*) FROM pg_stat_statements WHERE query NOT LIKE '%pg_stat%' AND query NOT LIKE '%pg_locks%'",
        ));
    }
    // The first client has also created the tables.
    assert_eq!(counts[1], counts[2], "each client adds its own");
}
