//! A caller of `leasehold serve`, as a peer: it acquires by a request that it repeats, renews each third of the ttl, and releases.
//!
//! Each request has a connection of its own, so the balancer chooses a server for each of them.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use leasehold::Client;
use leasehold_bench_peer::clock::now_ns;
use leasehold_bench_peer::protocol::{Hello, Open, Run};
use leasehold_bench_peer::{Failure, Library, Lock, serve};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::TOKEN;
use crate::options::millis;

/// Between two tries of a request.
const PAUSE: Duration = Duration::from_millis(20);

/// A caller that has not repeated its request for so long, because it was stopped, may find that the request has ended.
const REPEAT_WITHIN: Duration = Duration::from_secs(2);

/// A release that is confirmed no sooner has failed.
const RELEASE_LIMIT: Duration = Duration::from_secs(20);

/// What a caller does without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeats {
    /// It repeats its request.
    UntilAnswered,
    /// It gives up: a broken specimen, which loses leases whenever a server goes away.
    Never,
}

/// Runs as a peer.
pub fn run(repeats: Repeats) {
    serve(Serve { repeats, ttl: Cell::default() });
}

struct Serve {
    repeats: Repeats,
    ttl: Cell<Duration>,
}

/// Where a caller sends its requests, and where it looks for what is left.
#[derive(Clone)]
struct Caller {
    /// Host and port of the balancer.
    address: Rc<str>,
    store: Rc<str>,
    /// Connected by the first look.
    observer: Rc<OnceCell<Client>>,
    repeats: Repeats,
    ttl: Duration,
}

struct Contender {
    caller: Caller,
    path: String,
    /// Whether the next lease is renewed right after its grant, and not only after a third of the ttl.
    renews_at_once: bool,
}

struct Lease {
    id: Rc<str>,
    token: u64,
    /// The lease is this caller's until then.
    good_until: Rc<Cell<u64>>,
    /// The renewals, which end when this is dropped.
    renewals: JoinSet<()>,
}

impl Library for Serve {
    type Client = Caller;
    type Lock = Contender;

    fn hello(&self) -> Hello {
        Hello {
            library: concat!("leasehold serve ", env!("CARGO_PKG_VERSION")).into(),
            runtime: "HTTP".into(),
        }
    }

    async fn connect(&self, open: &Open, _: u32) -> Result<Caller, Failure> {
        let [url, store] = open.urls.as_slice() else {
            return Err("it needs the addresses of a balancer and of the store".into());
        };
        self.ttl.set(Duration::from_millis(open.ttl_ms));
        Ok(Caller {
            address: url.trim_start_matches("http://").into(),
            store: store.as_str().into(),
            observer: Rc::default(),
            repeats: self.repeats,
            ttl: self.ttl.get(),
        })
    }

    fn lock(&self, client: &Caller, _: &Run, name: &str, _: u32) -> Result<Contender, Failure> {
        let path = format!("/v1/locks/mutex/{name}/acquire");
        Ok(Contender { caller: client.clone(), path, renews_at_once: false })
    }

    /// Asks the store itself: no server is believed.
    async fn left(&self, client: &Caller) -> Result<Option<u32>, Failure> {
        let observer = client.observer.get_or_try_init(|| Client::connect(&client.store)).await?;
        let locks = observer.list().await?;
        let left = locks.iter().map(|lock| lock.holders.len() + lock.waiters.len()).sum::<usize>();
        Ok(Some(u32::try_from(left)?))
    }
}

impl Caller {
    /// One request.
    async fn call(&self, path: &str, body: &Value, limit: Duration) -> Result<(u16, Value), Failure> {
        timeout(limit, self.exchange(path, body)).await?
    }

    async fn exchange(&self, path: &str, body: &Value) -> Result<(u16, Value), Failure> {
        let stream = TcpStream::connect(&*self.address).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // It ends with the set, if the caller gives up.
        let mut connections = JoinSet::new();
        connections.spawn_local(connection);
        let request = Request::post(path)
            .header(HOST, &*self.address)
            .header(AUTHORIZATION, format!("Bearer {TOKEN}"))
            .header(CONTENT_TYPE, "application/json")
            .header(CONNECTION, "close")
            .body(Full::new(Bytes::from(body.to_string())))?;
        let answer = sender.send_request(request).await?;
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await?.to_bytes();
        Ok((status, serde_json::from_slice(&body)?))
    }

    /// The outcome of a renewal or a release of one lease.
    async fn outcome(&self, what: &str, lease: &str) -> Result<Value, Failure> {
        let leases = json!({ "leases": [lease] });
        match self.call(&format!("/v1/leases/{what}"), &leases, self.ttl / 6).await? {
            (200, mut answer) => Ok(answer["leases"][0].take()),
            (status, problem) => Err(format!("{status}: {problem}").into()),
        }
    }

    /// Renews until the lease has ended, or its time is over.
    async fn renew(self, lease: Rc<str>, good_until: Rc<Cell<u64>>, mut next: Duration) {
        loop {
            sleep(next).await;
            let sent = now_ns();
            if sent >= good_until.get() {
                return;
            }
            let renewal = self.outcome("renew", &lease).await;
            next = PAUSE;
            match renewal.as_ref().map(|renewal| renewal["outcome"].as_str().unwrap_or_default()) {
                Ok("renewed") => {
                    good_until.set(until(sent, renewal.as_ref().ok()));
                    next = self.ttl / 3;
                }
                Ok("ended") => {
                    good_until.set(0);
                    return;
                }
                _ if self.repeats == Repeats::Never => return,
                _ => {}
            }
        }
    }
}

/// The lease is the caller's until so long after the request was sent.
fn until(sent: u64, answer: Option<&Value>) -> u64 {
    sent + answer.and_then(|answer| answer["expires_in_ms"].as_u64()).unwrap_or(0) * 1_000_000
}

impl Contender {
    /// Repeats one request until it is granted, with the time at which the granted one was sent. A request that this caller could not repeat in
    /// time is replaced by a new one.
    async fn request(&self) -> Result<(Value, u64), Failure> {
        let Caller { ttl, repeats, .. } = self.caller;
        let slice = ttl / 2;
        let body = || {
            Ok::<_, Failure>(
                json!({ "request_id": request_id()?, "wait_ms": millis(slice), "ttl_ms": millis(ttl) }),
            )
        };
        let (mut request, mut before) = (body()?, now_ns());
        loop {
            let sent = now_ns();
            let is_late = Duration::from_nanos(sent - before) > ttl.min(slice + REPEAT_WITHIN);
            before = sent;
            match self.caller.call(&self.path, &request, slice + ttl / 6).await {
                Ok((200, grant)) => return Ok((grant, sent)),
                Ok((202, _)) => {}
                Ok((410, _)) if is_late => request = body()?,
                Ok((status, problem)) if status != 503 => return Err(format!("{status}: {problem}").into()),
                Err(failure) if repeats == Repeats::Never => return Err(failure),
                _ => sleep(PAUSE).await,
            }
        }
    }
}

fn request_id() -> Result<String, Failure> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| error.to_string())?;
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}

impl Lock for Contender {
    type Held = Lease;

    fn plan(&mut self, chance: u64) -> String {
        self.renews_at_once = chance.is_multiple_of(2);
        String::new()
    }

    async fn take(&mut self, _: bool) -> Result<Lease, Failure> {
        let (grant, sent) = self.request().await?;
        let id: Rc<str> = grant["lease"].as_str().ok_or("a grant without a lease")?.into();
        let token = grant["token"].as_u64().ok_or("a grant without a token")?;
        let good_until = Rc::new(Cell::new(until(sent, Some(&grant))));
        let first = if self.renews_at_once { Duration::ZERO } else { self.caller.ttl / 3 };
        let mut renewals = JoinSet::new();
        renewals.spawn_local(self.caller.clone().renew(id.clone(), good_until.clone(), first));
        Ok(Lease { id, token, good_until, renewals })
    }

    async fn give(&mut self, held: Lease) -> Result<(), Failure> {
        // A renewal that is on its way may arrive after the release.
        drop(held.renewals);
        let deadline = now_ns() + u64::try_from(RELEASE_LIMIT.as_nanos())?;
        let mut is_first = true;
        loop {
            let released = self.caller.outcome("release", &held.id).await;
            let is_good = now_ns() < held.good_until.get();
            match released.as_ref().map(|released| released["outcome"].as_str().unwrap_or_default()) {
                Ok("released") => return Ok(()),
                Ok("already-ended") if is_first && is_good => {
                    return Err("it had ended before its time".into());
                }
                Ok("already-ended") => return Ok(()),
                _ if now_ns() > deadline || self.caller.repeats == Repeats::Never => {
                    return Err(format!("it is not confirmed: {released:?}").into());
                }
                _ => sleep(PAUSE).await,
            }
            is_first = false;
        }
    }

    fn is_held(held: &Lease) -> bool {
        now_ns() < held.good_until.get()
    }

    fn token(held: &Lease) -> Option<u64> {
        Some(held.token)
    }
}
