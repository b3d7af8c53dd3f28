"""Each kind of lock over HTTP, on a real server, over SQLite and Redis."""

import threading
import time
from collections.abc import Callable

import pytest

import leasehold
from leasehold import bridge

from servers import Serve, until


@pytest.fixture
def client(serve: Serve) -> leasehold.Client:
    return leasehold.connect(serve.url)


def test_mutex_has_one_holder_and_rising_tokens(client: leasehold.Client, name: str) -> None:
    with client.lock(name) as first:
        assert first.name == name
        assert first.tokens == {name: first.token}
        assert 25 < first.expires_in <= 30
        assert leasehold.current() is first
        assert client.lock(name).try_acquire() is None
        with client.try_lock(name) as none:
            assert none is None
    with client.try_lock(name) as second:
        assert second is not None
        assert second.token > first.token
    assert leasehold.current() is None
    assert first.expires_in == 0.0


def test_waiter_is_granted_when_the_holder_releases(client: leasehold.Client, name: str) -> None:
    order: list[int] = []

    def wait(number: int) -> None:
        with client.lock(name, wait=30):
            order.append(number)

    with client.lock(name):
        threads: list[threading.Thread] = []
        for number in range(3):
            threads.append(threading.Thread(target=wait, args=(number,)))
            threads[-1].start()
            until(lambda: len(client.inspect(name).waiters) == len(threads))
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2]


def test_wait_ends_in_time_and_its_place_is_given_up(client: leasehold.Client, name: str) -> None:
    with client.lock(name):
        began = time.monotonic()
        with pytest.raises(leasehold.Timeout, match="not granted within 0.3 s"):
            client.lock(name, wait=0.3).acquire()
        assert time.monotonic() - began >= 0.3
    with client.lock(name, wait=10):
        pass


def test_lock_with_the_name_of_a_folder(client: leasehold.Client) -> None:
    for name in ["..", ".", "a/b?c=d#e %41 é", "_"]:
        with client.lock(name) as lease:
            assert lease.name == name
            assert client.inspect(name).holders[0].token == lease.token


def test_namespace_is_a_part_of_the_name(serve: Serve, name: str) -> None:
    with leasehold.connect(serve.url, namespace="app") as client, client.lock(name) as lease:
        assert lease.name == f"app:{name}"


def test_semaphore(client: leasehold.Client, name: str) -> None:
    semaphore = client.semaphore(name, permits=3, take=2)
    with semaphore:
        assert semaphore.try_acquire() is None
        with client.semaphore(name, permits=3):
            assert client.semaphore(name, permits=3).try_acquire() is None


def test_readers_share_and_a_writer_excludes(client: leasehold.Client, name: str) -> None:
    lock = client.rwlock(name)
    with lock.read(), lock.read():
        assert lock.write().try_acquire() is None
    with lock.write() as lease:
        assert lock.read().try_acquire() is None
        with pytest.raises(leasehold.Unsupported):
            lease.downgrade()


def test_owner_acquires_again(client: leasehold.Client, name: str) -> None:
    with client.reentrant(name, owner="me"):
        with client.reentrant(name, owner="me"):
            pass
        assert client.reentrant(name, owner="you").try_acquire() is None


def test_several_locks_are_granted_all_or_none(client: leasehold.Client, name: str) -> None:
    names = [f"{name}/{part}" for part in "ba"]
    with client.lock_all(names) as lease:
        assert sorted(lease.tokens) == sorted(names)
        assert client.lock_all([names[0], "other"]).try_acquire() is None
        assert client.lock(names[1]).try_acquire() is None
        lease.renew()
        with pytest.raises(leasehold.Unsupported):
            lease.detach()
    with client.lock_all(names, wait=0.2), pytest.raises(leasehold.Timeout):
        client.lock_all(names, wait=0.2).acquire()


def test_work_of_a_period_starts_once(client: leasehold.Client, name: str) -> None:
    with client.once_per(name, 3600) as lease:
        assert lease is not None
    with client.once_per(name, 3600) as lease:
        assert lease is None


def test_election_shows_its_leader(client: leasehold.Client, name: str) -> None:
    election = client.election(name, label="http://10.0.0.7:8080")
    assert election.leader() is None
    with election as lease:
        leader = election.leader()
        assert leader is not None
        assert leader.token == lease.token
        assert leader.process.label == "http://10.0.0.7:8080"
    until(lambda: election.leader() is None)


def test_observer_returns_each_change_of_the_leader(client: leasehold.Client, name: str) -> None:
    leaders = client.election(name).observe(every=0.05)
    assert next(leaders) is None
    with client.election(name) as leadership:
        leader = next(leaders)
        assert leader is not None and leader.token == leadership.token
    assert next(leaders) is None
    client.close()
    with pytest.raises(leasehold.ClientClosed):
        next(leaders)


def test_minimum_hold(client: leasehold.Client, name: str) -> None:
    with client.lock(name, min_hold=30):
        pass
    assert client.lock(name).try_acquire() is None


def test_maximum_hold_ends_the_lease_at_the_server_too(client: leasehold.Client, name: str) -> None:
    lease = client.lock(name, max_hold=0.5).acquire()
    reasons: list[str] = []
    lease.on_lost(reasons.append)
    with client.lock(name, wait=30):
        assert lease.loss == "max_hold"
    until(lambda: reasons == ["max_hold"])
    with pytest.raises(leasehold.LeaseLost, match="maximum hold"):
        lease.release()


def test_detached_lease_is_attached_by_another_client(client: leasehold.Client, serve: Serve, name: str) -> None:
    text = client.lock(name, ttl=60).acquire().detach()
    client.close()
    other = leasehold.connect(serve.url)
    lease = other.attach(text)
    assert lease.name == name
    assert 50 < lease.expires_in <= 60
    assert other.lock(name).try_acquire() is None
    lease.release()
    with other.try_lock(name) as free:
        assert free is not None
    with pytest.raises(leasehold.LeaseLost):
        other.attach(text)
    with pytest.raises(leasehold.InvalidInput):
        other.attach("lease1.nonsense")


def test_lease_that_is_released_meanwhile_is_not_detached(client: leasehold.Client, name: str) -> None:
    lease = client.lock(name).acquire()
    detach = lease._lease.detach()
    lease.release()
    detach.wait()
    with pytest.raises(leasehold.LeaseLost, match="released"):
        detach.result()


def test_states(client: leasehold.Client, name: str) -> None:
    assert not client.inspect(name).holders
    with client.lock(name, label="nightly") as lease:
        holder = client.inspect(name).holders[0]
        assert (holder.token, holder.process.label) == (lease.token, "nightly")
        until(lambda: name in [info.name for info in client.list()])


def test_forced_release_is_a_loss(client: leasehold.Client, name: str) -> None:
    lease = client.lock(name, ttl=6).acquire()
    reasons: list[str] = []
    lease.on_lost(reasons.append)
    assert not client.force_release(name, token=lease.token + 1)
    released = client.force_release(name, token=lease.token)
    assert [holder.token for holder in released] == [lease.token]
    until(lambda: lease.is_lost)
    assert lease.loss == "gone"
    until(lambda: reasons == ["gone"])
    with pytest.raises(leasehold.LeaseLost) as caught:
        lease.release()
    assert caught.value.reason == "gone"


def test_what_the_api_does_not_have_is_refused_with_the_reason(client: leasehold.Client, serve: Serve) -> None:
    calls: list[Callable[[], object]] = [
        lambda: client.rwlock("a").upgradable().acquire(),
        lambda: client.lock("a", bridge=bridge.redis_py("a")).acquire(),
        lambda: client.lock("a", max_waiters=5).acquire(),
        lambda: client.lock("a", replicas=1).acquire(),
        lambda: client.lock("a", trace_id="t").acquire(),
        lambda: client.once_per("a", 60, at_least_once=True).acquire(),
        lambda: leasehold.connect(serve.url, max_waiters=3).lock("a").acquire(),
    ]
    for call in calls:
        with pytest.raises(leasehold.Unsupported, match="HTTP"):
            call()
    lease = client.lock("a").acquire()
    with pytest.raises(leasehold.Unsupported, match="minimum hold"):
        lease.set_min_hold(0)
    lease.release()


def test_invalid_input_is_refused(client: leasehold.Client, serve: Serve) -> None:
    calls: list[Callable[[], object]] = [
        lambda: client.lock("").acquire(),
        lambda: client.lock("x" * 600).acquire(),
        lambda: client.lock("\ud800").acquire(),
        lambda: client.lock("a", ttl=0.01).acquire(),
        lambda: client.semaphore("a", permits=2, take=3).acquire(),
        lambda: client.once_per("a", 0.1).acquire(),
        lambda: leasehold.connect("http://").lock("a").acquire(),
        lambda: leasehold.connect("http://a:99999").lock("a").acquire(),
        lambda: leasehold.connect("http://a/?x=y").lock("a").acquire(),
        lambda: leasehold.connect("unix:").lock("a").acquire(),
        lambda: leasehold.connect(serve.url, token="a b").lock("a").acquire(),
    ]
    for call in calls:
        with pytest.raises(leasehold.InvalidInput):
            call()


def test_decorator(client: leasehold.Client, name: str) -> None:
    @client.locked(name + ":{user}", wait=0, busy="skip")
    def report(user: int) -> str:
        with client.try_lock(f"{name}:{user}") as lease:
            assert lease is None
        return f"report of {user}"

    assert report(7) == "report of 7"
    with client.lock(f"{name}:7"):
        assert report(7) is None
