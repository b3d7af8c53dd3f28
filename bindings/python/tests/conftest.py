"""The servers of Redis that tests of several folders use."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers import Redis


# A shell's background job ignores it, and so would the programs that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    """A server for all tests that leave it alone."""
    server = Redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Redis]:
    """A server that a test may freeze, or stop."""
    server = Redis(tmp_path)
    yield server
    server.stop()
