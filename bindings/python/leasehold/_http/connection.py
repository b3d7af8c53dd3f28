"""HTTP/1.1 over the streams of asyncio: one request after another on a connection, and connections that are used again.

This speaks to `leasehold serve` and to proxies in front of it. It follows no redirects, keeps no cookies and asks no proxy of the environment.
"""

import asyncio
import os
import socket
import ssl
import stat
import struct
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from .address import Server
from .clock import now

MAX_HEAD = 64 * 1024
MAX_BODY = 256 * 1024 * 1024

# A server closes a connection that was silent for 20 s.
MAX_IDLE = 10.0

CONNECT_LIMIT = 5.0

# As the system allows.
MAX_LINKS = 40


class ProtocolError(Exception):
    """What came is no HTTP."""


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes


class Delivery:
    """Whether a request may have reached a server, though it was not answered."""

    __slots__ = ("is_possible",)

    def __init__(self) -> None:
        self.is_possible = False


def check_user(sock: socket.socket, path: str) -> None:
    """Refuses a server of another user, who has taken the name of the socket, before anything is sent to it.

    The server is of this user, of root, or of the folder's owner, if nobody else could have made that folder, or a link on the way to it.
    """
    allowed = {0, os.geteuid(), _owner_of(path)}
    user = _user_of(sock)
    if user not in allowed:
        raise PermissionError(f"{path}: the server there is of another user (uid {user})")


def _owner_of(path: str) -> int:
    """The user who alone decides what is in the file's folder, and where the way there leads; or root."""
    steps = list(_steps(path))
    folders = [found for found in steps if stat.S_ISDIR(found.st_mode)]
    owner = folders[-1].st_uid
    is_safe = not any(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for found in folders)
    return owner if is_safe and all(found.st_uid in (0, owner) for found in steps) else 0


def _steps(path: str) -> Iterator[os.stat_result]:
    """Each folder and link that the system goes through on the way to a file."""
    parts = deque(part for part in os.path.join(os.getcwd(), path).split("/")[:-1] if part)
    folder, links = "/", 0
    yield os.lstat(folder)
    while parts:
        part = parts.popleft()
        if part == "..":
            folder = os.path.dirname(folder)
        if part in (".", ".."):
            continue
        step = os.path.join(folder, part)
        found = os.lstat(step)
        yield found
        if not stat.S_ISLNK(found.st_mode):
            folder = step
            continue
        links += 1
        if links > MAX_LINKS:
            raise PermissionError(f"{path}: there are too many links on the way")
        target = os.readlink(step)
        if target.startswith("/"):
            folder = "/"
        parts.extendleft(reversed([part for part in target.split("/") if part]))


def _user_of(sock: socket.socket) -> int:
    """The user of the process that listens."""
    if hasattr(socket, "SO_PEERCRED"):
        _, user, _ = struct.unpack("=iIi", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("=iIi")))
    else:  # LOCAL_PEERCRED of macOS and BSD: the version, the user, and more
        _, user = struct.unpack_from("=II", sock.getsockopt(0, 1, 128))
    return int(user)


class Connections:
    """The connections of a client to one server."""

    def __init__(self, server: Server, tls: ssl.SSLContext | None, sockets: set[socket.socket]) -> None:
        self._server = server
        self._tls = tls
        # All open sockets of the process, which a child closes after a fork.
        self._sockets = sockets
        self._idle: deque[_Connection] = deque()
        self._pruning: asyncio.TimerHandle | None = None

    async def send(self, head: bytes, body: bytes, delivery: Delivery, *, is_repeatable: bool) -> Response:
        """Sends a request. One that may not arrive twice gets a new connection: an old one may be at its end."""
        while is_repeatable and (connection := self._take()) is not None:
            try:
                return await self._exchange(connection, head, body, delivery)
            except (OSError, EOFError):
                continue
        return await self._exchange(await self._open(), head, body, delivery)

    def _take(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable():
                return connection
            connection.close()
        return None

    async def _exchange(self, connection: "_Connection", head: bytes, body: bytes, delivery: Delivery) -> Response:
        is_whole = False
        delivery.is_possible = True
        try:
            response, is_whole = await connection.exchange(head, body)
            return response
        finally:
            # A connection whose answer is still to come is of no use, and its end tells the server that nobody waits.
            if is_whole:
                self._keep(connection)
            else:
                connection.close()

    def _keep(self, connection: "_Connection") -> None:
        self._idle.append(connection)
        if self._pruning is None:
            self._pruning = asyncio.get_running_loop().call_later(MAX_IDLE, self._prune)

    def _prune(self) -> None:
        """Closes connections that were not used for a while, before their server does."""
        usable = [connection for connection in self._idle if connection.is_usable()]
        for connection in self._idle:
            if connection not in usable:
                connection.close()
        self._idle = deque(usable)
        self._pruning = asyncio.get_running_loop().call_later(MAX_IDLE, self._prune) if usable else None

    async def _open(self) -> "_Connection":
        async with asyncio.timeout(CONNECT_LIMIT):
            last: OSError = OSError(f"no address for {self._server.host}")
            for family, address in await self._addresses():
                try:
                    return await self._open_at(family, address)
                except OSError as error:
                    last = error
            raise last

    async def _open_at(self, family: int, address: object) -> "_Connection":
        loop = asyncio.get_running_loop()
        sock = socket.socket(family, socket.SOCK_STREAM)
        self._sockets.add(sock)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)  # type: ignore[arg-type]
            if self._server.socket is not None:
                check_user(sock, self._server.socket)
            name = self._server.host if self._tls is not None else None
            streams = await asyncio.open_connection(sock=sock, ssl=self._tls, server_hostname=name, limit=MAX_HEAD)
        except BaseException:
            self._sockets.discard(sock)
            sock.close()
            raise
        return _Connection(*streams, sock, self._sockets)

    async def _addresses(self) -> list[tuple[int, object]]:
        if self._server.socket is not None:
            return [(socket.AF_UNIX, self._server.socket)]
        host, port = self._server.host, self._server.port
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                socket.inet_pton(family, host)
            except OSError:
                continue
            return [(family, (host, port))]
        return await _resolve(host, port)

    def close(self) -> None:
        if self._pruning is not None:
            self._pruning.cancel()
            self._pruning = None
        while self._idle:
            self._idle.pop().close()


async def _resolve(host: str, port: int) -> list[tuple[int, object]]:
    """Looks up a host name in a daemon thread: those of an executor refuse work, or hold up the exit, once the main thread has ended."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[tuple[int, object]]] = loop.create_future()

    def settle(found: list[tuple[int, object]], error: OSError | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(found)
        else:
            future.set_exception(error)

    def look_up() -> None:
        found: list[tuple[int, object]] = []
        failure = None
        try:
            found = [(entry[0], entry[4]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except OSError as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, found, failure)
        except RuntimeError:
            pass  # the loop has ended meanwhile

    try:
        threading.Thread(target=look_up, name="leasehold-resolve", daemon=True).start()
    except RuntimeError:  # no new thread at the end of the interpreter, no daemons in a sub-interpreter
        look_up()
    return await future


class _Connection:
    __slots__ = ("_reader", "_writer", "_sock", "_sockets", "_used")

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        sock: socket.socket,
        sockets: set[socket.socket],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._sock = sock
        self._sockets = sockets
        self._used = now()

    def is_usable(self) -> bool:
        is_over = self._reader.at_eof() or self._reader.exception() is not None or self._writer.is_closing()
        return not is_over and now() - self._used < MAX_IDLE

    async def exchange(self, head: bytes, body: bytes) -> tuple[Response, bool]:
        """The response, and whether another request may follow."""
        self._writer.write(head + body)
        status, headers, is_1_0 = await self._read_head()
        while 100 <= status < 200:
            status, headers, is_1_0 = await self._read_head()
        content, is_delimited = await self._read_body(status, headers)
        self._used = now()
        is_last = is_1_0 or not is_delimited or "close" in headers.get("connection", "").lower()
        return Response(status, headers, content), not is_last

    async def _read_head(self) -> tuple[int, dict[str, str], bool]:
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise ProtocolError("the head of the answer is too large") from None
        first, *lines = head[:-4].decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        code = rest[:3]
        if not version.startswith("HTTP/1.") or not code.isascii() or not code.isdigit():
            raise ProtocolError("the answer is no HTTP/1.1")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return int(code), headers, version == "HTTP/1.0"

    async def _read_body(self, status: int, headers: dict[str, str]) -> tuple[bytes, bool]:
        """The body, and whether its end is known by other means than that of the connection."""
        if status in (204, 304):
            return b"", True
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return await self._read_chunks(), True
        length = headers.get("content-length")
        if length is None:
            return await self._read_to_end(), False
        if not length.isascii() or not length.isdigit() or int(length) > MAX_BODY:
            raise ProtocolError("the answer has no valid length")
        return await self._reader.readexactly(int(length)), True

    async def _read_chunks(self) -> bytes:
        parts: list[bytes] = []
        total = 0
        while True:
            line = await self._read_line()
            try:
                size = int(line.partition(b";")[0], 16)
            except ValueError:
                raise ProtocolError("the answer has an invalid chunk") from None
            total += size
            if not 0 <= size or total > MAX_BODY:
                raise ProtocolError("the answer has an invalid chunk")
            if size == 0:
                while await self._read_line():
                    pass
                return b"".join(parts)
            parts.append(await self._reader.readexactly(size))
            await self._read_line()

    async def _read_line(self) -> bytes:
        try:
            return (await self._reader.readuntil(b"\r\n"))[:-2]
        except asyncio.LimitOverrunError:
            raise ProtocolError("a line of the answer is too long") from None

    async def _read_to_end(self) -> bytes:
        content = bytearray()
        while part := await self._reader.read(64 * 1024):
            content += part
            if len(content) > MAX_BODY:
                raise ProtocolError("the answer is too large")
        return bytes(content)

    def close(self) -> None:
        self._sockets.discard(self._sock)
        # At once: what was not written has no reader any more, and a handshake of the end would wait for the server.
        self._writer.transport.abort()
