//! Another role's operators, functions, types and tables, in every place to which the path of a session leads.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Acquire, Acquisition, Command, Kind, Name, Renew, Resource, Token};
use leasehold_store::histories::{CLIENTS, Step, client_id, steps};
use leasehold_store::{Call, Diagnose as _, Inbox, Store};
use leasehold_testkit::{PgBouncer, Postgres as Server};
use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::TestRunner;
use tokio_postgres::{Config, NoTls};

use super::super::conn::Frame;
use super::super::params::{Param, Request};
use super::super::pinned::Pinned;
use super::super::query::Query;
use super::super::{Dialer, Postgres, Sql, listener};
use super::{NoInbox, any_server};
use crate::url::PostgresUrl;
use leasehold::fence::postgres::{check_token, create};
use leasehold::postgres::TransactionLock;

pub(super) fn address(url: &str) -> PostgresUrl {
    PostgresUrl::of(url)
}

/// Repeats a command until the server answers within the time of a command: all of them may be repeated.
async fn answered(store: &Postgres, resource: &Arc<Resource>, command: &Command) {
    let mut error = None;
    for _ in 0..10 {
        match store.call(Call::new(resource.clone(), command.clone()), 0).await {
            Ok(_) => return,
            Err(failed) => error = Some(failed),
        }
    }
    panic!("{command:?}: {error:?}");
}

/// Sends every statement that the store has.
async fn use_the_store(url: &str, round: &str) {
    let inbox: Arc<dyn Inbox> = Arc::new(NoInbox);
    let url = address(url);
    let mut stores = Vec::new();
    // The others are absent.
    for client in 0..CLIENTS / 2 {
        let opened = Postgres::open(&url, client_id(client), Arc::downgrade(&inbox)).await;
        stores.push(opened.unwrap_or_else(|error| panic!("{round}: {error}")));
    }
    let name = |number: usize| Name::new(&format!("{round}-{number}")).unwrap();
    let mut runner = TestRunner::deterministic();
    for number in 0..20 {
        let (kind, capacity) = if number % 2 == 0 { (Kind::Mutex, 1) } else { (Kind::Semaphore, 4) };
        let resource = Arc::new(Resource { kind, name: name(number) });
        for step in steps(capacity).new_tree(&mut runner).unwrap().current() {
            match step {
                Step::Do(command) => {
                    let client = usize::from(matches!(command, Command::Inspect));
                    answered(&stores[client], &resource, &command).await;
                }
                Step::Sweep => stores[0].executor.sweep_resource(&resource).await.unwrap(),
                _ => {}
            }
        }
    }
    let acquisition = |sequence| Acquisition { client: client_id(0), sequence };
    let set: Vec<_> = (1_000..1_002)
        .map(|number| {
            let resource = Arc::new(Resource { kind: Kind::Mutex, name: name(number) });
            (resource, Arc::new(Acquire::exclusive(acquisition(number as u64), Duration::from_secs(10))))
        })
        .collect();
    let answers = stores[0].acquire_all(&set).unwrap().await;
    answers.into_iter().for_each(|answer| drop(answer.unwrap()));
    let renewals = set.iter().map(|(resource, acquire)| {
        let renew = Renew::to(acquire.acquisition, Duration::from_secs(10));
        Call::new(resource.clone(), renew)
    });
    let answers = stores[0].call_batch(renewals.collect(), 0).await;
    answers.into_iter().for_each(|answer| drop(answer.unwrap()));
    stores[0].list().await.unwrap();
    stores[0].executor.sweep().await.unwrap();
    stores[0].executor.read_pushes(false).await.unwrap();
    stores[0].diagnose().await.unwrap();
    // What it sends once entries have expired.
    let sql = stores[0].executor.sql();
    let lent = stores[0].executor.pool.take().await.unwrap();
    let deadlines: Vec<Param> = vec!["".into(), "".into(), 1_i64.into()];
    let late = [
        Request::new(sql.of(&Query::Deadlines(1)), deadlines),
        Request::new(&sql.remove_tombstones, vec![1_i64.into(), 1_i64.into()]),
    ];
    lent.conn().pipeline(Frame::Single, &late).await.unwrap();
    lent.give_back().unwrap();
    if !stores[0].executor.session.mailbox.polls() {
        let address =
            listener::Address::new(Dialer::new(&url).unwrap(), &url, client_id(0), false, any_server());
        let listening = address.listen().await.unwrap();
        assert!(listening.is_kept(client_id(0)).await.unwrap());
    }
}

/// Uses what a program has in its own transactions.
async fn use_transactions(config: &Config) {
    let (mut database, connection) = config.connect(NoTls).await.unwrap();
    tokio::spawn(connection);
    create(&database).await.unwrap();
    let transaction = database.transaction().await.unwrap();
    let lock = TransactionLock::new("a").unwrap();
    assert!(lock.try_lock(&transaction).await.unwrap());
    lock.lock(&transaction).await.unwrap();
    check_token(&transaction, "a", Token::new(9).unwrap()).await.unwrap();
    assert!(check_token(&transaction, "a", Token::new(8).unwrap()).await.unwrap_err().is_stale());
}

/// All words and operators of a text.
fn names(text: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let split = |belongs: fn(char) -> bool| {
        let parts = text.split(move |next| !belongs(next)).filter(|part| !part.is_empty());
        parts.map(str::to_lowercase).collect::<BTreeSet<_>>()
    };
    (
        split(|next| next.is_ascii_alphanumeric() || next == '_'),
        split(|next| "+-*/<>=~!@#%^&|".contains(next)),
    )
}

/// Makes a twin in `public` of everything with one of these names that the server knows: with the same arguments, and with all
/// others of the usual types, which fit better than a conversion.
fn plant_twins(server: &Server, words: &BTreeSet<String>, operators: &BTreeSet<String>) {
    server.run("CREATE TABLE public.called (name text)");
    let called: Vec<_> = words.iter().chain(operators).map(|name| format!("('{name}')")).collect();
    for some in called.chunks(500) {
        server.run(&format!("INSERT INTO public.called VALUES {}", some.join(", ")));
    }
    server.run(include_str!("twins.sql"));
}

const STRANGER: &str = "a stranger's code ran";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_name_in_any_statement_leads_to_what_another_role_has_created() {
    let clean = Server::builder().setting("log_statement=all").start();
    use_the_store(&clean.url(), "log").await;
    use_transactions(&clean.url().parse().unwrap()).await;
    let log = clean.log();
    let flat = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let flat_log = flat(&log);
    let all = format!("{:?}", Sql::new("leasehold", None));
    let all = all
        .split("Pinned(\"")
        .skip(1)
        .map(|rest| flat(&rest.split("\")").next().unwrap().replace("\\n", " ")));
    let unsent: Vec<_> = all.filter(|statement| !flat_log.contains(statement)).collect();
    assert!(unsent.is_empty(), "the store was not made to send: {unsent:#?}");
    // The values of parameters are no part of a statement.
    let statements: Vec<_> = log.lines().filter(|line| !line.contains("DETAIL:")).collect();
    let (words, operators) = names(&statements.join("\n"));
    drop(clean);

    let server = Server::on_port();
    server.run(
        "CREATE ROLE usual LOGIN; CREATE ROLE odd LOGIN; GRANT CREATE ON DATABASE postgres TO usual, odd;
        ALTER ROLE odd SET search_path = public, pg_catalog",
    );
    plant_twins(&server, &words, &operators);
    for role in ["usual", "odd"] {
        let url =
            format!("{}?schema=locks_of_{role}", server.url().replace("postgres@", &format!("{role}@")));
        use_the_store(&url, role).await;
        use_transactions(&server.url().replace("postgres@", &format!("{role}@")).parse().unwrap()).await;
        // A database administrator looks at them.
        for view in ["holders", "waiters"] {
            server.run(&format!("SELECT * FROM locks_of_{role}.{view}"));
        }
        if role == "usual" {
            server.run("DROP SCHEMA leasehold CASCADE");
        }
    }
    let pooler = PgBouncer::start(&server);
    server.run("ALTER ROLE postgres SET search_path = public, pg_catalog");
    use_the_store(&format!("{}?schema=locks_pooled", pooler.url()), "pooled").await;
    let log = server.log();
    assert!(!log.contains(STRANGER), "{log}");

    server.run("SELECT * FROM locks_pooled.holders; SELECT * FROM locks_pooled.waiters");

    // The check sees statements that are not pinned.
    let usual = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)";
    let odd = [
        "SELECT pg_backend_pid()",
        "SELECT '1'::int8",
        "SELECT 1 WHERE 'a' = 'b'::text",
        "SELECT relname FROM pg_class",
    ];
    for (role, statement) in std::iter::once(("usual", usual)).chain(odd.map(|statement| ("odd", statement)))
    {
        let dialer = Dialer::new(&address(&server.url().replace("postgres@", &format!("{role}@")))).unwrap();
        let conn = dialer.connect(None).await.unwrap();
        let failed = conn.row(&Pinned::as_is(statement)).await.expect_err(statement);
        let message = failed.as_db_error().map(|error| error.message().to_owned()).unwrap_or_default();
        assert!(message.contains(STRANGER), "{statement}: {message}");
        conn.value(&Pinned::new(usual)).await.unwrap();
    }
}
