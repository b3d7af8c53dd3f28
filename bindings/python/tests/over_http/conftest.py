"""Fixtures of the tests that speak to servers of `leasehold serve`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from servers import FakeServer, Proxy, Reply, Serve, free_port

S = TypeVar("S", Serve, Proxy, FakeServer)


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEASEHOLD_HTTP_TOKEN", raising=False)


@pytest.fixture(params=["sqlite", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path}/locks.db"
    return str(request.getfixturevalue("redis_server").url)


class Start:
    """Starts servers that end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Serve | Proxy | FakeServer] = []

    def serve(self, store: str | None = None, *, is_tcp: bool = False, tls: tuple[Path, Path] | None = None) -> Serve:
        store = store or f"sqlite:{self.folder}/locks.db"
        return self._keep(Serve(store, self.folder, port=free_port() if is_tcp else None, tls=tls))

    def proxy(self, ports: list[int], cuts: Callable[[bytes], bool] = lambda request: False) -> Proxy:
        return self._keep(Proxy(ports, cuts))

    def fake(self, reply: Callable[[str, dict[str, Any]], Reply | None]) -> FakeServer:
        return self._keep(FakeServer(reply))

    def _keep(self, server: S) -> S:
        self.started.append(server)
        return server


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    starter = Start(tmp_path)
    yield starter
    for server in reversed(starter.started):
        server.stop()


@pytest.fixture
def serve(start: Start, store: str) -> Serve:
    """A server on a Unix socket, over each kind of store."""
    return start.serve(store)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A lock that no other test uses."""
    return str(request.node.name)
