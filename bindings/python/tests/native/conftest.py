"""Stores of the native engine: memory, a file of SQLite, and a Redis server that the tests start on a Unix socket."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import leasehold

from over_http.servers import redis_program

LIMIT = 60.0
"""Seconds that nothing in these tests takes on a machine that works, however busy it is."""


def until(is_true: Callable[[], object], what: str) -> None:
    """Waits until this is true."""
    give_up = time.monotonic() + LIMIT
    while not is_true():
        assert time.monotonic() < give_up, what
        time.sleep(0.005)


class Redis:
    """A server of Redis on a Unix socket."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        arguments = ["--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no", "--dir", str(folder)]
        self.process = subprocess.Popen([redis_program(), *arguments], stdout=subprocess.DEVNULL)
        until(self._answers, "the server does not answer")

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(LIMIT)
                connection.connect(str(self.socket))
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False

    @property
    def url(self) -> str:
        return f"redis+unix://{self.socket}"

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.thaw()
        self.process.kill()
        self.process.wait()


@contextmanager
def running_redis() -> Iterator[Redis]:
    folder = Path(tempfile.mkdtemp(prefix="leasehold-py-"))
    server = Redis(folder)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Redis]:
    """A server for all tests that leave it alone."""
    with running_redis() as server:
        yield server


@pytest.fixture
def own_redis() -> Iterator[Redis]:
    """A server that a test may freeze."""
    with running_redis() as server:
        yield server


@pytest.fixture(params=["memory", "sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a store that is this test's own, or whose names must be."""
    match request.param:
        case "memory":
            return f"memory:{request.node.name}"
        case "sqlite":
            return f"sqlite:{tmp_path}/locks.db"
        case _:
            server: Redis = request.getfixturevalue("redis_server")
            return server.url


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    return f"{request.node.name}:{time.monotonic_ns()}"


@pytest.fixture
def client(url: str) -> Iterator[leasehold.Client]:
    with leasehold.connect(url) as client:
        yield client


@pytest.fixture
def other(url: str) -> Iterator[leasehold.Client]:
    """Another client of the same store."""
    with leasehold.connect(url) as client:
        yield client


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1])


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
