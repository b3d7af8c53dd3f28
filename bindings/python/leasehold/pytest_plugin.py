"""Fixtures for the tests of programs that use leasehold. pytest loads them with the package.

    def test_ship(leasehold_client):
        with leasehold_client.lock("orders:42"):
            with pytest.raises(Busy):
                ship(42, locks=leasehold_client)
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._client import Client


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
