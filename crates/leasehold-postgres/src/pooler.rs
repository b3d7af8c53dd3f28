//! Whether a pooler is in between.
//!
//! A server names its process when a session begins, so that the client can cancel. A pooler does not pass that on, because it may
//! use another session for each transaction: it names an invented process. So the process that answers is not the one that was named.
//! Sessions that follow each other show less: with other clients at the pooler any of them may be the same, or not.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use leasehold_core::Failure;
use leasehold_store::StoreError;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};

use super::conn::Conn;
use super::dialer::Dialer;
use super::error::{damaged, explain};
use super::pinned::Pinned;

/// Whether another process answers than the one that was named when the connection was made.
pub(super) async fn is_between(conn: &Conn) -> Result<bool, StoreError> {
    let named = named_process(conn).await?;
    Ok(conn.value(&Pinned::new("SELECT pg_backend_pid()")).await? != named.to_string())
}

/// Refuses a pooler in statement mode. It has no transactions, so a command would be done in part: the lock would be held, and
/// the client would not know.
pub(super) async fn try_transaction(conn: &Conn) -> Result<(), StoreError> {
    if conn.begin().await.is_ok() {
        return conn.roll_back().await.map_err(|error| explain(error, false));
    }
    let message = "a pooler in statement mode is in between, and locks need transactions: set pool_mode = transaction there, or \
        name the server itself";
    Err(StoreError::new(Failure::NotSent, message))
}

/// What a pooler gives a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// A session of its own, until it disconnects.
    Session,
    /// A session for each transaction.
    Transaction,
}

/// How often a session that another connection had is asked for. A pooler gives the one that it has used last.
const TRIALS: u32 = 4;

/// Which mode the pooler is in: whether a session that a connected client has used serves another one.
pub(super) async fn mode(dialer: &Dialer) -> Result<Mode, StoreError> {
    let pid = Pinned::new("SELECT pg_backend_pid()");
    let (one, other) = (dialer.connect(None).await?, dialer.connect(None).await?);
    for _ in 0..TRIALS {
        let first = one.value(&pid).await?;
        other.begin().await.map_err(|error| explain(error, false))?;
        let second = other.value(&pid).await?;
        let again = one.value(&pid).await?;
        other.roll_back().await.map_err(|error| explain(error, false))?;
        if first == second || first != again {
            return Ok(Mode::Transaction);
        }
    }
    Ok(Mode::Session)
}

/// The driver does not tell which process was named. It writes it into a request to cancel, which is not sent here.
async fn named_process(conn: &Conn) -> Result<i32, StoreError> {
    let written = Arc::new(Mutex::new(Vec::new()));
    let request = conn.cancel_token().cancel_query_raw(Recorder(written.clone()), NoHandshake).await;
    request.map_err(|error| explain(error, false))?;
    let written = written.lock().unwrap_or_else(PoisonError::into_inner);
    // Its length, its code, the process and a secret, of four bytes each.
    let process = written.last_chunk::<8>().and_then(|end| end.first_chunk::<4>());
    process.map(|bytes| i32::from_be_bytes(*bytes)).ok_or_else(|| damaged("a request to cancel"))
}

/// Keeps what is written. It is never sent.
struct Recorder(Arc<Mutex<Vec<u8>>>);

impl AsyncWrite for Recorder {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Recorder {
    /// Agrees to TLS, if that is asked for.
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        buffer.put_slice(b"S");
        Poll::Ready(Ok(()))
    }
}

impl TlsStream for Recorder {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

struct NoHandshake;

impl TlsConnect<Recorder> for NoHandshake {
    type Stream = Recorder;
    type Error = Infallible;
    type Future = Ready<Result<Recorder, Infallible>>;

    fn connect(self, stream: Recorder) -> Self::Future {
        ready(Ok(stream))
    }
}
