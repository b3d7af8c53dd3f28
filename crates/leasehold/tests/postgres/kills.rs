//! Sessions that are killed in any step, and servers that stop, while clients contend.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold::fence::postgres::{check_token, create};
use leasehold::tokio_postgres::{Client as Database, Error as DatabaseError, NoTls, connect};
use leasehold::{Client, Token};
use leasehold_testkit::{LIMIT, PgBouncer, Postgres, extent};

/// How long clients contend: `scripts/test --long` wants more.
fn duration() -> Duration {
    Duration::from_secs(extent(8, 60, 60))
}

/// What the holders of one lock see of each other.
#[derive(Default)]
struct Witness {
    /// Numbers the beginnings and ends of sections in their order.
    events: AtomicU64,
    /// Beginning, end and token of each section in which the guard said from beginning to end that the lease is held. A process that
    /// stands still loses its lease, and its section then proves nothing.
    sections: Mutex<Vec<(u64, u64, u64)>>,
    last_token: AtomicU64,
    grants: AtomicU64,
    /// Writes after those of a newer holder, as far as the server was there.
    late_writes: AtomicU64,
}

impl Witness {
    async fn hold(&self, guard: leasehold::Guard, writer: &mut Writer) {
        let token = guard.token().get();
        let begin = self.events.fetch_add(1, Ordering::SeqCst);
        let held_first = guard.is_held();
        self.last_token.fetch_max(token, Ordering::SeqCst);
        self.grants.fetch_add(1, Ordering::SeqCst);
        writer.write(guard.token()).await;
        let end = self.events.fetch_add(1, Ordering::SeqCst);
        if held_first && guard.is_held() {
            self.sections.lock().unwrap().push((begin, end, token));
        }
        drop(guard.release().await);
        // As a process that was stopped for longer than its lease: it writes once more, after others.
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_millis(5)).await;
            if self.last_token.load(Ordering::SeqCst) > token {
                break;
            }
        }
        let is_late = self.last_token.load(Ordering::SeqCst) > token;
        if writer.write(Token::new(token).unwrap()).await && is_late {
            self.late_writes.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Enough happened for the checks to say something, on a slow machine too.
    fn has_seen_enough(&self) -> bool {
        self.grants.load(Ordering::SeqCst) > 20
            && self.late_writes.load(Ordering::SeqCst) > 5
            && self.sections.lock().unwrap().len() > 10
    }

    /// Sections that overlap the next one, and tokens that fall.
    fn faults(&self) -> (usize, usize) {
        let mut sections = self.sections.lock().unwrap().clone();
        sections.sort_unstable();
        let count = |is_fault: fn(&[(u64, u64, u64)]) -> bool| {
            sections.windows(2).filter(|pair| is_fault(pair)).count()
        };
        (count(|pair| pair[1].0 < pair[0].1), count(|pair| pair[1].2 <= pair[0].2))
    }
}

/// A check that can't fail would prove nothing.
#[test]
fn witness_finds_overlaps_and_falling_tokens() {
    let faults = |sections: &[(u64, u64, u64)]| {
        Witness { sections: Mutex::new(sections.to_vec()), ..Witness::default() }.faults()
    };
    assert_eq!(faults(&[(4, 5, 9), (0, 1, 7), (2, 3, 8)]), (0, 0));
    assert_eq!(faults(&[(0, 2, 7), (1, 3, 8)]), (1, 0));
    assert_eq!(faults(&[(0, 1, 8), (2, 3, 7), (4, 5, 7)]), (0, 2));
}

/// The writes of holders, in their order: with the fence's check, and without.
const REGISTERS: &str = "CREATE TABLE fenced (at int8 GENERATED ALWAYS AS IDENTITY, token int8);
    CREATE TABLE unfenced (at int8 GENERATED ALWAYS AS IDENTITY, token int8)";

/// Writes of a holder after those of a newer one.
fn late_writes(server: &Postgres, register: &str) -> u64 {
    let late = format!(
        "SELECT count(*) FROM (SELECT token < lag(token) OVER (ORDER BY at) AS is_late FROM {register}) AS writes
        WHERE is_late"
    );
    server.run(&late).parse().unwrap()
}

/// Longer than a server is stopped for.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection of the program, which is killed as well.
struct Writer {
    url: String,
    database: Option<Database>,
}

impl Writer {
    /// Writes the token to both tables, unless the server is away: then it returns false. Who was refused is seen in the tables.
    async fn write(&mut self, token: Token) -> bool {
        let url = self.url.clone();
        let written = tokio::time::timeout(WRITE_TIMEOUT, async {
            let mut database = match self.database.take() {
                Some(database) => database,
                None => {
                    let (database, connection) = connect(&url, NoTls).await?;
                    tokio::spawn(connection);
                    database
                }
            };
            write(&mut database, token).await.map(|()| database)
        });
        self.database = written.await.ok().and_then(Result::ok);
        self.database.is_some()
    }
}

async fn write(database: &mut Database, token: Token) -> Result<(), DatabaseError> {
    let number = i64::from(token);
    let transaction = database.transaction().await?;
    if check_token(&transaction, "register", token).await.is_ok() {
        transaction.execute("INSERT INTO fenced (token) VALUES ($1)", &[&number]).await?;
        transaction.commit().await?;
    } else {
        transaction.rollback().await?;
    }
    database.execute("INSERT INTO unfenced (token) VALUES ($1)", &[&number]).await.map(drop)
}

async fn contend(server: &Postgres, urls: &[String], disturb: impl Fn(u32) + Send + 'static) -> Arc<Witness> {
    let (setup, connection) = connect(&server.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    create(&setup).await.unwrap();
    server.run(REGISTERS);
    let witness = Arc::new(Witness::default());
    let (ends, gives_up) = (Instant::now() + duration(), Instant::now() + duration() + LIMIT);
    let is_over = {
        let witness = witness.clone();
        move || Instant::now() >= ends && (witness.has_seen_enough() || Instant::now() >= gives_up)
    };
    let mut workers = Vec::new();
    for url in urls {
        let client = Client::connect(url).await.unwrap();
        for _ in 0..2 {
            let (client, witness, is_over) = (client.clone(), witness.clone(), is_over.clone());
            let mut writer = Writer { url: server.url(), database: None };
            workers.push(tokio::spawn(async move {
                while !is_over() {
                    let mutex = client.mutex("a").global_fifo().ttl(Duration::from_secs(5));
                    match mutex.lock_timeout(Duration::from_secs(3)).await {
                        Ok(Some(guard)) => witness.hold(guard, &mut writer).await,
                        Ok(None) => {}
                        // The server is away.
                        Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                    }
                }
            }));
        }
    }
    let disturber = tokio::task::spawn_blocking(move || {
        let mut round = 0;
        while !is_over() {
            disturb(round);
            round += 1;
        }
    });
    for worker in workers {
        worker.await.unwrap();
    }
    disturber.await.unwrap();
    witness
}

fn check(server: &Postgres, witness: &Witness) {
    let count = |of: &AtomicU64| of.load(Ordering::SeqCst);
    let late = [late_writes(server, "fenced"), late_writes(server, "unfenced")];
    eprintln!(
        "{} grants, {} late writes with the fence, {} without",
        count(&witness.grants),
        late[0],
        late[1]
    );
    assert!(late[0] == 0 && late[1] > 0, "late writes with and without the fence: {late:?}");
    assert_eq!(witness.faults(), (0, 0), "sections overlapped, or tokens fell");
    let sections = witness.sections.lock().unwrap().len();
    let grants = count(&witness.grants);
    assert!(grants > 20 && sections > 10, "{grants} grants, {sections} sections");
}

const KILL: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND random() < 0.3";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn killed_sessions_cause_no_overlap_and_no_falling_token() {
    let server = Arc::new(Postgres::on_port());
    let pooler = PgBouncer::start(&server);
    let listening = format!("{}?listen={}", pooler.url(), server.url());
    let urls = [server.url(), server.url(), server.url(), listening];
    let killed = server.clone();
    let witness = contend(&server, &urls, move |_| {
        let _ = killed.try_run(KILL);
        std::thread::sleep(Duration::from_millis(100));
    })
    .await;
    check(&server, &witness);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn stopped_servers_cause_no_overlap_and_no_falling_token() {
    let server = Arc::new(Postgres::on_port());
    let urls = [server.url(), server.url()];
    let stopped = server.clone();
    let witness = contend(&server, &urls, move |round| {
        std::thread::sleep(Duration::from_millis(700));
        stopped.freeze();
        std::thread::sleep(Duration::from_millis(u64::from(round % 4) * 400));
        stopped.thaw();
    })
    .await;
    check(&server, &witness);
}
