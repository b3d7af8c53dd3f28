"""`leasehold.compat.redis.Lock` beside the lock of redis-py, on a real server."""

import functools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

import leasehold
from leasehold.compat.redis import Lock

from servers import Redis, stays, until


@pytest.fixture
def client(redis_server: Redis) -> Iterator[Any]:
    with redis.Redis(unix_socket_path=str(redis_server.socket)) as client:
        yield client


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def test_it_excludes_itself_and_the_lock_of_redis_py(client: Any, name: str) -> None:
    new = client.lock(name, timeout=5, lock_class=Lock)
    other = client.lock(name, timeout=5, lock_class=Lock)
    old = client.lock(name, timeout=5)
    with new:
        assert new.owned()
        assert new.locked() and old.locked()
        assert not other.acquire(blocking=False)
        assert not old.acquire(blocking=False)
    assert not old.locked()
    with old:
        assert not new.acquire(blocking_timeout=0.2)
        assert new.locked() and not new.owned()
    assert new.acquire()
    assert new.extend(30) and new.reacquire()
    new.release()


def test_living_holder_keeps_the_lock_beyond_its_timeout(client: Any, name: str) -> None:
    with client.lock(name, timeout=1, lock_class=Lock) as lock:
        stays(lock.owned, 2.5)
        assert not client.lock(name, timeout=1).acquire(blocking=False)


def test_counter_is_exact_while_old_and_new_processes_run(client: Any, name: str) -> None:
    counts: list[int] = []

    def work(**options: Any) -> None:
        lock = client.lock(name, timeout=10, sleep=0.005, thread_local=True, **options)
        for _ in range(20):
            with lock:
                value = int(client.get("counter:" + name) or 0)
                time.sleep(0.001)
                client.set("counter:" + name, value + 1)
        counts.append(20)

    threads = [threading.Thread(target=work, kwargs=options) for options in 2 * [{}, {"lock_class": Lock}]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int(client.get("counter:" + name)) == sum(counts) == 80


def test_errors_are_those_of_redis_py(client: Any, name: str) -> None:
    lock = client.lock(name, timeout=5, lock_class=Lock)
    for call in (lock.release, lock.reacquire, lambda: lock.extend(1)):
        with pytest.raises(redis.exceptions.LockError):
            call()
    with pytest.raises(leasehold.Unsupported):
        lock.acquire(token="mine")
    with client.lock(name, timeout=5):
        with pytest.raises(redis.exceptions.LockError, match="within the time"):
            client.lock(name, timeout=5, blocking_timeout=0.1, lock_class=Lock).__enter__()
    # As `redis-cli del` does it.
    lock = client.lock(name, timeout=3, lock_class=Lock)
    assert lock.acquire()
    client.delete(name)
    until(lambda: not lock.owned())
    with pytest.raises(redis.exceptions.LockNotOwnedError):
        lock.release()
    with client.lock(name, timeout=3, raise_on_release_error=False, lock_class=Lock) as quiet:
        client.delete(name)
        until(lambda: not quiet.owned())


def test_lock_of_a_thread_is_not_that_of_another(client: Any, name: str) -> None:
    lock = client.lock(name, timeout=5, lock_class=Lock)
    seen: list[bool] = []
    with lock:
        thread = threading.Thread(target=lambda: seen.append(lock.owned()))
        thread.start()
        thread.join()
    shared = client.lock(name, timeout=5, thread_local=False, lock_class=Lock)
    with shared:
        thread = threading.Thread(target=lambda: seen.append(shared.owned()))
        thread.start()
        thread.join()
    assert seen == [False, True]


def test_client_of_leasehold_can_be_passed(redis_server: Redis, client: Any, name: str) -> None:
    with leasehold.connect(redis_server.url) as mine:
        lock = client.lock(name, timeout=5, lock_class=functools.partial(Lock, client=mine))
        with lock:
            assert lock.lease.token > 0
            assert not client.lock(name, timeout=5).acquire(blocking=False)


def test_address_that_is_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(leasehold.Unsupported, match="client="):
        redis.Redis(ssl=True, ssl_ca_certs=str(tmp_path)).lock("a", lock_class=Lock)
    sentinel: Any = redis.Sentinel([("127.0.0.1", 1)])  # type: ignore[no-untyped-call]
    with pytest.raises(leasehold.Unsupported, match="client="):
        sentinel.master_for("m").lock("a", lock_class=Lock)
