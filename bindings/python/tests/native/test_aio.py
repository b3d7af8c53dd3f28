"""The asyncio API: cancellation as `asyncio.timeout` does it, loops that are blocked or closed."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import time
import warnings
from collections.abc import Coroutine
from typing import Any

import pytest

import leasehold
from leasehold import aio

from servers import LIMIT, Redis
from servers import until as until_true

from .conftest import descriptors, in_thread, native_threads, resident_kib


def run(work: Coroutine[Any, Any, Any], limit: float = LIMIT) -> Any:
    """In a loop of its own, within the limit."""

    async def limited() -> Any:
        async with asyncio.timeout(limit):
            return await work

    return asyncio.run(limited())


async def until(is_true: Any, what: str) -> None:
    give_up = time.monotonic() + LIMIT
    while True:
        value = is_true()
        if value is not True and value is not False and hasattr(value, "__await__"):
            value = await value
        if value:
            return
        assert time.monotonic() < give_up, what
        await asyncio.sleep(0.005)


async def waiters(client: aio.Client, name: str) -> int:
    return len((await client.inspect(name)).waiters)


def test_each_kind_of_lock(url: str, name: str) -> None:
    async def work() -> None:
        async with aio.connect(url) as client, aio.connect(url) as other:
            async with client.lock(name, ttl=30) as lease:
                assert leasehold.current() is lease
                assert 0 < lease.expires_in <= 30
                assert await other.lock(name).try_acquire() is None
                async with other.try_lock(name) as second:
                    assert second is None
                with pytest.raises(leasehold.Timeout):
                    await other.lock(name).acquire(wait=0.02)
                assert (await other.inspect(name)).holders[0].token == lease.token
                assert name in [lock.name for lock in await other.list()]
                await lease.renew()
            assert leasehold.current() is None
            async with client.reentrant(name, owner="a"), other.reentrant(name, owner="a"):
                pass
            async with client.rwlock(name).read(), other.rwlock(name).read():
                assert await client.rwlock(name).write().try_acquire() is None
            async with client.rwlock(name).write() as writer:
                async with await writer.downgrade():
                    async with other.rwlock(name).read():
                        pass
            async with client.rwlock(name).upgradable() as reader:
                async with await reader.upgrade():
                    assert await other.rwlock(name).read().try_acquire() is None
            async with client.semaphore(name, permits=2), other.semaphore(name, permits=2):
                assert await other.semaphore(name, permits=2).try_acquire() is None
            async with client.lock_all([f"{name}:a", f"{name}:b"]) as lease:
                assert len(lease.tokens) == 2
            async with client.once_per(f"{name}:once", 3_600) as first, other.once_per(f"{name}:once", 3_600) as later:
                assert first is not None and later is None
            async with client.election(name, label="me") as leadership:
                leader = await other.election(name).leader()
                assert leader is not None and leader.token == leadership.token
            text = await (await client.lock(name).acquire()).detach()
            async with await other.attach(text):
                pass

            @client.locked(name + ":{user}", wait=0, busy="skip")
            async def report(user: int) -> int:
                return user

            assert await report(7) == 7
            async with other.lock(f"{name}:7"):
                assert await report(7) is None
                assert await other.force_release(f"{name}:7") != []

    # The last block's lease is lost, which it reports.
    with pytest.raises(leasehold.LeaseLost):
        run(work())


def test_tasks_of_one_loop_exclude_each_other_in_their_order(url: str, name: str) -> None:
    async def work() -> None:
        order: list[int] = []
        tokens: list[int] = []
        inside = 0

        async with aio.connect(url) as client:

            async def one(number: int) -> None:
                nonlocal inside
                async with client.lock(name) as lease:
                    assert inside == 0
                    inside += 1
                    order.append(number)
                    tokens.append(lease.token)
                    await asyncio.sleep(0)
                    inside -= 1

            async with asyncio.TaskGroup() as group:
                for number in range(100):
                    group.create_task(one(number))
        assert order == list(range(100))
        assert tokens == sorted(set(tokens))

    run(work())


def test_lock_is_granted_on_the_thread_that_releases(url: str, name: str) -> None:
    """A waiter of the same client is granted within the release: the loop need not look at a descriptor, and no other thread has to run."""

    async def work() -> None:
        async with aio.connect(url) as client:
            loop = asyncio.get_running_loop()
            lease = await client.lock(name).acquire()
            tasks = [asyncio.create_task(client.lock(name).acquire()) for _ in range(3)]
            await asyncio.sleep(0)  # Now they wait.
            # The first of them has asked the store, and the queue in this process has the lease from then on.
            await lease.release()
            lease = await tasks[0]
            watcher = client._watcher()
            for task in tasks[1:]:
                loop.remove_reader(watcher.completions.fileno())
                releasing = asyncio.create_task(lease.release())
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                is_granted, is_released = task.done(), releasing.done()
                loop.add_reader(watcher.completions.fileno(), watcher.take)
                assert is_granted and is_released
                lease = await task
            await lease.release()

    run(work())


def test_loss_cancels_the_body_and_raises_lease_lost(url: str, name: str) -> None:
    async def work() -> None:
        async with aio.connect(url) as client, aio.connect(url) as other:
            task = asyncio.current_task()
            assert task is not None
            cancelled = False
            with pytest.raises(leasehold.LeaseLost) as caught:
                async with client.lock(name, ttl=0.5):
                    try:
                        await other.force_release(name)
                        await asyncio.sleep(LIMIT)
                    except asyncio.CancelledError:
                        cancelled = True
                        raise
            assert cancelled and caught.value.reason == "gone"
            assert isinstance(caught.value.__cause__, asyncio.CancelledError)
            assert task.cancelling() == 0
            await asyncio.sleep(0.01)  # No cancellation is left over.

    run(work())


def test_body_that_ends_under_a_lost_lease_raises(name: str) -> None:
    async def work() -> None:
        async with aio.connect("memory:") as client:
            for swallow in (False, True):
                with pytest.raises(leasehold.LeaseLost):
                    async with client.lock(name, ttl=0.2, auto_renew=False):
                        if swallow:
                            try:
                                await asyncio.sleep(LIMIT)
                            except asyncio.CancelledError:
                                pass
                        else:
                            time.sleep(0.5)  # The loop is blocked, so that nothing cancels the body.
                task = asyncio.current_task()
                assert task is not None and task.cancelling() == 0
                await asyncio.sleep(0.01)

    run(work())


def test_cancellation_from_outside_is_not_masked_by_the_loss(name: str) -> None:
    async def work() -> None:
        async with aio.connect("memory:") as client:

            async def body() -> None:
                async with client.lock(name, ttl=30):
                    try:
                        await asyncio.sleep(LIMIT)
                    except asyncio.CancelledError:
                        await client.force_release(name)
                        # The loss comes while the cancellation is on its way.
                        await until(lambda: leasehold.current() is None or leasehold.current().is_lost, "is not lost")  # type: ignore[union-attr]
                        raise

            for first in ("outside", "loss"):
                task = asyncio.create_task(body())
                await until(lambda: holders(client, name), "the task does not hold the lock")
                if first == "outside":
                    task.cancel()
                else:
                    await client.force_release(name)
                    task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert task.cancelled()

    run(work())


async def holders(client: aio.Client, name: str) -> int:
    return len((await client.inspect(name)).holders)


def test_timeout_around_a_block_is_a_timeout(name: str) -> None:
    async def work() -> None:
        async with aio.connect("memory:") as client, aio.connect("memory:") as other:
            with pytest.raises(TimeoutError) as caught:
                async with asyncio.timeout(0.05), client.lock(name):
                    await asyncio.sleep(LIMIT)
            assert not isinstance(caught.value, leasehold.Error)
            async with client.lock(name):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await client.lock(name).acquire()
            assert await waiters(other, name) == 0

    run(work())


def test_error_of_the_body_is_kept_when_the_lease_is_lost(name: str) -> None:
    async def work() -> None:
        async with aio.connect("memory:") as client:
            with pytest.raises(KeyError, match="body"):
                async with client.lock(name, ttl=30):
                    try:
                        await client.force_release(name)
                        await asyncio.sleep(LIMIT)
                    except asyncio.CancelledError:
                        raise KeyError("body") from None
            task = asyncio.current_task()
            assert task is not None and task.cancelling() == 0

    run(work())


def test_error_of_the_release_does_not_replace_that_of_the_body(own_redis: Redis) -> None:
    async def work() -> None:
        async with aio.connect(own_redis.url) as client:
            with pytest.raises(KeyError) as caught:
                async with client.lock("a", ttl=30):
                    own_redis.freeze()
                    raise KeyError("body")
            assert any("release failed too" in note for note in caught.value.__notes__)
            own_redis.thaw()

    run(work())


def test_block_that_ends_in_another_task_is_an_error(name: str) -> None:
    async def work() -> None:
        async with aio.connect("memory:") as client:
            for cancels in (True, False):
                lock = client.lock(name, cancel_on_lost=cancels)
                await asyncio.create_task(enter(lock))
                if cancels:
                    with pytest.raises(RuntimeError, match="another task"):
                        await lock.__aexit__(None, None, None)
                else:
                    await lock.__aexit__(None, None, None)
                async with asyncio.timeout(LIMIT), client.lock(name):
                    pass  # It was released in any case.

    async def enter(lock: aio.Lock) -> None:
        await lock.__aenter__()

    run(work())


def test_loss_does_not_cancel_a_body_that_declined_it(name: str) -> None:
    async def work() -> None:
        async with aio.connect("memory:") as client:
            with pytest.raises(leasehold.LeaseLost):
                async with client.lock(name, cancel_on_lost=False) as lease:
                    await client.force_release(name)
                    assert await lease.wait_lost() == "gone"
                    assert lease.is_lost

    run(work())


def test_observer_iterates_over_the_leaders(url: str, name: str) -> None:
    async def work() -> None:
        async with aio.connect(url) as client, aio.connect(url) as other:
            seen: list[int | None] = []

            async def observe() -> None:
                async for leader in other.election(name).observe(every=0.02):
                    seen.append(None if leader is None else leader.token)

            observing = asyncio.create_task(observe())
            await until(lambda: seen == [None], "no first look")
            async with client.election(name) as leadership:
                await until(lambda: seen == [None, leadership.token], "the leader was not seen")
            await until(lambda: seen == [None, leadership.token, None], "the end was not seen")
            observing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await observing

    run(work())


def test_observer_that_is_cancelled_again_and_again_sees_the_change(name: str) -> None:
    async def work() -> None:
        async with aio.connect("memory:") as client:
            leaders = client.election(name).observe(every=0.1)
            assert await anext(leaders) is None
            async with client.election(name):
                while True:
                    try:
                        leader = await asyncio.wait_for(anext(leaders), 0.03)
                        break
                    except TimeoutError:
                        pass
                assert leader is not None

    run(work())


def test_upgrade_that_is_cancelled_loses_the_lease_and_ends_the_block(name: str) -> None:
    """The library releases it then: a body that has caught its own timeout would go on without a lock."""

    async def work() -> None:
        async with aio.connect("memory:a") as client, aio.connect("memory:a") as other, other.rwlock(name).read():
            went_on = False
            with pytest.raises(leasehold.LeaseLost) as caught:
                async with client.rwlock(name).upgradable() as reader:
                    waiting = asyncio.create_task(reader.wait_lost())
                    await asyncio.sleep(0)
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await reader.upgrade()
                    assert reader.is_lost and reader.loss == "gone"
                    await asyncio.sleep(LIMIT)
                    went_on = True
            assert caught.value.reason == "gone" and not went_on
            assert await waiting == "gone"

    run(work())


def test_upgrade_that_times_out_keeps_the_watch_over_the_lease(url: str, name: str) -> None:
    async def work() -> None:
        async with aio.connect(url) as client, aio.connect(url) as other, other.rwlock(name).read():
            with pytest.raises(leasehold.LeaseLost):
                async with client.rwlock(name, ttl=0.5).upgradable() as reader:
                    waiting = asyncio.create_task(reader.wait_lost())
                    with pytest.raises(leasehold.Timeout):
                        await reader.upgrade(wait=0.02)
                    await other.force_release(name, "rw", token=reader.token)
                    await asyncio.sleep(LIMIT)
            assert await waiting == "gone"

    run(work())


def test_loops_of_several_threads_use_one_client(url: str, name: str) -> None:
    client = aio.connect(url)
    errors: list[BaseException] = []

    async def work(number: int) -> None:
        async with client.lock(f"{name}:{number % 3}"):
            await asyncio.sleep(0)

    def thread() -> None:
        try:
            for number in range(10):
                run(work(number))
        except BaseException as error:
            errors.append(error)

    threads = [in_thread(thread) for _ in range(6)]
    for one in threads:
        one.join(LIMIT)
    assert not errors and not any(one.is_alive() for one in threads)
    run(client.close())


def test_blocked_loop_loses_nothing(url: str, name: str) -> None:
    async def work() -> None:
        async with aio.connect(url) as client, client.lock(name, ttl=0.5) as lease:
            time.sleep(1.5)
            lease.check()

    run(work())


def test_cancelled_acquisition_leaves_the_queue_and_keeps_nothing(url: str, name: str) -> None:
    async def work() -> None:
        async with aio.connect(url) as client, aio.connect(url) as other:
            async with other.lock(name):
                tasks = [asyncio.create_task(client.lock(name, global_fifo=True).acquire()) for _ in range(10)]
                await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                assert all(task.cancelled() for task in tasks)
            # A lease that was granted to one of them would keep the lock for its ttl, 10 s.
            async with asyncio.timeout(9):
                await (await other.lock(name).acquire()).release()

    run(work())


def test_acquisition_that_is_cancelled_after_its_grant_is_released(name: str) -> None:
    async def work() -> None:
        async with aio.connect("memory:") as client:
            lease = await client.lock(name).acquire()
            task = asyncio.create_task(client.lock(name).acquire())
            await asyncio.sleep(0)  # Now it waits.
            await lease.release()  # Grants it to the task, which has not run since.
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(9):
                await (await client.lock(name).acquire()).release()

    run(work())


def test_close_ends_the_waits_and_the_bodies_of_other_tasks(url: str, name: str) -> None:
    async def work() -> None:
        async with aio.connect(url) as other, other.lock(name):
            client = aio.connect(url)
            holds = asyncio.Event()

            async def wait() -> None:
                await client.lock(name).acquire()

            async def hold() -> None:
                async with client.lock(name + ":held"):
                    holds.set()
                    await asyncio.sleep(LIMIT)

            waiting, holding = [asyncio.create_task(wait()) for _ in range(10)], asyncio.create_task(hold())
            await holds.wait()
            await client.close()
            results = await asyncio.gather(*waiting, holding, return_exceptions=True)
            assert [type(result) for result in results] == [leasehold.ClientClosed] * 10 + [leasehold.LeaseLost]

    gc.collect()
    until_true(lambda: native_threads() <= 8, "threads of other tests remain")
    before = descriptors()
    for _ in range(3):
        run(work())
    # The errors have the frames of the tasks, and with them their locks. The threads of the clients end a little later, with their descriptors.
    until_true(lambda: gc.collect() >= 0 and descriptors() <= before + 2, "descriptors remain")


def test_client_is_used_in_one_loop_after_the_other(name: str) -> None:
    client = aio.connect(f"memory:{name}")

    async def work() -> int:
        async with client.lock(name) as lease:
            return lease.token

    before = 0
    for _ in range(20):
        token = run(work())
        assert token > before
        before = token
    gc.collect()
    assert not any(found() for found in client._watchers.values()), "a loop that is closed is kept"
    run(client.close())


def test_loop_that_is_closed_with_a_pending_task_harms_nobody(name: str) -> None:
    url = f"memory:{name}"
    client, other = aio.connect(url), leasehold.connect(url)
    held = other.lock(name).acquire()
    loop = asyncio.new_event_loop()

    async def wait() -> None:
        await client.lock(name).acquire()

    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0.02))
    loop.close()
    held.release()  # Grants the lock to a task that never runs again.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del task, loop
        gc.collect()
    other.lock(name).acquire(wait=LIMIT).release()
    run(client.close())
    other.close()


def test_many_cancelled_acquisitions_leave_memory_descriptors_and_threads_flat(own_redis: Redis) -> None:
    rounds = 100_000 if os.environ.get("LEASEHOLD_TEST_LONG") else 4_000

    batch = 200

    async def some(client: aio.Client, count: int = batch) -> None:
        tasks = [asyncio.create_task(client.lock("a", global_fifo=number % 2 == 0).acquire()) for number in range(count)]
        await asyncio.sleep(0.001 if count % 3 else 0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def work() -> None:
        async with aio.connect(own_redis.url) as client, aio.connect(own_redis.url) as other:
            async with other.lock("a"):
                # The attempts of a batch are gone before the next one: a server that is flooded answers nobody in time.
                for _ in range(rounds // batch // 2):
                    await some(client)
                    await until(lambda: waiters_gone(other), "waiters remain")
                before = (resident_kib(), descriptors(), native_threads())
                for _ in range(rounds // batch // 2):
                    await some(client)
                    await until(lambda: waiters_gone(other), "waiters remain")
                # What was cancelled is kept until the server has answered, which may be behind.
                await until(lambda: gc.collect() >= 0 and resident_kib() < before[0] + 8_192, f"{before[0]} KiB grow to {resident_kib()}")
                # A connection more or less is none of the attempts.
                assert descriptors() <= before[1] + 8 and native_threads() <= before[2] + 2
            async with asyncio.timeout(9):
                await (await other.lock("a").acquire()).release()

    async def waiters_gone(client: aio.Client) -> bool:
        return await waiters(client, "a") == 0

    run(work(), 10 * LIMIT)


def test_what_a_call_wakes_is_not_forgotten() -> None:
    """A release grants the lock to another operation of the loop, which is told also if nobody looks after that call."""
    with leasehold.connect("memory:") as client:
        lock = client.lock("a", ttl=60)
        lock.acquire().release()
        backend = lock._lock
        assert backend is not None
        completions = backend.completions()

        def result(operation: Any) -> Any:
            while not operation.is_done():
                assert select.select([completions.fileno()], [], [], LIMIT)[0], "the operation was not named"
                completions.take()
            return operation.result()

        held, waiting = result(backend.acquire(None, completions)), backend.acquire(None, completions)
        woken = 0
        for _ in range(20):
            following = backend.acquire(None, completions)
            completions.take()
            released = held.release(completions=completions)
            woken += completions.is_ready
            held, waiting = result(waiting), following
            result(released)
        assert woken > 10, "the calls themselves wake operations"
        held.release().result()
        result(waiting).release().result()
        completions.close()
