//! The certificate for TLS. It is read again when its files change, so that a rotation needs no restart.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::task::AbortOnDropHandle;

use crate::config::{Notices, Tls};
use crate::stamp::FileStamp;

/// The certificate of a server.
pub(crate) struct Certificate {
    state: Mutex<State>,
    handshakes: Handshakes,
    notices: Notices,
}

struct State {
    files: Tls,
    acceptor: TlsAcceptor,
    /// Of the files when they were read last, whether they could be used or not.
    stamps: [FileStamp; 2],
}

impl Certificate {
    pub(crate) fn read(files: &Tls, notices: Notices) -> Result<Self, String> {
        // Before the files: a change while they are read is a change.
        let found = stamps(files);
        let acceptor = acceptor(files)?;
        let handshakes = Handshakes::start().map_err(|error| format!("no thread for handshakes: {error}"))?;
        let state = Mutex::new(State { files: files.clone(), acceptor, stamps: found });
        Ok(Self { state, handshakes, notices })
    }

    /// Does the server's part of a handshake. Cancel safe: the connection is closed.
    pub(crate) async fn accept(self: Arc<Self>, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let runtime = self.handshakes.0.as_ref().map(|runtime| runtime.handle().clone());
        let runtime = runtime.ok_or_else(|| io::Error::other("the server is stopping"))?;
        let handshake = runtime.spawn(async move { self.acceptor().accept(stream).await });
        AbortOnDropHandle::new(handshake).await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// For one handshake, with the files as they are now. If they can't be used, with those before.
    fn acceptor(&self) -> TlsAcceptor {
        self.refresh();
        self.state().acceptor.clone()
    }

    /// Reads the files again if they have changed. Those that can't be used are reported once, and read again when they have changed
    /// again.
    pub(crate) fn refresh(&self) {
        let mut state = self.state();
        let files = state.files.clone();
        let found = stamps(&files);
        if found == state.stamps {
            return;
        }
        state.stamps = found;
        match acceptor(&files) {
            Ok(acceptor) => {
                state.acceptor = acceptor;
                self.notices.tell(&format!("{}: the new certificate is in use", files.certificate.display()));
            }
            Err(what) => self.notices.tell(&format!("{what}; the certificate before stays in use")),
        }
    }

    /// Reads these files in place of those before, which stay in use if these can't be used.
    pub(crate) fn replace(&self, files: &Tls) -> Result<(), String> {
        let found = stamps(files);
        let acceptor = acceptor(files)?;
        *self.state() = State { files: files.clone(), acceptor, stamps: found };
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread for handshakes. Every new connection makes the server compute a signature; on this thread the signatures do not delay the
/// requests of open connections.
struct Handshakes(Option<Runtime>);

impl Handshakes {
    fn start() -> io::Result<Self> {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(1).thread_name("handshakes").enable_all().build().map(Some).map(Self)
    }
}

impl Drop for Handshakes {
    fn drop(&mut self) {
        // It may be dropped in a task, which must not wait for it.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

fn stamps(files: &Tls) -> [FileStamp; 2] {
    [&files.certificate, &files.key].map(|path| FileStamp::of(path))
}

/// Reads a certificate and its key.
fn acceptor(tls: &Tls) -> Result<TlsAcceptor, String> {
    let unreadable = |path: &Path, what: String| format!("{}: {what}", path.display());
    for path in [&tls.certificate, &tls.key] {
        // It would be waited for.
        if fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo()) {
            return Err(unreadable(path, "this is a pipe, and must be a file".to_owned()));
        }
    }
    let certificates = CertificateDer::pem_file_iter(&tls.certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| unreadable(&tls.certificate, format!("no certificate can be read: {error}")))?;
    if certificates.is_empty() {
        return Err(unreadable(&tls.certificate, "it has no certificate in PEM form".to_owned()));
    }
    let key = PrivateKeyDer::from_pem_file(&tls.key)
        .map_err(|error| unreadable(&tls.key, format!("no private key can be read: {error}")))?;
    let unusable = |error: rustls::Error| {
        unreadable(&tls.certificate, format!("it can't be used with {}: {error}", tls.key.display()))
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(unusable)?.with_no_client_auth();
    let mut config = builder.with_single_cert(certificates, key).map_err(unusable)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
