"""Clients: opening, closing, errors, options; what a lease and a client are as Python objects."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import leasehold

from servers import Redis, until

from .conftest import in_thread


def test_connect_opens_nothing_before_the_first_use() -> None:
    client = leasehold.connect("redis://127.0.0.1:1")
    assert "not open" in repr(client)
    with pytest.raises(leasehold.Unavailable) as caught:
        client.lock("a").try_acquire()
    assert isinstance(caught.value, ConnectionError)
    assert "127.0.0.1:1" in str(caught.value)
    client.close()


@pytest.mark.parametrize("url", ["nonsense", "ftp://host", "redis://", "sqlite:"])
def test_address_that_cannot_be_used_is_invalid(url: str) -> None:
    with pytest.raises((leasehold.InvalidInput, leasehold.Unsupported)):
        leasehold.connect(url).lock("a").try_acquire()


def test_invalid_options_are_refused(client: leasehold.Client, name: str) -> None:
    for acquire in (
        lambda: client.lock("").acquire(),
        lambda: client.lock(name, ttl=0.001).acquire(),
        lambda: client.lock(name, ttl=-1),
        lambda: client.lock(name, wait=-1),
        lambda: client.semaphore(name, permits=2, take=3).acquire(),
        lambda: client.once_per(name, 0.1).acquire(),
        lambda: client.lock_all([name, name]).acquire(),
        lambda: client.inspect(name, "queue"),
        lambda: client.attach("lease1.nonsense"),
    ):
        with pytest.raises(leasehold.InvalidInput) as caught:
            acquire()
        assert isinstance(caught.value, ValueError)
    assert not client.inspect(name).holders


WRONG: dict[str, Callable[[leasehold.Client], object]] = {
    "a name that is no text": lambda client: client.lock(7),  # type: ignore[arg-type]
    "a name that is missing": lambda client: client.lock(None),  # type: ignore[arg-type]
    "a name that no encoding has": lambda client: client.lock("\ud800"),
    "one text for several names": lambda client: client.lock_all("abc"),
    "a name twice": lambda client: client.lock_all(["a", "a"]),
    "a ttl that is a text": lambda client: client.lock("a", ttl="10"),  # type: ignore[arg-type]
    "a ttl that is no number": lambda client: client.lock("a", ttl=float("nan")),
    "half a permit": lambda client: client.semaphore("a", permits=1.5),  # type: ignore[arg-type]
    "less than no permits": lambda client: client.semaphore("a", permits=-1),
    "a label that is no text": lambda client: client.lock("a", label=5),  # type: ignore[arg-type]
    "no owner": lambda client: client.reentrant("a", owner=None),  # type: ignore[arg-type]
    "a bridge that is a text": lambda client: client.lock("a", bridge="redis_py:a"),  # type: ignore[arg-type]
    "a token below zero": lambda client: client.force_release("a", token=-1),
    "no text of a lease": lambda client: client.attach(None),  # type: ignore[arg-type]
    "an unknown way to be busy": lambda client: client.locked("a", busy="ignore"),  # type: ignore[arg-type]
    "a decorator without its call": lambda client: client.locked(lambda: None),  # type: ignore[arg-type]
    "a coroutine function, whose body would run without the lock": lambda client: client.locked("a")(asyncio.sleep),
    "a generator, whose body would run without the lock": lambda client: client.locked("a")(numbers),
}


def numbers() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("url", ["memory:", "http://127.0.0.1:1"])
def test_wrong_argument_is_named_before_anything_is_sent(url: str, what: str) -> None:
    with leasehold.connect(url) as client, pytest.raises(leasehold.InvalidInput):
        WRONG[what](client)


@pytest.mark.parametrize("url", [None, b"memory:", 7, ""])
def test_address_that_is_no_text_is_invalid(url: Any) -> None:
    with pytest.raises(leasehold.InvalidInput, match="address of a store"):
        leasehold.connect(url)
    with pytest.raises(leasehold.InvalidInput, match="a namespace is a text"):
        leasehold.connect("memory:", namespace=url or "")


@pytest.mark.parametrize("scheme", ["redis://", "postgres://user@", "http://"])
def test_store_that_does_not_answer_is_unavailable_and_the_lock_not_busy(scheme: str) -> None:
    """`Timeout` would say that the lock is held, and a function with ``busy="skip"`` would be left out."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"{scheme}127.0.0.1:{silent.getsockname()[1]}"
        with leasehold.connect(address, connect_timeout=0.3) as client:
            with pytest.raises(leasehold.Unavailable):
                client.lock("a").try_acquire()
            with pytest.raises(leasehold.Unavailable):
                client.locked("a", wait=0, busy="skip")(lambda: None)()


@pytest.mark.parametrize(
    "address",
    [
        "redis://user:s3cret@127.0.0.1:1",
        "redis-sentinel://127.0.0.1:1/m?sentinel_password=s3cret",
        "redis+unix:///nowhere?pass=s3cret",
        "redlock:redis://:s3cret@127.0.0.1:1 redis://:s3cret@127.0.0.1:2",
        "redlock:redis+unix:///nowhere?pass=s3cret redis+unix:///elsewhere?pass=s3cret",
        "redis:user:s3cret@127.0.0.1",
        "postgres://user:s3cret@127.0.0.1:1/db",
        "postgres://127.0.0.1:1/db?password=s3cret",
        "http://127.0.0.1:1/?token=s3cret",
        "http://user:s3cret@127.0.0.1:1",
        "unix:/nowhere?token=s3cret",
    ],
)
def test_password_is_in_no_message(address: str) -> None:
    client = leasehold.connect(address, connect_timeout=0.1)
    lock = client.lock("a")
    with pytest.raises(leasehold.Error) as caught:
        lock.try_acquire()
    assert "s3cret" not in f"{caught.value} {caught.value!r} {client!r} {lock!r}"


def test_wrong_password_is_refused(own_redis: Redis) -> None:
    import redis

    with redis.Redis(unix_socket_path=str(own_redis.socket)) as admin:
        admin.config_set("requirepass", "right")
    with leasehold.connect(f"{own_redis.url}?password=wrong") as client, pytest.raises(leasehold.Refused) as caught:
        client.lock("a").try_acquire()
    assert isinstance(caught.value, PermissionError) and isinstance(caught.value, leasehold.Unavailable)


def test_full_queue_is_reported(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    with client.lock(name):
        thread = in_thread(lambda: other.lock(name, max_waiters=1).acquire().release())
        until(lambda: client.inspect(name).waiters, "nobody waits")
        with pytest.raises(leasehold.QueueFull):
            client.lock(name, max_waiters=1, global_fifo=True).acquire(wait=60)
    thread.join(60)


def test_close_ends_leases_and_waits(client: leasehold.Client, url: str, name: str) -> None:
    other = leasehold.connect(url)
    held = other.lock(name + ":held").acquire()
    ended: list[Exception] = []

    def wait() -> None:
        try:
            other.lock(name).acquire()
        except leasehold.ClientClosed as closed:
            ended.append(closed)

    with client.lock(name):
        thread = in_thread(wait)
        until(lambda: client.inspect(name).waiters, "nobody waits")
        other.close()
        thread.join(60)
    assert len(ended) == 1
    assert held.loss == "closed"
    with pytest.raises(leasehold.LeaseLost):
        held.release()
    client.lock(name + ":held").acquire(wait=60).release()
    with pytest.raises(leasehold.ClientClosed):
        other.lock(name).acquire()
    other.close()
    assert other.is_closed


def test_error_of_the_body_is_not_replaced_by_that_of_the_release(own_redis: Redis) -> None:
    client = leasehold.connect(own_redis.url)
    with pytest.raises(KeyError) as caught, client.lock("a", ttl=0.5):
        own_redis.freeze()
        raise KeyError("body")
    assert any("release failed too" in note for note in caught.value.__notes__)
    own_redis.thaw()
    client.close()


def test_body_of_a_lost_lease_raises(client: leasehold.Client, name: str) -> None:
    with pytest.raises(leasehold.LeaseLost) as caught, client.lock(name, ttl=0.2, auto_renew=False) as lease:
        until(lambda: lease.is_lost, "the lease does not end")
    assert caught.value.reason == "expired"


def test_lease_does_not_pickle_and_says_why(client: leasehold.Client, name: str) -> None:
    with client.lock(name) as lease:
        for make in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="detach"):
                make(lease)


def test_lease_in_a_reference_cycle_is_released_with_a_warning(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    class Node:
        lease: leasehold.Lease
        own: Node

    node = Node()
    node.own, node.lease = node, client.lock(name).acquire()
    node.lease.on_lost(print)
    del node
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    assert [warning.category for warning in caught if name in str(warning.message)] == [ResourceWarning]
    other.lock(name).acquire(wait=60).release()


def test_handle_is_used_by_several_threads(client: leasehold.Client, name: str) -> None:
    lock = client.semaphore(name, permits=8)
    barrier = threading.Barrier(8)
    tokens: list[int] = []

    def work() -> None:
        with lock as lease:
            barrier.wait(60)
            tokens.append(lease.token)

    threads = [in_thread(work) for _ in range(8)]
    for thread in threads:
        thread.join(60)
    assert len(set(tokens)) == 8
    assert not client.inspect(name, "semaphore").holders


def test_log_records_of_the_engine_reach_logging(own_redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    client = leasehold.connect(own_redis.url)
    lease = client.lock("a", ttl=1).acquire()
    client.force_release("a")
    until(lambda: any("lease lost" in record.getMessage() for record in caplog.records), "nothing was logged")
    record = next(record for record in caplog.records if "lease lost" in record.getMessage())
    assert (record.name, record.levelname) == ("leasehold", "WARNING")
    assert 'mutex "a"' in record.getMessage()
    with pytest.raises(leasehold.LeaseLost):
        lease.release()
    client.close()


def test_import_loads_none_of_the_slow_modules() -> None:
    script = "import sys, leasehold; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}; {script}"], check=True, capture_output=True, text=True)
    modules = set(loaded.stdout.split())
    assert "leasehold" in modules
    assert not modules & {"asyncio", "ssl", "http.client", "leasehold.aio", "leasehold._native", "inspect", "dataclasses", "logging", "socket"}


def test_descriptors_threads_and_memory_are_flat_over_many_clients(tmp_path: Path) -> None:
    from .conftest import descriptors, native_threads, resident_kib

    def some(count: int) -> None:
        for _ in range(count):
            with leasehold.connect("memory:") as client, client.lock("a"):
                pass

    some(50)
    until(lambda: native_threads() <= 8, "threads remain")
    before, before_kib = descriptors(), resident_kib()
    some(200)
    until(lambda: descriptors() <= before, "descriptors remain")
    until(lambda: native_threads() <= 8, "threads remain")
    assert resident_kib() < before_kib + 8_192


def test_closed_client_keeps_no_connection_although_its_locks_are_kept(url: str, name: str) -> None:
    from .conftest import descriptors, native_threads

    gc.collect()
    until(lambda: native_threads() <= 8, "threads of other tests remain")
    kept: list[object] = []
    before = descriptors()
    for _ in range(10):
        client = leasehold.connect(url)
        lock = client.lock(name)
        with lock as lease:
            pass
        client.close()
        kept += [client, lock, lease]
    # What the process opens once for all clients is not counted ten times.
    until(lambda: descriptors() <= before + 9, "descriptors remain")
