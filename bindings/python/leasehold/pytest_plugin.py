"""Fixtures for the tests of programs that use leasehold. ``pytest_plugins = ["leasehold.pytest_plugin"]`` loads them.

    def test_ship(leasehold_client):
        with leasehold_client.lock("orders:42"):
            with pytest.raises(Busy):
                ship(42, locks=leasehold_client)

    def test_ship_stops_when_the_lease_is_lost(leasehold_store):
        locks = leasehold.connect(leasehold_store.url)
        shipping = Shipping(42, locks)      # Acquires the lock.
        leasehold_store.suspend(60)         # Takes no real time.
        with pytest.raises(leasehold.LeaseLost):
            shipping.go_on()
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._client import Client
    from .testing import TestStore


@pytest.fixture
def leasehold_url() -> str:
    """The address of a store of its own for each test, in this process: all clients of this address share it."""
    return f"memory:test-{secrets.token_hex(8)}"


@pytest.fixture
def leasehold_client(leasehold_url: str) -> Iterator[Client]:
    """A client of `leasehold_url`, which is closed at the end of the test."""
    from ._client import connect

    with connect(leasehold_url) as client:
        yield client


@pytest.fixture
def leasehold_store() -> Iterator[TestStore]:
    """A store whose clock the test moves. Clients of its ``url`` are those of one store."""
    from .testing import TestStore

    store = TestStore()
    yield store
    # What the test has left open can be closed.
    store.set_reachable(True)
