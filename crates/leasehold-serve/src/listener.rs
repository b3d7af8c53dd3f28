//! Listening sockets: a Unix socket that only its owner may use, and TCP with or without TLS.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, SockAddr, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use crate::config::Listen;
use crate::random::random_hex;
use crate::tls::Certificate;

/// A connection whose host is gone is closed after about this time.
const GONE_AFTER: Duration = Duration::from_secs(20);

/// Connections that wait to be accepted; the system may allow fewer.
const BACKLOG: i32 = 4096;

/// A socket that accepts connections.
pub(crate) enum Listener {
    Unix(UnixListener, SocketFile),
    Tcp(TcpListener, Option<Arc<Certificate>>),
}

/// A new connection.
pub(crate) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream, SocketAddr, Option<Arc<Certificate>>),
}

/// Removes the socket's file at the end, unless another server has replaced it.
pub(crate) struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Listener {
    pub(crate) async fn bind(listen: &Listen, tls: Option<&Arc<Certificate>>) -> Result<Self, String> {
        let failed = |what: String| format!("{listen}: {what}");
        match listen {
            Listen::Unix(path) => bind_unix(path).map_err(failed),
            Listen::Tcp(address) => {
                let listener = TcpListener::bind(address).await;
                let listener = listener.map_err(|error| failed(format!("can't listen there: {error}")))?;
                // Strangers that connect faster than they are accepted would keep out the others.
                let _ = SockRef::from(&listener).listen(BACKLOG);
                Ok(Self::Tcp(listener, tls.cloned()))
            }
        }
    }

    /// The address, with the port that the system has chosen.
    pub(crate) fn address(&self) -> String {
        match self {
            Self::Unix(_, file) => format!("unix:{}", file.path.display()),
            Self::Tcp(listener, tls) => {
                let scheme = if tls.is_some() { "https" } else { "http" };
                let address =
                    listener.local_addr().map_or_else(|_| "?".to_owned(), |found| found.to_string());
                format!("{scheme}://{address}")
            }
        }
    }

    pub(crate) fn is_tcp(&self) -> bool {
        matches!(self, Self::Tcp(..))
    }

    /// The next connection.
    pub(crate) async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Unix(listener, _) => Ok(Stream::Unix(listener.accept().await?.0)),
            Self::Tcp(listener, tls) => {
                let (stream, peer) = listener.accept().await?;
                let socket = SockRef::from(&stream);
                let keepalive = TcpKeepalive::new().with_time(GONE_AFTER / 2).with_interval(GONE_AFTER / 4);
                // Without them a connection is only slower to answer, or to be found dead.
                let _ = socket.set_tcp_nodelay(true);
                let _ = socket.set_tcp_keepalive(&keepalive);
                #[cfg(target_os = "linux")]
                let _ = socket.set_tcp_user_timeout(Some(GONE_AFTER));
                Ok(Stream::Tcp(stream, peer, tls.clone()))
            }
        }
    }
}

/// Binds a socket that never was open to others: in a folder of its own, from which it is moved to its place.
fn bind_unix(path: &Path) -> Result<Listener, String> {
    // It is bound at another path, which may be shorter.
    std::os::unix::net::SocketAddr::from_pathname(path)
        .map_err(|error| format!("no client can reach it: {error}"))?;
    remove_stale(path)?;
    let shown = |error: io::Error| format!("can't listen there: {error}");
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let random = random_hex()?;
    let folder = parent.join(format!(".{}", &random.as_str()[..8]));
    DirBuilder::new().mode(0o700).create(&folder).map_err(shown)?;
    let temporary = folder.join("s");
    let bound = bind_private(&temporary).and_then(|listener| {
        let inode = fs::symlink_metadata(&temporary)?.ino();
        fs::rename(&temporary, path)?;
        Ok(Listener::Unix(listener, SocketFile { path: path.to_owned(), inode }))
    });
    let _ = fs::remove_file(&temporary);
    let _ = fs::remove_dir(&folder);
    bound.map_err(shown)
}

/// A socket with the mode 0600. On Linux it has it before it has a name: in a folder that others may write, another file could be under
/// that name when the mode is changed.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let private = || Permissions::from_mode(0o600);
    let unnamed = File::from(OwnedFd::from(Socket::new(Domain::UNIX, Type::STREAM, None)?));
    if cfg!(target_os = "linux") {
        unnamed.set_permissions(private())?;
    }
    let socket = Socket::from(OwnedFd::from(unnamed));
    socket.bind(&SockAddr::unix(path)?)?;
    if cfg!(not(target_os = "linux")) {
        fs::set_permissions(path, private())?;
    }
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    UnixListener::from_std(OwnedFd::from(socket).into())
}

/// Whether a server accepts connections there. Does not wait for one whose queue is full.
fn try_connect(path: &Path) -> io::Result<()> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?)
}

/// Removes the socket of a server that was killed. A server that answers is left alone, and so is any other file.
fn remove_stale(path: &Path) -> Result<(), String> {
    let Ok(found) = fs::symlink_metadata(path) else { return Ok(()) };
    if !found.file_type().is_socket() {
        return Err("a file that is not a socket is there: choose another path".to_owned());
    }
    match try_connect(path) {
        Ok(()) => Err("another server listens there: stop it, or choose another path".to_owned()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path)
            .map_err(|error| format!("the socket of an earlier server can't be removed: {error}")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            Err("another server listens there, which accepts no connection: stop it, or choose another path"
                .to_owned())
        }
        Err(error) => {
            Err(format!("a socket is there, perhaps of another server: {error}; choose another path"))
        }
    }
}
