"""Each kind of lock, over the synchronous API."""

from __future__ import annotations

import datetime
import sys
import threading

import pytest

import leasehold

from servers import LIMIT, Redis, until

from .conftest import in_thread


def test_lock_is_held_in_its_block_and_tokens_rise(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    with client.lock(name, ttl=30) as lease:
        assert lease.name == name
        assert 0 < lease.expires_in <= 30
        assert not lease.is_lost
        assert other.lock(name).try_acquire() is None
        assert leasehold.current() is lease
    assert leasehold.current() is None
    with other.lock(name) as later:
        assert later.token > lease.token


def test_try_lock_gives_none_if_the_lock_is_held(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    with client.try_lock(name) as lease:
        assert lease is not None
        with other.try_lock(name) as second:
            assert second is None


def test_wait_ends_with_timeout_and_leaves_the_queue(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    with client.lock(name):
        with pytest.raises(leasehold.Timeout, match="not granted within 0.05 s") as caught:
            other.lock(name, wait=0.05).acquire()
        assert isinstance(caught.value, TimeoutError)
        with pytest.raises(leasehold.Timeout):
            other.lock(name).acquire(wait=datetime.timedelta(milliseconds=20))
        until(lambda: not client.inspect(name).waiters, "the queue is not empty")


def test_waiter_is_granted_when_the_holder_releases(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    granted: list[int] = []

    def wait() -> None:
        with other.lock(name, wait=60) as lease:
            granted.append(lease.token)

    with client.lock(name) as lease:
        thread = in_thread(wait)
        until(lambda: client.inspect(name).waiters, "nobody waits")
        assert not granted
    thread.join(60)
    assert granted and granted[0] > lease.token


def test_threads_of_one_client_exclude_each_other(client: leasehold.Client, name: str) -> None:
    count = 0
    tokens: list[int] = []

    def work() -> None:
        nonlocal count
        for _ in range(25):
            with client.lock(name) as lease:
                tokens.append(lease.token)
                seen = count
                threading.Event().wait(0.0001)
                count = seen + 1

    threads = [in_thread(work) for _ in range(8)]
    for thread in threads:
        thread.join(60)
    assert count == 200
    assert tokens == sorted(tokens) and len(set(tokens)) == 200


def test_owner_acquires_again(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    with client.reentrant(name, owner="one"):
        with other.reentrant(name, owner="one"):
            assert other.reentrant(name, owner="two").try_acquire() is None
        assert other.reentrant(name, owner="two").try_acquire() is None
    other.reentrant(name, owner="two").acquire(wait=60).release()


def test_readers_share_and_writers_exclude(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    prices, theirs = client.rwlock(name), other.rwlock(name)
    with prices.read(), theirs.read():
        assert theirs.write().try_acquire() is None
    with prices.write():
        assert theirs.read().try_acquire() is None


def test_writer_is_downgraded_and_reader_is_upgraded(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    prices, theirs = client.rwlock(name), other.rwlock(name)
    writer = prices.write().acquire()
    reader = writer.downgrade()
    theirs.read().acquire().release()
    writer.release()  # It was replaced: nothing happens.
    assert theirs.write().try_acquire() is None
    reader.release()

    upgradable = prices.upgradable().acquire()
    with theirs.read():
        with pytest.raises(leasehold.Timeout):
            upgradable.upgrade(wait=0.05)
        assert not upgradable.is_lost and upgradable.expires_in > 0
    with upgradable.upgrade(wait=60) as upgraded:
        assert theirs.read().try_acquire() is None
        assert upgraded.token >= upgradable.token
    theirs.read().acquire(wait=60).release()


def test_lease_that_cannot_change_its_mode_stays_held(client: leasehold.Client, name: str) -> None:
    with client.lock(name) as lease:
        with pytest.raises(leasehold.Unsupported, match="downgraded"):
            lease.downgrade()
        with pytest.raises(leasehold.Unsupported, match="upgraded"):
            lease.upgrade()
        lease.check()


def test_semaphore_has_its_permits(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    with client.semaphore(name, permits=3, take=2):
        with other.semaphore(name, permits=3):
            assert other.semaphore(name, permits=3).try_acquire() is None
        assert other.semaphore(name, permits=3, take=2).try_acquire() is None


def test_several_locks_are_acquired_all_or_none(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    names = [f"{name}:b", f"{name}:a"]
    with client.lock_all(names) as lease:
        assert sorted(lease.tokens) == sorted(names)
        assert other.lock(names[0]).try_acquire() is None
        with pytest.raises(leasehold.Unsupported):
            lease.detach()
        lease.check()
    with other.lock(names[0]):
        assert client.lock_all(names).try_acquire() is None
        assert other.lock(names[1]).try_acquire() is not None


def test_work_starts_once_per_period(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    with client.once_per(name, 3_600) as first:
        assert first is not None
    with other.once_per(name, 3_600) as second:
        assert second is None


def test_leader_can_be_looked_up(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    election = other.election(name)
    assert election.leader() is None
    with client.election(name, label="http://10.0.0.7") as leadership:
        leader = election.leader()
        assert leader is not None and leader.token == leadership.token
        assert leader.process.label == "http://10.0.0.7"
    assert election.leader() is None


def test_observer_returns_each_change_of_the_leader(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    leaders = other.election(name).observe(every=0.02)
    assert next(leaders) is None
    with client.election(name) as first:
        leader = next(leaders)
        assert leader is not None and leader.token == first.token
    assert next(leaders) is None
    with client.election(name) as second:
        leader = next(leaders)
        assert leader is not None and leader.token == second.token
        late = next(client.election(name).observe())
        assert late is not None and late.token == second.token
    other.close()
    for _ in range(2):
        with pytest.raises(leasehold.ClientClosed):
            next(leaders)


def test_observer_goes_on_after_an_error() -> None:
    store = leasehold.testing.TestStore()
    with leasehold.connect(store.url) as client:
        leaders = client.election("a").observe(every=0.02)
        assert next(leaders) is None
        with client.election("a"):
            store.set_reachable(False)
            with pytest.raises(leasehold.Unavailable):
                next(leaders)
            store.set_reachable(True)
            assert next(leaders) is not None


def test_detached_lease_is_attached_by_another_client(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    lease = client.lock(name, ttl=300).acquire()
    text = lease.detach()
    assert not lease.is_lost and lease.expires_in == 0
    assert client.lock(name).try_acquire() is None
    attached = other.attach(text)
    assert attached.token == lease.token
    attached.release()
    with pytest.raises(leasehold.LeaseLost):
        other.attach(text)
    client.lock(name).acquire(wait=60).release()


def test_text_that_is_attached_twice_gives_two_leases_of_one_token(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    text = client.lock(name, ttl=1).acquire().detach()
    first, second = client.attach(text), other.attach(text)
    assert first.token == second.token
    first.check()
    second.release()
    until(lambda: first.is_lost)
    client.lock(name).acquire(wait=60).release()


def test_lock_is_inspected_and_listed(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    with client.lock(name, label="nightly", ttl=30) as lease:
        info = other.inspect(name)
        (holder,) = info.holders
        assert (info.kind, info.name, info.capacity) == ("mutex", name, 1)
        assert (holder.token, holder.process.label, holder.is_own) == (lease.token, "nightly", False)
        assert 0 < holder.expires_in <= 30
        assert name in [lock.name for lock in other.list()]
    assert not other.inspect(name).holders


def test_holder_learns_that_its_lock_was_released_by_force(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    reasons: list[str] = []
    with pytest.raises(leasehold.LeaseLost) as caught, client.lock(name, ttl=1) as lease:
        lease.on_lost(reasons.append)
        (former,) = other.force_release(name, token=lease.token)
        assert former.token == lease.token
        until(lambda: lease.is_lost, "the holder was not told")
        assert lease.loss == "gone" and lease.expires_in == 0
        with pytest.raises(leasehold.LeaseLost, match="the store no longer has it"):
            lease.check()
        until(lambda: reasons == ["gone"], "the callback was not called")
    assert caught.value.reason == "gone"


def test_namespace_is_part_of_every_name(url: str, client: leasehold.Client, name: str) -> None:
    with leasehold.connect(url, namespace=name) as mine, mine.lock("a") as lease:
        assert lease.name == f"{name}:a"
        assert client.lock(f"{name}:a").try_acquire() is None
        assert [lock.name for lock in mine.list()] == [f"{name}:a"]
        assert mine.inspect("a").holders[0].is_own


def test_lock_without_renewal_ends_with_its_ttl(client: leasehold.Client, name: str) -> None:
    lease = client.lock(name, ttl=0.2, auto_renew=False).acquire()
    until(lambda: lease.is_lost, "the lease does not end")
    assert lease.loss == "expired"
    with pytest.raises(leasehold.LeaseLost):
        lease.release()


def test_minimum_hold_keeps_a_released_lock(client: leasehold.Client, name: str) -> None:
    client.lock(name, min_hold=3_600).acquire().release()
    assert client.lock(name).try_acquire() is None
    with client.lock(name + ":2", min_hold=3_600) as lease:
        lease.set_min_hold(0)
    client.lock(name + ":2").acquire(wait=60).release()


def test_decorated_function_runs_under_the_lock_of_its_arguments(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    @client.locked(name + ":{user_id}", wait=0, busy="skip")
    def report(user_id: int, kind: str = "short") -> str:
        assert other.lock(f"{name}:{user_id}").try_acquire() is None
        return f"{kind} {user_id}"

    assert report(7) == "short 7"
    with other.lock(f"{name}:7"):
        assert report(7) is None
        assert report(user_id=8, kind="long") == "long 8"

    @client.locked(name, wait=0)
    def strict() -> int:
        return 1

    assert strict() == 1
    with other.lock(name), pytest.raises(leasehold.Timeout):
        strict()
    with pytest.raises(leasehold.InvalidInput, match="no argument 'nobody'"):
        client.locked("{nobody}")(strict)


def test_bridge_excludes_the_other_library(redis_server: Redis, name: str) -> None:
    import redis

    from leasehold import bridge

    theirs = redis.Redis(unix_socket_path=str(redis_server.socket))
    with leasehold.connect(redis_server.url) as client:
        lock = client.lock(name + ":own", bridge=bridge.redis_py(name))
        with lock:
            assert not theirs.lock(name, timeout=30).acquire(blocking=False)
        with theirs.lock(name, timeout=30):
            assert lock.try_acquire() is None
    theirs.close()


def test_lease_whose_upgrade_fails_is_lost() -> None:
    """The library releases it then, and its holder must not believe that it still has it."""
    store = leasehold.testing.TestStore()
    with leasehold.connect(store.url) as client:
        reader = client.rwlock("a").upgradable().acquire()
        reasons: list[str] = []
        reader.on_lost(reasons.append)
        store.set_reachable(False)
        with pytest.raises(leasehold.Unavailable):
            reader.upgrade(wait=1)
        assert reader.loss == "gone"
        with pytest.raises(leasehold.LeaseLost, match="upgrade or downgrade failed"):
            reader.check()
        until(lambda: reasons == ["gone"], "the callback was not called")
        with pytest.raises(leasehold.LeaseLost) as caught:
            reader.release()
        assert caught.value.reason == "gone"
        store.set_reachable(True)


def test_callback_is_called_although_the_lost_lease_is_released_at_once(client: leasehold.Client, name: str) -> None:
    for _ in range(20):
        reasons: list[str] = []
        lease = client.lock(name, max_hold=0.1).acquire()
        lease.on_lost(reasons.append)
        while not lease.is_lost:
            pass
        with pytest.raises(leasehold.LeaseLost):
            lease.release()
        del lease
        until(lambda: reasons == ["max_hold"], "the callback was not called")


def test_loss_after_an_upgrade_that_timed_out_calls_back(client: leasehold.Client, other: leasehold.Client, name: str) -> None:
    reader = client.rwlock(name, ttl=0.5).upgradable().acquire()
    reasons: list[str] = []
    reader.on_lost(reasons.append)
    with other.rwlock(name).read():
        with pytest.raises(leasehold.Timeout):
            reader.upgrade(wait=0.02)
        other.force_release(name, "rw", token=reader.token)
        until(lambda: reasons == ["gone"], "the callback was not called")


def test_handle_of_several_threads_releases_the_lease_of_its_own_block(client: leasehold.Client, name: str) -> None:
    """With the interpreter switching between any two steps."""
    lock = client.semaphore(name, permits=8)
    wrong: list[object] = []
    interval = sys.getswitchinterval()

    def work() -> None:
        for _ in range(200):
            with lock as lease:
                pass
            if not lease._ended:
                wrong.append(lease)

    sys.setswitchinterval(1e-6)
    try:
        threads = [in_thread(work) for _ in range(8)]
        for thread in threads:
            thread.join(LIMIT)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
