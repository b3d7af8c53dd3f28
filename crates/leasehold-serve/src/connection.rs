//! One connection: TLS, HTTP, and the limits that a slow or hostile client meets.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::HeaderValue;
use axum::http::header::CONNECTION;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::timeout;
use tokio_io_timeout::TimeoutStream;
use tokio_util::task::TaskTracker;

use crate::api::Transport;
use crate::app::App;
use crate::caller::Caller;
use crate::delivery::Delivery;
use crate::listener::{Listener, Stream};
use crate::metrics::ConnectionGauge;
use crate::places::{Peer, Places};
use crate::presence::{Presence, WatchedStream};
use crate::problem::{Code, Problem};
use crate::tls::Certificate;
use crate::tokens::Tokens;

/// The pause after an accept that failed, usually because no descriptor is free.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);

/// The size of a connection's buffer, and so of a request's header.
const BUFFER: usize = 16 * 1024;

/// Why a connection is closed whose place another one has taken.
const EVICTED: &str = "evicted";

/// How long a connection that the server has closed stays open, so that its client can read the last answer.
const LINGER: Duration = Duration::from_secs(1);

/// Accepts connections until the server stops.
pub(crate) async fn accept(listener: Listener, app: Arc<App>, router: Router, open: TaskTracker) {
    let places = Places::new(&app.limits);
    let next = async || {
        // Those that wait to be accepted keep their order.
        let room = if listener.is_tcp() { places.room().await } else { None };
        (listener.accept().await, room)
    };
    loop {
        let (accepted, room) = tokio::select! {
            accepted = next() => accepted,
            () = app.stopping.cancelled() => return,
        };
        let (app, router) = (app.clone(), router.clone());
        match accepted {
            Ok(Stream::Unix(stream)) => match places.owner() {
                Some(place) => drop(open.spawn(serve_owner(stream, app, router, place))),
                None => {
                    app.metrics.refused("too_many");
                    if let Some(place) = places.closing() {
                        open.spawn(refuse(stream, place));
                    }
                }
            },
            Ok(Stream::Tcp(stream, address, tls)) => {
                let peer = Arc::new(places.stranger(address, room));
                open.spawn(serve_peer(stream, tls, app, router, peer));
            }
            Err(_) => {
                app.metrics.refused("accept_failed");
                places.make_room();
                tokio::time::sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
}

/// A connection of the Unix socket.
async fn serve_owner(stream: UnixStream, app: Arc<App>, router: Router, _place: OwnedSemaphorePermit) {
    let _open = ConnectionGauge::open();
    let Ok(caller) = owner(&stream) else { return app.metrics.refused("accept_failed") };
    serve(stream, &app, router, Transport::Unix(caller)).await;
}

/// The process at the other end.
fn owner(stream: &UnixStream) -> io::Result<Caller> {
    let peer = stream.peer_cred()?;
    Ok(Caller::of_socket(peer.uid(), peer.pid()))
}

/// A connection over TCP.
async fn serve_peer(
    stream: TcpStream,
    tls: Option<Arc<Certificate>>,
    app: Arc<App>,
    router: Router,
    peer: Arc<Peer>,
) {
    let _open = ConnectionGauge::open();
    let Some(tls) = tls else { return serve(stream, &app, router, Transport::Tcp(peer)).await };
    let accepted = tokio::select! {
        accepted = tls.accept(stream) => accepted.map_err(|_| "tls"),
        () = peer.evicted() => Err("evicted"),
        () = peer.overdue() => Err("slow"),
    };
    match accepted {
        Ok(stream) => serve(stream, &app, router, Transport::Tcp(peer)).await,
        Err(reason) => app.metrics.refused(reason),
    }
}

/// Tells a connection beyond the limit that it is one.
async fn refuse(mut stream: UnixStream, _place: OwnedSemaphorePermit) {
    let problem = Problem::new(Code::TooManyConnections, "too many connections are open");
    close_with(&mut stream, &problem).await;
}

/// Returns the leases whose answers were not written, when the connection ends.
struct Undelivered {
    app: Arc<App>,
    delivery: Delivery,
}

impl Drop for Undelivered {
    fn drop(&mut self) {
        self.delivery.end(&self.app.client);
    }
}

/// How a connection ended that the server has not just dropped.
enum End {
    /// hyper has ended it.
    Http(hyper::Result<()>),
    /// It is closed for this reason.
    Closed(&'static str),
}

/// Answers the requests of a connection, one after the other. If the client closes it, the request's future is dropped.
async fn serve(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    app: &Arc<App>,
    router: Router,
    transport: Transport,
) {
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(app.limits.send_timeout));
    let (presence, delivery) = (Presence::default(), Delivery::default());
    let mut stream = WatchedStream::new(Box::pin(stream), presence.clone(), delivery.clone());
    let _undelivered = Undelivered { app: app.clone(), delivery: delivery.clone() };
    let peer = transport.peer().cloned();
    // From before the first request, so that no change is missed.
    let tokens = app.tokens.subscribe();
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        answer(request, router.clone(), transport.clone(), presence.clone(), delivery.clone())
    });
    let mut http = http1::Builder::new();
    // A client that sends no more may still wait for its answer. Whether it is gone while a request waits, the stream notices.
    http.half_close(true);
    http.timer(TokioTimer::new()).header_read_timeout(app.limits.receive_timeout).max_buf_size(BUFFER);
    let end = {
        let mut connection = std::pin::pin!(http.serve_connection(TokioIo::new(stream.clone()), service));
        tokio::select! {
            // Before the connection, so that a request whose client is gone is not answered, and after it, so that a request that it begins
            // is watched in the same round.
            biased;
            () = stream.gone() => return,
            result = connection.as_mut() => End::Http(result),
            () = stream.gone() => return,
            reason = closed(peer.as_deref(), tokens) => End::Closed(reason),
            () = app.stopping.cancelled() => {
                connection.as_mut().graceful_shutdown();
                End::Http(connection.await)
            }
        }
    };
    match end {
        End::Http(result) => {
            let finished = finish(&mut stream, app, result);
            let Some(peer) = peer else { return finished.await };
            peer.leaves();
            tokio::select! {
                () = finished => {}
                () = peer.evicted() => {}
            }
        }
        End::Closed(reason) => {
            app.metrics.refused(reason);
            let Some(peer) = peer.filter(|peer| reason == EVICTED && peer.is_silent()) else { return };
            let Some(_place) = peer.closing() else { return };
            let problem =
                Problem::new(Code::TooManyConnections, "too many connections without a token are open");
            close_with(&mut stream, &problem).await;
        }
    }
}

/// Answers one request.
async fn answer(
    request: hyper::Request<Incoming>,
    router: Router,
    transport: Transport,
    presence: Presence,
    delivery: Delivery,
) -> Result<Response, Infallible> {
    let peer = transport.peer().cloned();
    if let Some(peer) = &peer {
        peer.asks();
    }
    let mut request = request.map(Body::new);
    request.extensions_mut().insert(transport);
    request.extensions_mut().insert(presence);
    request.extensions_mut().insert(delivery);
    let mut response = tower_service::Service::call(&mut { router }, request).await?;
    // A stranger gets one answer, so that it does not keep its place between requests.
    if peer.is_some_and(|peer| peer.is_stranger()) {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}

/// Waits until the server closes a connection over TCP before its end: the reason.
async fn closed(peer: Option<&Peer>, tokens: watch::Receiver<Tokens>) -> &'static str {
    let Some(peer) = peer else { return std::future::pending().await };
    tokio::select! {
        () = peer.evicted() => EVICTED,
        () = peer.overdue() => "slow",
        () = withdrawn(peer, tokens) => "withdrawn",
    }
}

/// Waits until the connection's token is withdrawn.
async fn withdrawn(peer: &Peer, mut tokens: watch::Receiver<Tokens>) {
    while tokens.changed().await.is_ok() {
        if !peer.is_allowed(&tokens.borrow_and_update()) {
            return;
        }
    }
    std::future::pending::<()>().await;
}

/// Ends a connection that hyper has ended, with the problem that hyper leaves out if the client has sent no HTTP.
async fn finish<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut WatchedStream<S>,
    app: &App,
    result: hyper::Result<()>,
) {
    match result {
        // hyper can't answer what is no HTTP/1 at all, and answers the rest without a body.
        Err(error) if stream.take_bare_answer() || error.is_parse_version_h2() => {
            app.metrics.refused("no_http");
            let problem = if error.is_parse_too_large() {
                Problem::new(
                    Code::HeadTooLarge,
                    format!("a request's head has at most {BUFFER} bytes and 100 lines"),
                )
            } else {
                Problem::new(Code::InvalidRequest, format!("this is no request of HTTP/1.1: {error}"))
            };
            close_with(stream, &problem).await;
        }
        // The client has gone.
        Err(error) if error.is_incomplete_message() => {}
        _ => linger(stream).await,
    }
}

/// Answers outside of hyper, and closes.
async fn close_with(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), problem: &Problem) {
    if let Ok(Ok(())) = timeout(LINGER, stream.write_all(problem.to_answer().as_bytes())).await {
        linger(stream).await;
    }
}

/// Closes a connection once its client has, or after a moment. Bytes that arrive at a closed socket would reset the connection, and
/// the client could lose the answer that it has not read yet.
async fn linger(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    let mut ignored = [0; 4096];
    let closed = async {
        // With TLS, this writes.
        let _ = stream.shutdown().await;
        while matches!(stream.read(&mut ignored).await, Ok(1..)) {}
    };
    let _ = timeout(LINGER, closed).await;
}
