"""The fixtures of `leasehold.pytest_plugin`."""

import pytest

import leasehold

pytest_plugins = ["leasehold.pytest_plugin"]


def test_clients_of_the_address_share_a_store(leasehold_client: leasehold.Client, leasehold_url: str) -> None:
    with leasehold.connect(leasehold_url) as other, leasehold_client.lock("a"):
        assert other.lock("a").try_acquire() is None


@pytest.mark.parametrize("number", [1, 2])
def test_each_test_has_a_store_of_its_own(leasehold_client: leasehold.Client, number: int) -> None:
    lease = leasehold_client.lock("left-behind").try_acquire()
    assert lease is not None
    leasehold_client.close()
