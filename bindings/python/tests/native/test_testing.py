"""`leasehold.testing`: a store whose clock the test moves."""

from __future__ import annotations

import asyncio
import time

import pytest

import leasehold
from leasehold import aio
from leasehold.testing import TestStore

from servers import LIMIT, until

from .conftest import in_thread
from .test_fork import in_child


def test_lease_is_renewed_while_the_clock_moves_and_lost_when_it_jumps() -> None:
    store = TestStore()
    with leasehold.connect(store.url) as client:
        lease = client.lock("a", ttl=10).acquire()
        reasons: list[str] = []
        lease.on_lost(reasons.append)
        began = time.monotonic()
        store.advance(3_600)
        assert not lease.is_lost and 0 < lease.expires_in <= 10
        store.suspend(11)
        assert lease.loss == "expired"
        assert store.elapsed == 3_611
        assert time.monotonic() - began < LIMIT
        until(lambda: reasons == ["expired"], "the callback was not called")


def test_clients_share_the_store_and_have_settings_of_their_own() -> None:
    store = TestStore()
    with leasehold.connect(store.url, ttl=60, label="here", namespace="app") as here, leasehold.connect(store.url) as there:
        with here.lock("a") as lease:
            assert 50 < lease.expires_in <= 60
            assert there.lock("app:a").try_acquire() is None
            assert there.inspect("app:a").holders[0].process.label == "here"
    with pytest.raises(leasehold.InvalidInput, match="ttl"):
        leasehold.connect(store.url, ttl=0.01).list()


def test_wait_ends_when_another_thread_moves_the_clock() -> None:
    store = TestStore()
    with leasehold.connect(store.url) as client, leasehold.connect(store.url) as other, client.lock("a"):
        outcomes: list[Exception] = []

        def wait() -> None:
            try:
                other.lock("a").acquire(wait=600)
            except leasehold.Timeout as error:
                outcomes.append(error)

        thread = in_thread(wait)
        until(lambda: client.inspect("a").waiters, "nobody waits")
        store.advance(599)
        assert not outcomes
        store.advance(2)
        thread.join(LIMIT)
        assert len(outcomes) == 1


def test_tasks_go_on_when_the_clock_moves() -> None:
    async def work() -> None:
        store = TestStore()
        async with asyncio.timeout(LIMIT), aio.connect(store.url) as client, aio.connect(store.url) as other:

            async def hold() -> None:
                async with client.lock("a", ttl=10):
                    await asyncio.Event().wait()

            holding = asyncio.create_task(hold())
            while not (await other.inspect("a")).holders:
                await asyncio.sleep(0)
            waiting = asyncio.create_task(other.lock("a").acquire(wait=60))
            while not (await other.inspect("a")).waiters:
                await asyncio.sleep(0)
            store.suspend(11)
            with pytest.raises(leasehold.LeaseLost):
                await holding
            await (await waiting).release()

    asyncio.run(work())


def test_store_that_is_not_reachable_is_unavailable_and_leases_are_lost() -> None:
    store = TestStore()
    client = leasehold.connect(store.url)
    lease = client.lock("a", ttl=10).acquire()
    store.set_reachable(False)
    with pytest.raises(leasehold.Unavailable):
        client.lock("b").try_acquire()
    assert not lease.is_lost
    store.advance(10)
    assert lease.loss == "expired"
    store.set_reachable(True)
    client.lock("b").acquire().release()
    client.close()


def test_address_ends_with_the_store() -> None:
    store = TestStore()
    url = store.url
    del store
    with pytest.raises(leasehold.InvalidInput, match="no TestStore of this process has this address"):
        leasehold.connect(url).list()


def test_process_ends_although_its_clock_stands_still() -> None:
    from .test_blocking import outcome, run

    script = """
import leasehold
store = leasehold.testing.TestStore()
client, dropped = leasehold.connect(store.url), leasehold.connect(store.url)
held = [client.lock("a").acquire(), dropped.lock("b").acquire()]
store.set_reachable(False)
del dropped, held[1]
print("ends", flush=True)
"""
    code, out, err = outcome(run(script))
    assert (code, out) == (0, "ends\n"), err


def test_store_of_the_parent_fails_in_a_child() -> None:
    store = TestStore()
    client = leasehold.connect(store.url)
    lease = client.lock("a").acquire()

    def child() -> None:
        for use in (lambda: store.advance(60), client.list):
            with pytest.raises(leasehold.ForkedError):
                use()
        own = TestStore()
        with leasehold.connect(own.url) as here:
            here.lock("a").acquire().release()

    in_child(child)
    store.advance(60)
    lease.check()
    lease.release()
    client.close()
