"""Stores of the native engine: memory, a file of SQLite, and a server of Redis."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import leasehold

from servers import Redis


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
