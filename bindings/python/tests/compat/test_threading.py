"""The adapters of `leasehold.compat.threading` pass CPython's own tests of `threading`."""

import itertools
import os
import threading
import unittest
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import leasehold
from leasehold.compat.threading import BoundedSemaphore, Factory, Lock, RLock

from servers import until

try:
    from test import lock_tests  # type: ignore[import-not-found,unused-ignore]
except ImportError as error:
    raise ImportError("CPython's own tests are missing: apt-get install libpython3-testsuite") from error

_numbers = itertools.count()
_client = leasehold.connect(os.environ.get("LEASEHOLD_TEST_STORE", "memory:"))


def _unique() -> str:
    return f"lock-{next(_numbers)}"


# As the standard library's tests do it, each lock is one of its own. Leases that the tests leave to the garbage collector warn.
pytestmark = pytest.mark.filterwarnings("ignore:lease of:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


class TestLock(lock_tests.LockTests):  # type: ignore[misc]
    locktype = staticmethod(lambda: Lock(_client, _unique()))


class TestRLock(lock_tests.RLockTests):  # type: ignore[misc]
    locktype = staticmethod(lambda: RLock(_client, _unique()))


class TestBoundedSemaphore(lock_tests.BoundedSemaphoreTests):  # type: ignore[misc]
    semtype = staticmethod(lambda value=1: BoundedSemaphore(_client, _unique(), value))


class TestConditionWithRLock(lock_tests.ConditionTests):  # type: ignore[misc]
    @staticmethod
    def condtype(lock: Any = None) -> threading.Condition:
        return threading.Condition(RLock(_client, _unique()) if lock is None else lock)  # type: ignore[arg-type]


@pytest.fixture
def client() -> Iterator[leasehold.Client]:
    with leasehold.connect("memory:") as client:
        yield client


def test_each_class_of_cpython_ran() -> None:
    """A class without tests would pass as well."""
    cases: list[tuple[Any, int]] = [(TestLock, 15), (TestRLock, 15), (TestBoundedSemaphore, 10), (TestConditionWithRLock, 7)]
    for case, least in cases:
        assert len(unittest.TestLoader().getTestCaseNames(case)) >= least


def test_locks_of_one_name_exclude_each_other(client: leasehold.Client) -> None:
    first, second = Factory(client, "app"), Factory(client, "app")
    with first.Lock("orders"):
        assert not second.Lock("orders").acquire(blocking=False)
        assert not second.RLock("orders").acquire(timeout=0.01)
    assert repr(first.Lock()).split("'")[1] == repr(second.Lock()).split("'")[1] == "app:lock-1"
    assert repr(first.Lock()).split("'")[1] == "app:lock-2"
    one, other = first.BoundedSemaphore(2), second.BoundedSemaphore(2)
    with one, other:
        assert not other.acquire(blocking=False)


def test_lost_lease_is_told_at_the_release(client: leasehold.Client) -> None:
    lock = Lock(client, "orders")
    lock.acquire()
    assert lock.lease is not None
    assert client.force_release("orders")
    with pytest.raises(leasehold.LeaseLost):
        lock.release()
    assert not lock.locked()


class TestLostLeases:
    """A lease is lost, and the same object grants the lock to another thread: each release ends its own."""

    @pytest.fixture
    def threads(self) -> Iterator[list[ThreadPoolExecutor]]:
        pools = [ThreadPoolExecutor(1) for _ in range(2)]
        yield pools
        for pool in pools:
            pool.shutdown()

    def lose(self, client: leasehold.Client, lock: Any, kind: Any = "mutex") -> None:
        lease = lock.lease if kind == "mutex" else lock._leases.next()
        client.force_release("a", kind)
        until(lambda: lease.is_lost)

    def test_lock(self, client: leasehold.Client, threads: list[ThreadPoolExecutor]) -> None:
        one, other = threads
        lock = Lock(client, "a")
        assert one.submit(lock.acquire).result()
        self.lose(client, lock)
        assert other.submit(lock.acquire).result()
        held = other.submit(lambda: lock.lease).result()
        with pytest.raises(leasehold.LeaseLost):
            one.submit(lock.release).result()
        assert held is not None
        held.check()
        assert lock.locked()
        assert client.lock("a", wait=0).try_acquire() is None
        other.submit(lock.release).result()
        assert not lock.locked()
        with pytest.raises(RuntimeError, match="release unlocked lock"):
            lock.release()

    def test_release_by_a_third_thread_ends_no_good_lease_for_a_lost_one(self, client: leasehold.Client, threads: list[ThreadPoolExecutor]) -> None:
        one, other = threads
        lock = Lock(client, "a")
        one.submit(lock.acquire).result()
        self.lose(client, lock)
        other.submit(lock.acquire).result()
        with pytest.raises(leasehold.LeaseLost):
            lock.release()
        assert lock.locked()
        lock.release()
        assert not lock.locked()

    def test_rlock(self, client: leasehold.Client, threads: list[ThreadPoolExecutor]) -> None:
        one, other = threads
        lock = RLock(client, "a")
        one.submit(lock.acquire).result()
        self.lose(client, lock)
        for blocking in (True, False):
            with pytest.raises(leasehold.LeaseLost):
                one.submit(lock.acquire, blocking).result()
        assert not lock.locked()
        assert other.submit(lock.acquire).result()
        with pytest.raises(leasehold.LeaseLost):
            one.submit(lock.release).result()
        with pytest.raises(RuntimeError, match="un-acquired"):
            one.submit(lock.release).result()
        assert other.submit(lock.acquire).result()
        for _ in range(2):
            other.submit(lock.release).result()
        assert not lock.locked()

    def test_bounded_semaphore(self, client: leasehold.Client, threads: list[ThreadPoolExecutor]) -> None:
        one, other = threads
        permits = BoundedSemaphore(client, "a", 1)
        one.submit(permits.acquire).result()
        self.lose(client, permits, "semaphore")
        assert other.submit(permits.acquire).result()
        with pytest.raises(leasehold.LeaseLost):
            one.submit(permits.release).result()
        assert client.semaphore("a", permits=1).try_acquire() is None
        other.submit(permits.release).result()
        with pytest.raises(ValueError, match="too many times"):
            permits.release()

    def test_lost_permit_keeps_no_other_from_being_released(self, client: leasehold.Client) -> None:
        permits = BoundedSemaphore(client, "a", 2)
        permits.acquire()
        permits.acquire()
        newest = permits._leases.next()
        assert newest is not None
        client.force_release("a", "semaphore", token=newest.token)
        until(lambda: newest.is_lost)
        with pytest.raises(leasehold.LeaseLost):
            permits.release(2)
        with client.semaphore("a", permits=2, take=2, wait=10):
            pass
