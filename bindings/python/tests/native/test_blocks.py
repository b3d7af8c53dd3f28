"""Which block of a shared handle ends: those of generators end in other threads and tasks than they have begun."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import leasehold
import leasehold.aio

from servers import until


class Threads:
    """Each call is made in a thread of its own, one after the other."""

    def __init__(self) -> None:
        self.pools = [ThreadPoolExecutor(1) for _ in range(4)]

    def __call__(self, number: int, call: Any, *args: Any) -> Any:
        return self.pools[number].submit(call, *args).result()


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads()
    yield threads
    for pool in threads.pools:
        pool.shutdown()


@pytest.fixture
def client() -> Iterator[leasehold.Client]:
    with leasehold.connect("memory:", ttl=10) as client:
        yield client


def request(lock: Any) -> Iterator[Any]:
    """As a dependency of a web framework."""
    with lock as lease:
        yield lease


def end(block: Iterator[Any]) -> None:
    next(block, None)


def test_block_that_ends_in_another_thread_is_its_own(client: leasehold.Client, threads: Threads) -> None:
    orders = client.lock("orders", max_hold=0.2)
    first, second = request(orders), request(orders)
    lost = threads(0, next, first)
    until(lambda: lost.is_lost)
    held = threads(1, next, second)
    with pytest.raises(leasehold.LeaseLost):
        threads(2, end, first)
    assert not held.is_lost
    held.check()
    assert client.lock("orders", wait=0).try_acquire() is None
    threads(3, end, second)
    with client.lock("orders", wait=5):
        pass


def test_blocks_of_one_thread_end_in_any_order(client: leasehold.Client, threads: Threads) -> None:
    permits = client.semaphore("permits", permits=2)
    first, second = request(permits), request(permits)
    one, two = threads(0, next, first), threads(0, next, second)
    threads(1, end, first)
    assert "released" in repr(one)
    assert "released" not in repr(two)
    assert client.semaphore("permits", permits=2, take=2).try_acquire() is None
    threads(2, end, second)
    assert "released" in repr(two)


def test_block_that_was_not_granted_ends_no_other(client: leasehold.Client, threads: Threads) -> None:
    lock = client.try_lock("orders")
    first, second = request(lock), request(lock)
    held = threads(0, next, first)
    assert threads(0, next, second) is None
    threads(1, end, second)
    assert "released" not in repr(held)
    threads(1, end, first)
    assert "released" in repr(held)


def test_blocks_of_exit_stacks_end_with_their_stacks(client: leasehold.Client, threads: Threads) -> None:
    permits = client.semaphore("permits", permits=4)
    stack, other = contextlib.ExitStack(), contextlib.ExitStack()
    block = request(permits)
    with permits as outer:
        one, two = stack.enter_context(permits), stack.enter_context(permits)
        inner = next(block)
        stack.close()
        assert all("released" in repr(lease) for lease in (one, two))
        assert not any("released" in repr(lease) for lease in (outer, inner))
        # In another thread, the only one that a stack has begun.
        three = other.enter_context(permits)
        threads(0, other.close)
        assert "released" in repr(three)
        assert leasehold.current() is inner
        end(block)
        assert leasehold.current() is outer
        assert "released" not in repr(outer)
    assert "released" in repr(outer)


def stacked(lock: Any) -> Iterator[Any]:
    """A block of a stack in a generator."""
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(lock)


def test_stacks_of_one_thread_end_in_any_order(client: leasehold.Client) -> None:
    permits = client.semaphore("permits", permits=4)
    first, second = stacked(permits), stacked(permits)
    one, two = next(first), next(second)
    end(first)
    assert "released" in repr(one)
    assert "released" not in repr(two)
    with contextlib.ExitStack() as stack, stack.pop_all() as moved:
        three = moved.enter_context(permits)
        moved.pop_all().close()
        assert "released" in repr(three)
    end(second)
    assert "released" in repr(two)


def test_what_a_function_begins_ends_before_what_is_around_it(client: leasehold.Client) -> None:
    permits = client.semaphore("permits", permits=4)
    with permits as outer:
        with permits as inner:
            pass
        begun = permits.__enter__()
        (lambda: permits.__exit__(None, None, None))()
        assert "released" in repr(inner)
        assert "released" in repr(begun)
        assert "released" not in repr(outer)
    assert "released" in repr(outer)


def test_block_that_a_function_has_begun_may_be_given_to_a_stack(client: leasehold.Client, threads: Threads) -> None:
    permits = client.semaphore("permits", permits=4)
    other = contextlib.ExitStack()
    threads(0, other.enter_context, permits)
    with contextlib.ExitStack() as stack:
        lease = permits.__enter__()
        stack.push(permits)
    assert "released" in repr(lease)
    threads(1, other.close)
    assert not permits._held._of


def test_lost_lease_s_block_ends_no_good_one(client: leasehold.Client, threads: Threads) -> None:
    orders = client.lock("orders", max_hold=0.2)
    lost = threads(0, orders.__enter__)
    until(lambda: lost.is_lost)
    good = client.lock("orders", wait=5)
    held = threads(1, orders.__enter__)
    with pytest.raises(leasehold.LeaseLost):
        threads(2, orders.__exit__, None, None, None)
    assert "released" not in repr(held)
    threads(1, orders.__exit__, None, None, None)
    with good:
        pass


def test_block_that_is_not_known_ends_none(client: leasehold.Client, threads: Threads) -> None:
    permits = client.semaphore("permits", permits=2)
    one, two = permits.__enter__(), threads(0, permits.__enter__)
    with pytest.raises(RuntimeError, match="2 blocks of this lock are open"):
        threads(1, permits.__exit__, None, None, None)
    assert not any("released" in repr(lease) for lease in (one, two))
    permits.__exit__(None, None, None)
    assert "released" in repr(one)
    threads(1, permits.__exit__, None, None, None)
    assert "released" in repr(two)
    with pytest.raises(RuntimeError, match="0 blocks"):
        permits.__exit__(None, None, None)


def test_blocks_of_stacks_in_many_threads_end_with_their_stacks(client: leasehold.Client) -> None:
    permits = client.semaphore("permits", permits=100)

    def work(_: int) -> None:
        for _ in range(1_000):
            with contextlib.ExitStack() as stack:
                stack.enter_context(permits)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(work, range(6))) == [None] * 6
    finally:
        sys.setswitchinterval(interval)
    assert not permits._held._of
    with client.semaphore("permits", permits=100, take=100, wait=0):
        pass


async def arequest(lock: Any) -> AsyncIterator[Any]:
    async with lock as lease:
        yield lease


def test_block_that_ends_in_another_task_is_its_own() -> None:
    async def main() -> None:
        async with leasehold.aio.connect("memory:", ttl=10) as client:
            permits = client.semaphore("permits", permits=2, cancel_on_lost=False)
            first, second = arequest(permits), arequest(permits)

            async def step(block: AsyncIterator[Any]) -> Any:
                return await anext(block, None)

            one, two = await asyncio.create_task(step(first)), await asyncio.create_task(step(second))
            await asyncio.create_task(step(first))
            assert "released" in repr(one)
            assert "released" not in repr(two)
            async with contextlib.AsyncExitStack() as stack:
                three = await stack.enter_async_context(permits)
                await asyncio.create_task(step(second))
                assert "released" in repr(two)
                assert "released" not in repr(three)
            assert "released" in repr(three)

    asyncio.run(main())
