//! Tells systemd that the service is ready, as `sd_notify(3)` does: the lock is held and the command runs, or the server listens.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixDatagram;

use crate::output::{Level, message};

/// Sends `READY=1` to the socket that systemd names, if it names one. A service with `Type=notify` counts as started then.
pub(crate) fn ready() {
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET")
        && let Err(error) = send(&socket, b"READY=1")
    {
        message(
            Level::Warn,
            "notify_failed",
            format_args!("the service manager could not be notified: {error}"),
        );
    }
}

fn send(socket: &OsString, text: &[u8]) -> io::Result<()> {
    let sender = UnixDatagram::unbound()?;
    // The command runs already: a service manager that reads nothing must not keep this program from watching over it.
    sender.set_nonblocking(true)?;
    match socket.as_bytes() {
        [b'/', ..] => sender.send_to(text, socket)?,
        [b'@', name @ ..] => send_to_abstract(&sender, name, text)?,
        _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, "NOTIFY_SOCKET is no path")),
    };
    Ok(())
}

#[cfg(target_os = "linux")]
fn send_to_abstract(sender: &UnixDatagram, name: &[u8], text: &[u8]) -> io::Result<usize> {
    use std::os::linux::net::SocketAddrExt as _;

    let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
    sender.send_to_addr(text, &address)
}

#[cfg(not(target_os = "linux"))]
fn send_to_abstract(_: &UnixDatagram, _: &[u8], _: &[u8]) -> io::Result<usize> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "abstract sockets need Linux"))
}
