//! Notices that a client has closed its connection while its request waits.
//!
//! hyper looks for the end of a connection only while it has no unread bytes. After a pipelined request, or a newline too much,
//! a client could close its connection and its request would wait on. The stream here reads ahead for hyper while a request
//! waits, up to a limit, and so reaches the end.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::delivery::Delivery;

/// What a client may send while its request waits. One that sends more is cut off, because its end could not be seen.
const MAX_AHEAD: usize = 64 * 1024;

/// The bytes of one read.
const CHUNK: usize = 4096;

/// Whether a request of a connection waits.
#[derive(Clone, Debug, Default)]
pub(crate) struct Presence(Arc<AtomicUsize>);

impl Presence {
    /// Ends the connection, and so the request, if the client closes it before the value is dropped.
    ///
    /// The request's body must have been received: what follows it is kept for the next request.
    pub(crate) fn watch(&self) -> Watched {
        self.0.fetch_add(1, Ordering::Relaxed);
        Watched(self.0.clone())
    }

    fn is_watched(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

/// A request that waits.
pub(crate) struct Watched(Arc<AtomicUsize>);

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

struct State<S> {
    stream: S,
    /// Bytes that hyper has not read yet.
    ahead: Vec<u8>,
    is_closed: bool,
    /// hyper has answered what is no HTTP: an answer without a body, which is left out.
    has_bare_answer: bool,
}

/// A stream of which hyper has one handle, and the connection's task another one. Only this task uses it, so that the lock is
/// free.
pub(crate) struct WatchedStream<S> {
    state: Arc<Mutex<State<S>>>,
    presence: Presence,
    delivery: Delivery,
}

impl<S> Clone for WatchedStream<S> {
    fn clone(&self) -> Self {
        Self { state: self.state.clone(), presence: self.presence.clone(), delivery: self.delivery.clone() }
    }
}

impl<S: AsyncRead + Unpin> WatchedStream<S> {
    pub(crate) fn new(stream: S, presence: Presence, delivery: Delivery) -> Self {
        let state = State { stream, ahead: Vec::new(), is_closed: false, has_bare_answer: false };
        Self { state: Arc::new(Mutex::new(state)), presence, delivery }
    }

    /// Whether hyper has answered what is no HTTP. Its answer has no body, and is left out: the caller writes another one.
    pub(crate) fn take_bare_answer(&mut self) -> bool {
        std::mem::take(&mut self.state().has_bare_answer)
    }

    /// Waits until the client closes the connection, or sends too much, while a request waits.
    ///
    /// The task must poll it after each poll of the connection, which may have begun a request.
    pub(crate) async fn gone(&self) {
        poll_fn(|cx| self.poll_gone(cx)).await;
    }

    fn poll_gone(&self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.presence.is_watched() {
            return Poll::Pending;
        }
        let mut state = self.state();
        while !state.is_closed && state.ahead.len() < MAX_AHEAD {
            let mut chunk = [0; CHUNK];
            let mut buffer = ReadBuf::new(&mut chunk);
            let read = ready!(Pin::new(&mut state.stream).poll_read(cx, &mut buffer));
            if read.is_err() || buffer.filled().is_empty() {
                state.is_closed = true;
            } else {
                state.ahead.extend_from_slice(buffer.filled());
                // hyper was told that there is nothing to read.
                cx.waker().wake_by_ref();
            }
        }
        Poll::Ready(())
    }
}

impl<S> WatchedStream<S> {
    fn state(&self) -> MutexGuard<'_, State<S>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WatchedStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = self.state();
        if state.ahead.is_empty() {
            return if state.is_closed {
                Poll::Ready(Ok(()))
            } else {
                Pin::new(&mut state.stream).poll_read(cx, buffer)
            };
        }
        let count = state.ahead.len().min(buffer.remaining());
        buffer.put_slice(&state.ahead[..count]);
        state.ahead.drain(..count);
        Poll::Ready(Ok(()))
    }
}

/// Whether these bytes are an answer of hyper's own: an error without a body. All errors of this server have one.
fn is_bare_answer(bytes: &[u8]) -> bool {
    let head = bytes.strip_prefix(b"HTTP/1.").unwrap_or_default();
    let is_error = matches!(head, [b'0' | b'1', b' ', b'4', ..]);
    is_error && bytes.windows(BARE.len()).any(|part| part == BARE)
}

const BARE: &[u8] = b"\r\nconnection: close\r\ncontent-length: 0\r\n";

impl<S: AsyncWrite + Unpin> AsyncWrite for WatchedStream<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut state = self.state();
        if is_bare_answer(bytes) {
            state.has_bare_answer = true;
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut state.stream).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.state().stream).poll_flush(cx);
        if matches!(flushed, Poll::Ready(Ok(()))) {
            self.delivery.flushed();
        }
        flushed
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.state();
        if state.has_bare_answer {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut state.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut state = self.state();
        if slices.first().is_some_and(|first| is_bare_answer(first)) {
            state.has_bare_answer = true;
            return Poll::Ready(Ok(slices.iter().map(|slice| slice.len()).sum()));
        }
        Pin::new(&mut state.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.state().stream.is_write_vectored()
    }
}
