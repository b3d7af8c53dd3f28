//! Streams of server-sent events: what changes in the store.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::Stream;
use futures_util::stream::unfold;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::request::{Lock, Parameters};
use crate::app::{App, Watcher};
use crate::caller::Caller;
use crate::observer::{Key, Row, Snapshot};
use crate::presence::{Presence, Watched};
use crate::problem::{Code, Problem};
use crate::time::millis;

/// The pause after which a stream without events sends a comment, so that proxies keep its connection open.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Rows of one event.
const MAX_ROWS: usize = 500;

type Events = Sse<
    axum::response::sse::KeepAliveStream<
        std::pin::Pin<Box<dyn Stream<Item = Result<Event, Infallible>> + Send>>,
    >,
>;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EventsParameters {
    kind: Option<String>,
    name: Option<String>,
}

/// Changes of all locks as rows; with `kind` and `name`, also the whole state and the timeline of this lock.
pub(super) async fn locks(
    State(app): State<Arc<App>>,
    Extension(presence): Extension<Presence>,
    Extension(caller): Extension<Caller>,
    Parameters(parameters): Parameters<EventsParameters>,
) -> Result<Events, Problem> {
    let lock = match (parameters.kind, parameters.name) {
        (Some(kind), Some(name)) => Some(Lock::new(&kind, name)?),
        (None, None) => None,
        _ => return Err(Problem::new(Code::InvalidRequest, "kind and name are given together, or neither")),
    };
    lock.as_ref().map_or(Ok(()), |lock: &Lock| lock.check(Some(&caller)))?;
    let watcher = app.watch(&caller)?;
    let feed = Feed {
        snapshots: app.observer.subscribe(),
        sent: BTreeMap::new(),
        ready: vec![event("history", &app.observer.history())],
        is_first: true,
        stopping: app.stopping.clone(),
        lock,
        caller,
        app,
        _watcher: watcher,
        _watched: presence.watch(),
    };
    Ok(stream(unfold(feed, async |mut feed| feed.next().await.map(|event| (Ok(event), feed)))))
}

/// What one watcher has been sent.
struct Feed {
    app: Arc<App>,
    lock: Option<Lock>,
    caller: Caller,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    sent: BTreeMap<Key, Arc<Row>>,
    /// Events of this snapshot that are not sent yet, the last one first.
    ready: Vec<Event>,
    is_first: bool,
    stopping: CancellationToken,
    _watcher: Watcher,
    _watched: Watched,
}

impl Feed {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop() {
                return Some(event);
            }
            if !self.is_first {
                tokio::select! {
                    changed = self.snapshots.changed() => changed.ok()?,
                    () = self.stopping.cancelled() => return None,
                }
            }
            let snapshot = self.snapshots.borrow_and_update().clone();
            let mut events = self.changes(&snapshot);
            if let Some(lock) = &self.lock {
                events.push(self.state(lock).await);
            }
            events.reverse();
            self.ready = events;
        }
    }

    /// The rows that differ from those that were sent. The first event of a stream begins an empty list.
    fn changes(&mut self, snapshot: &Snapshot) -> Vec<Event> {
        let rows = visible(&self.caller, &snapshot.rows);
        let is_new =
            |key: &Key, row: &Arc<Row>| self.sent.get(key).is_none_or(|sent| !Arc::ptr_eq(sent, row));
        let changed = rows.iter().filter(|(key, row)| is_new(key, row));
        let changed: Vec<&Row> = changed.map(|(_, row)| &**row).collect();
        let gone: Vec<_> = self.sent.keys().filter(|key| !rows.contains_key(*key)).collect();
        let gone: Vec<_> = gone.iter().map(|(kind, name)| (kind.as_str(), name)).collect();
        let mut events = Vec::new();
        let mut reset = self.is_first;
        for part in changed.chunks(MAX_ROWS) {
            events.push(event("rows", &json!({ "reset": reset, "rows": part, "gone": [] })));
            reset = false;
        }
        for part in gone.chunks(MAX_ROWS) {
            events.push(event("rows", &json!({ "reset": false, "rows": [], "gone": part })));
        }
        let status = json!({
            "error": snapshot.error,
            "locks": rows.len(),
            "took_ms": millis(snapshot.took),
            "age_ms": millis(snapshot.listed.at.elapsed()),
            "is_listed": snapshot.listed.took.is_some(),
            "stopping": self.app.draining.is_cancelled(),
            "point": self.app.observer.last_point(),
        });
        events.push(event("status", &status));
        self.sent = rows.into_owned();
        self.is_first = false;
        events
    }

    async fn state(&self, lock: &Lock) -> Event {
        match self.app.client.inspect(lock.kind, &lock.name).await {
            Ok(info) => {
                let timeline = self.app.observer.timeline(lock.kind, &lock.name);
                event("lock", &json!({ "lock": info, "timeline": timeline }))
            }
            Err(error) => event("lock", &json!({ "error": format!("{error:#}") })),
        }
    }
}

/// The rows that the caller may see.
fn visible<'a>(caller: &Caller, rows: &'a BTreeMap<Key, Arc<Row>>) -> Cow<'a, BTreeMap<Key, Arc<Row>>> {
    if caller.profile().has_all_names() {
        return Cow::Borrowed(rows);
    }
    let seen = rows.iter().filter(|((_, name), _)| caller.sees(name));
    Cow::Owned(seen.map(|(key, row)| (key.clone(), row.clone())).collect())
}

fn event(name: &str, data: &impl Serialize) -> Event {
    // Rows and numbers always serialize.
    Event::default().event(name).data(serde_json::to_string(data).unwrap_or_default())
}

fn stream(events: impl Stream<Item = Result<Event, Infallible>> + Send + 'static) -> Events {
    let events: std::pin::Pin<Box<dyn Stream<Item = _> + Send>> = Box::pin(events);
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
}
