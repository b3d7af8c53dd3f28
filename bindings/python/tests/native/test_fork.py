"""Forks: what belongs to the parent is refused in the child, and a child connects for itself."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import leasehold
from leasehold import aio

from servers import LIMIT, Redis, stays, until

from .conftest import in_thread

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def in_child(work: Callable[[], None]) -> None:
    """Forks, and runs this in the child, which must end within the limit."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    give_up = time.monotonic() + LIMIT
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        if time.monotonic() > give_up:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
        time.sleep(0.005)


@pytest.fixture
def shared(redis_server: Redis) -> str:
    """The address of a store that parent and child share. (A file of SQLite that the parent has open is refused in a child.)"""
    return redis_server.url


def test_client_and_lease_of_the_parent_are_refused_in_the_child(shared: str, name: str) -> None:
    client = leasehold.connect(shared)
    lock = client.lock(name)
    lease = lock.acquire()
    lease.on_lost(print)

    def child() -> None:
        for call in (
            lock.acquire,
            lock.try_acquire,
            client.list,
            lambda: client.inspect(name),
            lease.release,
            lease.check,
            lease.renew,
            lease.detach,
            lambda: lease.is_lost,
            lambda: client.attach("lease1.x"),
        ):
            with pytest.raises(leasehold.ForkedError):
                call()
        assert lease.expires_in == 0
        assert "of the parent" in repr(lease)
        client.close()

    in_child(child)
    lease.check()
    lease.release()
    client.close()


def test_child_connects_for_itself_and_the_parent_keeps_its_lease(shared: str, name: str) -> None:
    client = leasehold.connect(shared)
    lease = client.lock(name, ttl=1).acquire()

    def child() -> None:
        with leasehold.connect(shared) as own:
            assert own.lock(name).try_acquire() is None
            with own.lock(name + ":own"):
                pass

    for _ in range(3):
        in_child(child)
    # Longer than the ttl: the parent's connections still work.
    stays(lambda: not lease.is_lost, 1.5)
    lease.release()
    with client.lock(name + ":own"):
        pass
    client.close()


def test_objects_of_the_parent_are_dropped_in_the_child_without_a_release(shared: str, name: str) -> None:
    held = [leasehold.connect(shared)]
    leases = [held[0].lock(name, ttl=30).acquire()]
    watched = leasehold.connect(shared)

    def child() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            leases.clear()
            held.clear()
            gc.collect()
        assert not [warning for warning in caught if warning.category is ResourceWarning]

    in_child(child)
    assert watched.lock(name).try_acquire() is None
    leases[0].check()
    leases[0].release()
    watched.lock(name).acquire(wait=LIMIT).release()
    held[0].close()
    watched.close()


def test_client_that_was_not_used_before_the_fork_is_used_in_both(shared: str, name: str) -> None:
    client = leasehold.connect(shared)

    def child() -> None:
        with client.lock(name, wait=LIMIT):
            pass
        client.close()

    in_child(child)
    with client.lock(name, wait=LIMIT):
        in_child(lambda: pytest.raises(leasehold.ForkedError, client.lock(name).try_acquire))
    client.close()


def test_fork_while_threads_wait_and_a_loop_runs(shared: str, name: str) -> None:
    client = leasehold.connect(shared)
    lease = client.lock(name).acquire()
    granted: list[int] = []

    def wait() -> None:
        with client.lock(name) as own:
            granted.append(own.token)

    async def wait_too() -> None:
        async with aio.connect(shared) as own, own.lock(name) as theirs:
            granted.append(theirs.token)

    threads = [in_thread(wait) for _ in range(4)] + [in_thread(lambda: asyncio.run(wait_too()))]
    # Threads of the client that holds the lock wait in the process, the loop's client in the store.
    until(lambda: client.inspect(name).waiters, "the threads do not wait")

    def child() -> None:
        gc.collect()
        with leasehold.connect(shared) as own:
            assert own.lock(name).try_acquire() is None
            with pytest.raises(leasehold.ForkedError):
                client.lock(name).acquire()

    forked = threading.Thread(target=lambda: in_child(child))
    forked.start()
    forked.join(LIMIT)
    in_child(child)
    assert not granted
    lease.release()
    for thread in threads:
        thread.join(LIMIT)
    assert len(set(granted)) == 5
    client.close()


def test_child_of_a_child_and_asyncio_in_a_child(shared: str, name: str) -> None:
    parent = aio.connect(shared)

    async def use(client: aio.Client) -> None:
        async with client.lock(name, wait=LIMIT):
            await asyncio.sleep(0.01)

    async def connect_and_use() -> None:
        async with aio.connect(shared) as client:
            await use(client)

    asyncio.run(use(parent))

    def child() -> None:
        asyncio.run(connect_and_use())
        with pytest.raises(leasehold.ForkedError):
            asyncio.run(use(parent))
        in_child(lambda: asyncio.run(connect_and_use()))

    in_child(child)
    asyncio.run(use(parent))
    asyncio.run(parent.close())


def count_up(url: str, name: str, path: str, times: int) -> None:
    """In a process of multiprocessing."""
    client = leasehold.connect(url)
    for _ in range(times):
        with client.lock(name, wait=LIMIT):
            count = int(Path(path).read_text())
            Path(path).write_text(str(count + 1))
    client.lock(name + ":kept").try_acquire()  # It is never released, but by the end of its process.


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("url", ["sqlite", "redis"], indirect=True)
def test_processes_of_multiprocessing_exclude_each_other(url: str, name: str, tmp_path: Path, method: str) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=count_up, args=(url, name, str(counter), 20)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
        assert process.exitcode == 0
    assert counter.read_text() == "80"
    with leasehold.connect(url) as client:
        began = time.monotonic()
        client.lock(name + ":kept").acquire(wait=LIMIT).release()
        assert time.monotonic() - began < 9, "a lease of a process that has ended was not released"
