"""The fixtures of `leasehold.pytest_plugin`."""

import pytest

import leasehold
from leasehold.testing import TestStore

pytest_plugins = ["leasehold.pytest_plugin"]


def test_clients_of_the_address_share_a_store(leasehold_client: leasehold.Client, leasehold_url: str) -> None:
    with leasehold.connect(leasehold_url) as other, leasehold_client.lock("a"):
        assert other.lock("a").try_acquire() is None


@pytest.mark.parametrize("number", [1, 2])
def test_each_test_has_a_store_of_its_own(leasehold_client: leasehold.Client, number: int) -> None:
    lease = leasehold_client.lock("left-behind").try_acquire()
    assert lease is not None
    leasehold_client.close()


def test_clock_of_a_store_is_moved_by_the_test(leasehold_store: TestStore) -> None:
    with leasehold.connect(leasehold_store.url) as client:
        lease = client.lock("a", ttl=10).acquire()
        leasehold_store.advance(60)
        lease.check()
        leasehold_store.suspend(60)
        with pytest.raises(leasehold.LeaseLost):
            lease.check()


def test_client_of_a_store_that_is_not_reachable_can_be_left_open(leasehold_store: TestStore) -> None:
    client = leasehold.connect(leasehold_store.url)
    client.lock("a").acquire().release()
    leasehold_store.set_reachable(False)
    with pytest.raises(leasehold.Unavailable):
        client.lock("a").try_acquire()
