//! A few concurrent clients of one recipe on a real Redis, with every step printed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::args;
use crate::explorer::Fault;
use crate::outcome::{Outcome, find, servers};
use crate::real::{Process, RealClient, TraceEvent, Watch};
use crate::recipe::{AnyRecipe, LockOptions, Role, lock, unlock_within};
use crate::redis::{Note, Redis, display_value};

/// The result of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Number of clients that acquired the lock.
    pub acquired: u32,
    /// Maximum number of clients in the critical section at once. All readers count as one.
    pub most_inside: u32,
}

/// Runs the clients.
///
/// # Errors
///
/// An unknown recipe, an invalid address, or a server that fails.
pub async fn run(args: &args::Run) -> Outcome<Summary> {
    let row = find(&args.which.id)?;
    let (_servers, urls) = match &args.url {
        Some(_) if row.nodes > 1 => {
            return Err(format!("{} needs {} masters: leave out --url", row.id, row.nodes).into());
        }
        Some(url) => (Vec::new(), vec![url.clone()]),
        None => servers(row.nodes),
    };
    let process = Process::connect(&urls).await?;
    let start = Instant::now();
    let inside = Arc::new(Inside::default());
    let clients: Vec<_> = (0..args.clients)
        .map(|number| {
            let name = char::from(b'A' + number % 26);
            let redis = Redis::new(Arc::new(RealClient::new(process.clone(), Some(printer(name, start)))));
            let role = if row.has_readers && number < args.readers { Role::Reader } else { Role::Writer };
            let mut options =
                LockOptions { role, lease: Duration::from_secs(args.lease), ..LockOptions::default() };
            // Clients with the same owner name would share the lock.
            options.owner = row.faults.contains(&Fault::SameOwner).then(|| format!("owner-{name}"));
            args.which.set(&mut options);
            let recipe = (row.make)(redis.clone(), options);
            let visit =
                Visit { retry_policy: args.retry_policy(), work: Duration::from_millis(args.work_ms), role };
            tokio::spawn(visit.go(redis, recipe, inside.clone()))
        })
        .collect();
    let mut acquired = 0;
    for client in clients {
        acquired += u32::from(client.await??);
    }
    Ok(Summary { acquired, most_inside: inside.most.load(Ordering::SeqCst) })
}

#[derive(Default)]
struct Inside {
    now: AtomicU32,
    most: AtomicU32,
}

struct Visit {
    retry_policy: crate::recipe::RetryPolicy,
    work: Duration,
    role: Role,
}

impl Visit {
    async fn go(self, redis: Redis, mut recipe: Box<dyn AnyRecipe>, inside: Arc<Inside>) -> Outcome<bool> {
        let Some(hold) = lock(&redis, &mut *recipe, self.retry_policy).await? else { return Ok(false) };
        redis.note(Note::Acquired(hold));
        let counts = u32::from(self.role == Role::Writer);
        let now = inside.now.fetch_add(counts, Ordering::SeqCst) + counts;
        inside.most.fetch_max(now.max(1), Ordering::SeqCst);
        tokio::time::sleep(self.work).await;
        inside.now.fetch_sub(counts, Ordering::SeqCst);
        let found = unlock_within(&redis, &mut *recipe, Duration::from_secs(2)).await?;
        redis.note(Note::Released(found));
        Ok(true)
    }
}

fn printer(name: char, start: Instant) -> Watch {
    Box::new(move |event| {
        let ms = start.elapsed().as_millis();
        let line = match event {
            TraceEvent::Step(said, Ok(answer)) => format!("{said} → {}", display_value(answer)),
            TraceEvent::Step(said, Err(error)) => format!("{said} → error: {error}"),
            TraceEvent::Note(Note::Acquired(_)) => "▸ holds the lock".to_owned(),
            TraceEvent::Note(Note::Released(true)) => "▸ has released the lock".to_owned(),
            TraceEvent::Note(Note::Released(false)) => "▸ cannot release: not its lock any more".to_owned(),
            TraceEvent::Note(_) => return,
        };
        println!("{ms:>6} ms  {name}  {line}");
    })
}
