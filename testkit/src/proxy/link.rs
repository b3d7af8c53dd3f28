//! One client's connection through the proxy: for each direction a thread that reads and one that writes.
//!
//! Between the two is a queue in which every piece has its due time, or is held until its release. A delay therefore applies to all pieces in parallel, not to one
//! after the other.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::frames::Frames;

/// Maximum size of a piece.
const PIECE: usize = 16 * 1024;

/// Interval at which a held piece checks for its release.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);

/// Capacity of the queue. A full queue blocks the sender, like a full socket buffer.
const QUEUE: usize = 1024;

/// The faults of one direction, on all connections.
#[derive(Default)]
pub(super) struct Direction {
    delay_ns: AtomicU64,
    holds: AtomicBool,
    /// Number of times that the held pieces were released.
    releases: AtomicUsize,
    held: AtomicUsize,
    drops: AtomicBool,
    dropped: AtomicUsize,
    /// Messages that contain these bytes are dropped.
    unwanted: Mutex<Option<Vec<u8>>>,
}

impl Direction {
    pub(super) fn set_delay(&self, delay: Duration) {
        self.delay_ns.store(u64::try_from(delay.as_nanos()).expect("a sane delay"), Ordering::SeqCst);
    }

    pub(super) fn set_holds(&self, holds: bool) {
        self.holds.store(holds, Ordering::SeqCst);
    }

    pub(super) fn release_held(&self) {
        self.held.store(0, Ordering::SeqCst);
        self.releases.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::SeqCst)
    }

    pub(super) fn set_drops(&self, drops: bool) {
        self.drops.store(drops, Ordering::SeqCst);
    }

    pub(super) fn set_unwanted(&self, unwanted: Option<&[u8]>) {
        *lock(&self.unwanted) = unwanted.map(<[u8]>::to_vec);
    }

    pub(super) fn dropped(&self) -> usize {
        self.dropped.load(Ordering::SeqCst)
    }

    /// The bytes of a piece to forward. A partial reply stays in `frames` until it is complete.
    fn filter(&self, frames: &mut Frames, piece: &[u8]) -> Vec<u8> {
        let unwanted = lock(&self.unwanted).clone();
        let (mut passed, dropped) = frames.pass(piece, unwanted.as_deref());
        let mut dropped = dropped;
        if self.drops.load(Ordering::SeqCst) && !passed.is_empty() {
            passed.clear();
            dropped += 1;
        }
        self.dropped.fetch_add(dropped, Ordering::SeqCst);
        passed
    }

    fn due(&self) -> Due {
        if self.holds.load(Ordering::SeqCst) {
            self.held.fetch_add(1, Ordering::SeqCst);
            return Due::AfterReleases(self.releases.load(Ordering::SeqCst));
        }
        Due::At(Instant::now() + Duration::from_nanos(self.delay_ns.load(Ordering::SeqCst)))
    }

    /// Time until the piece is due, or until it must be checked again. None: it is due.
    fn remaining(&self, due: Due) -> Option<Duration> {
        match due {
            Due::At(time) => {
                time.checked_duration_since(Instant::now()).filter(|remaining| !remaining.is_zero())
            }
            Due::AfterReleases(count) => {
                (self.releases.load(Ordering::SeqCst) == count).then_some(CHECK_INTERVAL)
            }
        }
    }
}

/// When a piece is forwarded.
#[derive(Clone, Copy)]
enum Due {
    At(Instant),
    /// Held until there were more releases than this.
    AfterReleases(usize),
}

/// A client's connection and its connection to the server. Dropping it closes both.
pub(super) struct Link {
    is_cut: Arc<AtomicBool>,
    streams: [TcpStream; 2],
    threads: Vec<JoinHandle<()>>,
}

impl Link {
    pub(super) fn start(
        client: &TcpStream,
        server: &TcpStream,
        requests: &Arc<Direction>,
        replies: &Arc<Direction>,
        subscribers_hang: &Arc<AtomicBool>,
    ) -> Self {
        let has_subscribed = Arc::new(AtomicBool::new(false));
        let is_cut = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        // Only replies and pushes are parsed.
        let sent =
            Filter { frames: Frames::Unread, subscribers_hang: None, has_subscribed: has_subscribed.clone() };
        let hang = Some(subscribers_hang.clone());
        let received = Filter { frames: Frames::default(), subscribers_hang: hang, has_subscribed };
        for (from, to, way, filter) in [(client, server, requests, sent), (server, client, replies, received)]
        {
            // Replies are small, so Nagle's algorithm would add a delay.
            to.set_nodelay(true).expect("a connection");
            let (pieces, queue) = sync_channel(QUEUE);
            let (from, to, is_cut) = (clone(from), clone(to), Arc::clone(&is_cut));
            let (reads, writes) = (Arc::clone(way), Arc::clone(way));
            threads.push(thread::spawn(move || read(from, &reads, filter, &pieces)));
            threads.push(thread::spawn(move || write(to, &writes, &queue, &is_cut)));
        }
        Self { is_cut, streams: [clone(client), clone(server)], threads }
    }

    /// Whether both sides have closed it.
    pub(super) fn is_over(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.is_cut.store(true, Ordering::SeqCst);
        for stream in &self.streams {
            // It fails only if the peer has closed it already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        for thread in self.threads.drain(..) {
            // It may be parked until a piece is due.
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

fn clone(stream: &TcpStream) -> TcpStream {
    stream.try_clone().expect("a file descriptor")
}

/// What of one direction of a link is forwarded.
struct Filter {
    frames: Frames,
    /// Whether nothing is, once the client has subscribed. None for what the client sends.
    subscribers_hang: Option<Arc<AtomicBool>>,
    has_subscribed: Arc<AtomicBool>,
}

impl Filter {
    fn pass(&mut self, way: &Direction, piece: &[u8]) -> Vec<u8> {
        match &self.subscribers_hang {
            None if piece.windows(9).any(|word| word == b"SUBSCRIBE") => {
                self.has_subscribed.store(true, Ordering::SeqCst);
            }
            Some(hang) if hang.load(Ordering::SeqCst) && self.has_subscribed.load(Ordering::SeqCst) => {
                way.dropped.fetch_add(1, Ordering::SeqCst);
                return Vec::new();
            }
            _ => {}
        }
        way.filter(&mut self.frames, piece)
    }
}

fn read(mut from: TcpStream, way: &Direction, mut filter: Filter, pieces: &SyncSender<(Due, Vec<u8>)>) {
    let mut buffer = vec![0; PIECE];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        let piece = filter.pass(way, &buffer[..length]);
        if !piece.is_empty() && pieces.send((way.due(), piece)).is_err() {
            return;
        }
    }
}

fn write(mut to: TcpStream, way: &Direction, queue: &Receiver<(Due, Vec<u8>)>, is_cut: &AtomicBool) {
    for (due, piece) in queue {
        while let Some(remaining) = way.remaining(due) {
            if is_cut.load(Ordering::SeqCst) {
                return;
            }
            thread::park_timeout(remaining);
        }
        if to.write_all(&piece).is_err() {
            break;
        }
    }
    // The reader sees the end of the stream; the other direction stays open.
    let _ = to.shutdown(Shutdown::Write);
}

/// Ignores poisoning: the thread that panicked has reported the failure.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
