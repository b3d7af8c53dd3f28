//! One connection: TLS, HTTP, and the limits that a slow or hostile client meets.

use std::io::Write as _;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::StatusCode;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_io_timeout::TimeoutStream;

use crate::api::Transport;
use crate::app::App;
use crate::listener::{Listener, Stream};
use crate::metrics::ConnectionGauge;
use crate::presence::{Presence, WatchedStream};
use crate::problem::{Code, Problem};

/// The pause after an accept that failed, usually because no descriptor is free.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);

/// The size of a connection's buffer, and so of a request's header.
const BUFFER: usize = 16 * 1024;

/// The answer to a connection beyond the limit.
static FULL: LazyLock<String> = LazyLock::new(|| {
    let problem = Problem::new(Code::LimitReached, "too many connections are open");
    let body = problem.to_json(StatusCode::SERVICE_UNAVAILABLE);
    format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\nRetry-After: 1\r\n\
         Connection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
});

/// Accepts connections until the server stops.
pub(crate) async fn accept(listener: Listener, app: Arc<App>, router: Router, places: Arc<Semaphore>) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = app.stopping.cancelled() => return,
        };
        let Ok(stream) = accepted else {
            app.metrics.refused("accept_failed");
            tokio::time::sleep(ACCEPT_BACKOFF).await;
            continue;
        };
        match places.clone().try_acquire_owned() {
            Ok(place) => {
                tokio::spawn(connection(stream, app.clone(), router.clone(), place));
            }
            Err(_) => refuse(&app, stream),
        }
    }
}

/// Answers without waiting, as far as the socket takes it.
fn refuse(app: &App, stream: Stream) {
    app.metrics.refused("too_many");
    // The runtime does not know yet that it can write to a new socket, and would not try.
    let _ = match stream {
        Stream::Unix(stream) => stream.into_std().and_then(|mut stream| stream.write(FULL.as_bytes())),
        Stream::Tcp(stream, None) => stream.into_std().and_then(|mut stream| stream.write(FULL.as_bytes())),
        Stream::Tcp(_, Some(_)) => return,
    };
}

async fn connection(stream: Stream, app: Arc<App>, router: Router, _place: OwnedSemaphorePermit) {
    let _open = ConnectionGauge::open();
    match stream {
        Stream::Unix(stream) => serve(stream, &app, router, Transport::Unix).await,
        Stream::Tcp(stream, None) => serve(stream, &app, router, Transport::Tcp).await,
        Stream::Tcp(stream, Some(tls)) => {
            match tokio::time::timeout(app.limits.receive_timeout, tls.accept(stream)).await {
                Ok(Ok(stream)) => serve(stream, &app, router, Transport::Tcp).await,
                _ => app.metrics.refused("tls"),
            }
        }
    }
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
    let presence = Presence::default();
    let stream = WatchedStream::new(Box::pin(stream), presence.clone());
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let (router, presence) = (router.clone(), presence.clone());
        async move {
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(transport);
            request.extensions_mut().insert(presence);
            tower_service::Service::call(&mut { router }, request).await
        }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(app.limits.receive_timeout).max_buf_size(BUFFER);
    let mut connection = std::pin::pin!(http.serve_connection(TokioIo::new(stream.clone()), service));
    tokio::select! {
        // The connection first: a request that it begins is watched in the same round.
        biased;
        // An error is the client's: it has gone, or sent no HTTP, which hyper has answered.
        _ = connection.as_mut() => return,
        () = stream.gone() => return,
        () = app.stopping.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}
