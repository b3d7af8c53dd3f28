//! Runs commands in the model and in the tables, and compares the answers and pushes.

use std::cell::Cell;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use leasehold_core::model::{CommandContext, Table, apply, apply_all, sweep};
use leasehold_core::{
    Acquire, Acquisition, Answer, ClientId, Command, Now, Push, Renew, Reply, Resource, StoreTime,
};
use leasehold_store::histories::{CLIENTS, Step, client_id, with_tokens};
use leasehold_store::{Call, CallResult, StoreError};
use leasehold_testkit::{Postgres as Server, Session as ServerSession, wait_until};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_postgres::AsyncMessage;

use super::super::conn::{Conn, Frame, MessageHandler, settings};
use super::super::dialer::Dialer;
use super::super::exec::Executor;
use super::super::limits::MAX_TOGETHER;
use super::super::mailbox::Mailbox;
use super::super::params::Request;
use super::super::pinned::Pinned;
use super::super::pool::Pool;
use super::super::query::Query;
use super::super::sql::Sql;
use super::super::transaction::Session;
use super::super::{push, schema};
use super::{NoInbox, any_server};
use crate::url::PostgresUrl;

const SCHEMA: &str = "leasehold";

/// The client that sends the commands. Those of the histories are other ones.
pub(super) const SESSION: ClientId = ClientId::new(u128::MAX);

/// How long the first connection may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(60);

/// The key of the lock that a client has while it listens, as the server computes it.
fn presence_key(client: ClientId) -> String {
    format!("('x' || encode(substring(sha256('\\x{client}'::bytea), 1, 8), 'hex'))::bit(64)::int8")
}

/// A server, the store's commands on it, and a session that listens for all clients.
pub(super) struct Harness {
    runtime: Runtime,
    executor: Executor,
    conn: Conn,
    messages: UnboundedReceiver<AsyncMessage>,
    now: StoreTime,
    server: Server,
    /// A command ended by a time limit: the processor is busy with something else, so the history says nothing.
    was_too_slow: Cell<bool>,
}

impl Harness {
    pub(super) fn new() -> Self {
        let server = Server::on_port();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let now = StoreTime::from_micros(1_700_000_000_000_000);
        let (executor, conn, messages) = runtime.block_on(async {
            let url = PostgresUrl::of(&server.url());
            let (send, messages) = unbounded_channel();
            let on_message: MessageHandler = Arc::new(move |message| drop(send.send(message)));
            let dialer = Dialer::new(&url).unwrap();
            let began = Instant::now();
            let conn = loop {
                match dialer.connect(Some(on_message.clone())).await {
                    Ok(conn) => break conn,
                    // A busy machine needs longer than the store allows.
                    Err(error) => assert!(began.elapsed() < CONNECT_LIMIT, "{error:?}"),
                }
            };
            schema::prepare(&conn, schema::Home::of(&url)).await.unwrap();
            let clock = format!("CREATE TABLE {SCHEMA}.clock AS SELECT {}::int8 AS now", now.as_micros());
            conn.run(&Pinned::as_is(&clock)).await.unwrap();
            for client in 0..CLIENTS {
                let (channel, key) = (push::channel(client_id(client)), presence_key(client_id(client)));
                let sql = format!("LISTEN {channel}; SELECT pg_advisory_lock_shared({key})");
                conn.run(&Pinned::as_is(&sql)).await.unwrap();
            }
            let session = Session {
                sql: Sql::new(SCHEMA, Some("(SELECT now FROM leasehold.clock)")),
                client: SESSION,
                inbox: Weak::<NoInbox>::new(),
                mailbox: Mailbox::new(false),
                may_reserve: true,
            };
            let pool = Pool::new(Dialer::new(&url).unwrap(), settings("on"), false, 4, any_server());
            (Executor { session, pool, contended: Mutex::default() }, conn, messages)
        });
        Self { runtime, executor, conn, messages, now, server, was_too_slow: Cell::new(false) }
    }

    /// Whether a time limit ended a command since the last call.
    pub(super) fn was_too_slow(&self) -> bool {
        self.was_too_slow.take()
    }

    /// The answer to a command. An error ends the history.
    fn answered<T>(&self, answer: Result<T, StoreError>) -> T {
        answer.unwrap_or_else(|error| {
            let is_slow = ["answer within", "timeout"].iter().any(|limit| error.message.contains(limit));
            self.was_too_slow.set(is_slow);
            panic!("{error:?}")
        })
    }

    fn sql(&self, sql: &str) {
        self.runtime.block_on(self.conn.run(&Pinned::as_is(sql))).unwrap();
    }

    /// A defect that the comparison must find.
    pub(super) fn forget_waiters(&mut self) {
        self.sql(
            "CREATE FUNCTION forget() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
            CREATE TRIGGER forgets BEFORE INSERT ON leasehold.waiter FOR EACH ROW EXECUTE FUNCTION forget()",
        );
    }

    /// The plan of a statement, as a session of the store keeps it for all parameters.
    pub(super) fn plan(&self, statement: &str) -> String {
        let count = (1..).take_while(|number| statement.contains(&format!("${number}"))).count();
        let nulls = vec!["NULL"; count].join(", ");
        let parameters = if count == 0 { String::new() } else { format!("({nulls})") };
        let explain = format!(
            "SET plan_cache_mode = force_generic_plan; PREPARE command AS {statement};
            EXPLAIN (FORMAT JSON) EXECUTE command{parameters}; DEALLOCATE command"
        );
        self.runtime.block_on(async {
            let lent = self.executor.pool.take().await.unwrap();
            lent.conn().value(&Pinned::as_is(&explain)).await.unwrap()
        })
    }

    /// Whether two transactions at the same time find the client present.
    pub(super) fn look_twice(&self, client: ClientId) -> [bool; 2] {
        let sql = self.executor.sql().of(&Query::Present(client));
        self.runtime.block_on(async {
            let look = async |conn: &Conn| {
                conn.run(&Pinned::as_is("BEGIN")).await.unwrap();
                let rows = conn.pipeline(Frame::Within, &[Request::new(sql, vec![client.into()])]).await;
                rows.unwrap()[0][0].get::<_, bool>(0)
            };
            let (one, two) =
                (self.executor.pool.take().await.unwrap(), self.executor.pool.take().await.unwrap());
            [look(one.conn()).await, look(two.conn()).await]
        })
    }

    fn set_time(&mut self, now: StoreTime) {
        self.now = now;
        self.sql(&format!("UPDATE leasehold.clock SET now = {}", now.as_micros()));
    }

    fn set_present(&self, client: ClientId, is_present: bool) {
        let key = presence_key(client);
        let unlock = format!("SELECT pg_advisory_unlock_shared({key})");
        let lock = format!("; SELECT pg_advisory_lock_shared({key})");
        self.sql(&format!("{unlock}{}", if is_present { &lock } else { "" }));
    }

    /// The pushes of the transactions so far.
    fn pushes(&mut self) -> Vec<Push> {
        // The server sends the notifications that it has before its next answer.
        self.sql("SELECT 1");
        let mut pushes = Vec::new();
        while let Ok(message) = self.messages.try_recv() {
            if let AsyncMessage::Notification(notification) = message {
                let of = |client: &ClientId| push::channel(*client) == notification.channel();
                let client = (0..CLIENTS).map(client_id).find(of).unwrap();
                pushes.push(push::decode(notification.payload(), client).unwrap());
            }
        }
        pushes
    }
}

/// The model's pushes as one transaction notifies of them: with the recipient as the client of the attempt's id, and once of what is the same.
fn as_notified(pushes: Vec<Push>) -> Vec<Push> {
    let mut notified = Vec::new();
    for push in pushes {
        let push = Push { acquisition: Acquisition { client: push.inbox, ..push.acquisition }, ..push };
        if !notified.contains(&push) {
            notified.push(push);
        }
    }
    notified
}

/// Runs the same commands in the model and in the tables.
pub(super) struct Comparison<'h> {
    harness: &'h mut Harness,
    resources: Vec<(Resource, Table)>,
    absent: Vec<ClientId>,
}

impl<'h> Comparison<'h> {
    pub(super) fn new(harness: &'h mut Harness, resources: &[Resource]) -> Self {
        for client in 0..CLIENTS {
            harness.set_present(client_id(client), true);
        }
        // Later than the last history.
        let now =
            harness.now.max(StoreTime::from_micros(1_700_000_000_000_000)) + Duration::from_secs(20_000);
        harness.set_time(now);
        harness.pushes();
        let resources = resources.iter().map(|resource| (resource.clone(), Table::new())).collect();
        Self { harness, resources, absent: Vec::new() }
    }

    fn now(&self, tables: &[&Table]) -> Now {
        let time = self.harness.now;
        let last = |table: &&Table| table.header().map_or(0, |header| header.last_token);
        let may_reserve = tables.iter().all(|table| last(table) <= time.as_micros());
        Now { may_reserve, ..Now::same(time) }
    }

    pub(super) fn run(&mut self, at: usize, command: &Command) -> Reply {
        let command = &with_tokens(command, &mut self.resources[at].1);
        let now = self.now(&[&self.resources[at].1]);
        let (expected, theirs) = self.model(at, command, now);
        let resource = self.resources[at].0.clone();
        let harness = &self.harness;
        let found = harness.answered(harness.runtime.block_on(harness.executor.call(&resource, command)));
        assert_eq!(found, expected, "after {command:?}");
        assert_eq!(self.harness.pushes(), as_notified(theirs), "pushed after {command:?}");
        found.reply
    }

    /// As `run`, with so many pushes to a client that looks for them.
    pub(super) fn run_posting(&mut self, at: usize, command: &Command, posted: usize) {
        let now = self.now(&[&self.resources[at].1]);
        let (expected, theirs) = self.model(at, command, now);
        let resource = self.resources[at].0.clone();
        let harness = &self.harness;
        let found = harness.answered(harness.runtime.block_on(harness.executor.call(&resource, command)));
        assert_eq!((found, theirs.len()), (expected, posted), "after {command:?}");
        assert!(self.harness.pushes().is_empty(), "notified after {command:?}");
    }

    fn model(&mut self, at: usize, command: &Command, now: Now) -> (Answer, Vec<Push>) {
        let mut pushes = Vec::new();
        (self.model_after(at, command, now, &mut pushes), pushes)
    }

    /// The model's answer in a transaction that has these pushes so far: it takes back one of a grant that it answers with.
    fn model_after(&mut self, at: usize, command: &Command, now: Now, pushes: &mut Vec<Push>) -> Answer {
        let absent = &self.absent;
        let mut is_reachable = |client| !absent.contains(&client);
        let context = CommandContext { now, is_reachable: &mut is_reachable, pushes };
        let Ok(answer) = apply(&mut self.resources[at].1, context, command);
        answer
    }

    pub(super) fn run_all(&mut self, attempts: &[Arc<Acquire>]) {
        let (mut theirs, absent) = (Vec::new(), self.absent.clone());
        let mut is_reachable = |client| !absent.contains(&client);
        let tables: Vec<_> = self.resources.iter().take(attempts.len()).map(|(_, table)| table).collect();
        let now = self.now(&tables);
        let context = CommandContext { now, is_reachable: &mut is_reachable, pushes: &mut theirs };
        let mut steps: Vec<_> = self.resources.iter_mut().map(|(_, table)| table).zip(attempts).collect();
        let Ok(expected) = apply_all(context, &mut steps);
        let resources = self.resources.iter().map(|(resource, _)| Arc::new(resource.clone()));
        let attempts: Vec<_> = resources.zip(attempts.iter().cloned()).collect();
        let harness = &self.harness;
        let found = harness.answered(harness.runtime.block_on(harness.executor.acquire_all(&attempts)));
        assert_eq!(found, expected, "after {attempts:?}");
        assert_eq!(self.harness.pushes(), as_notified(theirs), "pushed after {attempts:?}");
        (0..attempts.len()).for_each(|at| drop(self.run(at, &Command::Inspect)));
    }

    pub(super) fn renew_all(&mut self, renewals: &[(usize, Renew)]) {
        let (mut expected, mut theirs) = (Vec::new(), Vec::new());
        let mut batch = Vec::new();
        for (at, renew) in renewals {
            let now = self.now(&[&self.resources[*at].1]);
            let command = with_tokens(&Command::Renew(renew.clone()), &mut self.resources[*at].1);
            let (answer, pushes) = self.model(*at, &command, now);
            expected.push(answer);
            theirs.extend(as_notified(pushes));
            batch.push(Call::new(Arc::new(self.resources[*at].0.clone()), command));
        }
        let harness = &self.harness;
        let found = harness.runtime.block_on(harness.executor.call_batch(&batch));
        let found: Vec<_> = found.into_iter().map(|found| harness.answered(found)).collect();
        assert_eq!(found, expected, "after {batch:?}");
        // Resources of a batch follow each other in any order.
        let sorted = |mut pushes: Vec<Push>| {
            pushes.sort_by_key(|push| format!("{push:?}"));
            pushes
        };
        assert_eq!(sorted(self.harness.pushes()), sorted(theirs), "pushed after {batch:?}");
    }

    /// Runs commands at one resource that come together.
    pub(super) fn run_together(&mut self, at: usize, commands: &[Command]) {
        let (mut expected, mut theirs) = (Vec::new(), Vec::new());
        for transaction in commands.chunks(MAX_TOGETHER) {
            let mut pushes = Vec::new();
            for command in transaction {
                let now = self.now(&[&self.resources[at].1]);
                expected.push(self.model_after(at, command, now, &mut pushes));
            }
            theirs.extend(as_notified(pushes));
        }
        let resource = Arc::new(self.resources[at].0.clone());
        let batch: Vec<_> =
            commands.iter().map(|command| Call::new(resource.clone(), command.clone())).collect();
        let harness = &self.harness;
        let found = harness.runtime.block_on(harness.executor.call_batch(&batch));
        let found: Vec<_> = found.into_iter().map(|found| harness.answered(found)).collect();
        assert_eq!(found, expected, "after {batch:?}");
        assert_eq!(as_notified(self.harness.pushes()), as_notified(theirs), "pushed after {batch:?}");
    }

    pub(super) fn step(&mut self, at: usize, step: &Step) {
        match step {
            Step::Do(command) => {
                self.run(at, command);
                self.run(at, &Command::Inspect);
            }
            Step::Sweep => self.sweep(at),
            Step::Pass(ms) => self.harness.set_time(self.harness.now + Duration::from_millis(*ms)),
            Step::SetBack(ms) => {
                self.harness.set_time(self.harness.now.saturating_sub(Duration::from_millis(*ms)));
            }
            // Only nodes of a quorum have it.
            Step::Raise(_) => {}
            Step::Leave(client) => {
                if !self.absent.contains(&client_id(*client)) {
                    self.harness.set_present(client_id(*client), false);
                    self.absent.push(client_id(*client));
                }
            }
            Step::Return(client) => {
                if self.absent.contains(&client_id(*client)) {
                    self.harness.sql(&format!(
                        "SELECT pg_advisory_lock_shared({})",
                        presence_key(client_id(*client))
                    ));
                    self.absent.retain(|absent| *absent != client_id(*client));
                }
            }
        }
    }

    fn sweep(&mut self, at: usize) {
        let now = self.now(&[&self.resources[at].1]);
        let (mut theirs, absent) = (Vec::new(), self.absent.clone());
        let mut is_reachable = |client| !absent.contains(&client);
        let context = CommandContext { now, is_reachable: &mut is_reachable, pushes: &mut theirs };
        let Ok(_) = sweep(&mut self.resources[at].1, context);
        let harness = &self.harness;
        harness.answered(harness.runtime.block_on(harness.executor.sweep_resource(&self.resources[at].0)));
        assert_eq!(self.harness.pushes(), as_notified(theirs), "pushed after a sweep");
    }

    /// The next COMMIT that ends a wait fails as one does whose notifications have no room.
    pub(super) fn fail_next_notification(&mut self) {
        self.harness.sql(
            "CREATE SEQUENCE commits;
            CREATE FUNCTION full_queue() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF nextval('commits') = 1 THEN
                    RAISE EXCEPTION 'too many notifications in the NOTIFY queue' USING ERRCODE = '54000';
                END IF;
                RETURN NULL;
            END $$;
            CREATE CONSTRAINT TRIGGER full_queue AFTER DELETE ON leasehold.waiter DEFERRABLE INITIALLY DEFERRED
                FOR EACH ROW EXECUTE FUNCTION full_queue()",
        );
    }

    /// Runs a command whose pushes are lost.
    pub(super) fn run_unnotified(&mut self, at: usize, command: &Command) -> Reply {
        let now = self.now(&[&self.resources[at].1]);
        let (expected, _) = self.model(at, command, now);
        let harness = &self.harness;
        let found = harness.runtime.block_on(harness.executor.call(&self.resources[at].0, command)).unwrap();
        assert_eq!(found, expected, "after {command:?}");
        assert_eq!(self.harness.pushes(), []);
        found.reply
    }

    /// What a client does once a minute.
    pub(super) fn sweep_rows(&mut self) {
        let now = self.now(&[]);
        let mut is_reachable = |_| true;
        for (_, table) in &mut self.resources {
            let context = CommandContext { now, is_reachable: &mut is_reachable, pushes: &mut Vec::new() };
            let Ok(_) = sweep(table, context);
        }
        self.harness.runtime.block_on(self.harness.executor.sweep()).unwrap();
    }

    /// The same, without the model.
    pub(super) fn sweep_in_store(&self) {
        self.harness.runtime.block_on(self.harness.executor.sweep()).unwrap();
    }

    /// A command without the model.
    pub(super) fn call(&self, resource: &Resource, command: &Command) -> CallResult {
        self.harness.runtime.block_on(self.harness.executor.call(resource, command))
    }

    pub(super) fn list(&self) -> Vec<Resource> {
        self.harness.runtime.block_on(self.harness.executor.list()).unwrap()
    }

    pub(super) fn sql(&self, sql: &str) {
        self.harness.sql(sql);
    }

    /// The only number that a query returns.
    pub(super) fn column(&self, sql: &str) -> i64 {
        let value = self.harness.runtime.block_on(self.harness.conn.value(&Pinned::as_is(sql)));
        value.unwrap().parse().unwrap()
    }

    /// Another session has the row of this resource until the value is dropped.
    pub(super) fn keep_row(&self, name: &str) -> ServerSession {
        let row = format!("SELECT 1 FROM leasehold.resource WHERE name = '{name}' FOR UPDATE");
        let session = self.harness.server.session(&format!("BEGIN; {row}"));
        wait_until("it has the row", || self.harness.server.try_run(&format!("{row} NOWAIT")).is_err());
        session
    }

    pub(super) fn count_rows(&self) -> i64 {
        let count = |table: &&str| self.column(&format!("SELECT count(*) FROM leasehold.{table}"));
        ["resource", "lease", "waiter", "tombstone"].iter().map(count).sum()
    }

    /// The numbers of statements and of round trips that the store sends for this.
    pub(super) fn cost(&mut self, work: impl FnOnce(&mut Self)) -> (u64, u64) {
        let before = self.harness.executor.pool.sent();
        work(self);
        let after = self.harness.executor.pool.sent();
        (after.0 - before.0, after.1 - before.1)
    }
}
