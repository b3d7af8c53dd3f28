"""The asyncio API: as the synchronous one, with ``await`` and ``async with``.

A lease that is lost cancels the body of its ``async with`` block, which then raises `LeaseLost`: as `asyncio.timeout` does it, so that a cancellation from
outside is never hidden. A blocked loop loses nothing with stores, because threads of the engine renew.

>>> import asyncio, leasehold
>>> async def main():
...     async with leasehold.aio.connect("memory:") as client:
...         async with client.lock("orders:42", wait=30) as lease:
...             return lease.name
>>> asyncio.run(main())
'orders:42'
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, Unpack

from . import _fork
from ._client import Changes, leader_of, not_granted
from ._errors import LeaseLost, Timeout
from ._info import holders, lock_info, lock_infos
from ._kinds import BaseClient
from ._lease import BaseLease, Blocks, entered, is_ignored, left
from ._terms import Settings, Terms, optional_seconds, optional_token, several
from ._terms import text as checked_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable
    from types import EllipsisType, FrameType, TracebackType

    from . import _backend
    from ._client import Holders
    from ._info import Holder, LockInfo
    from ._kinds import LockOptions, MutexOptions
    from ._terms import Seconds

__all__ = ["Client", "Election", "Lease", "Lock", "Observer", "RwLock", "TryLock", "connect"]

T = TypeVar("T")
P = ParamSpec("P")


class _Watcher:
    """The operations of one client in one loop, which watches their descriptor.

    Only the loop refers to it, by its reader. If the loop is closed with tasks that still wait, they are collected with it, and their operations are
    cancelled.
    """

    __slots__ = ("__weakref__", "_is_closing", "callbacks", "completions", "futures", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, completions: _backend.Completions) -> None:
        self.loop = weakref.ref(loop)
        self.completions = completions
        self.futures: dict[int, asyncio.Future[None]] = {}
        self.callbacks: dict[int, Callable[[], None]] = {}
        self._is_closing = False
        loop.add_reader(completions.fileno(), self.take)

    def take(self) -> None:
        """Hands the operations that have ended to those that wait for them."""
        futures = self.futures
        for key in self.completions.take():
            future = futures.pop(key, None)
            if future is not None:
                if not future.done():
                    future.set_result(None)
            else:
                callback = self.callbacks.pop(key, None)
                if callback is not None:
                    callback()
        if self._is_closing and not futures:
            self._close_now()

    def close(self) -> None:
        """Once no task waits any more: those that wait for a closed client are told so."""
        self._is_closing = True
        self.take()

    def _close_now(self) -> None:
        self._is_closing = False
        loop = self.loop()
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self.completions.fileno())
        self.completions.close()

    def close_later(self) -> None:
        """From any thread."""
        loop = self.loop()
        try:
            if loop is None or loop.is_closed():
                self._close_now()
            else:
                loop.call_soon_threadsafe(self.close)
        except RuntimeError:  # The loop was closed meanwhile.
            self.completions.close()


async def _call(client: Client, start: Callable[..., Any], *arguments: Any) -> Any:
    """Starts an operation, waits for it without blocking the loop, and returns its result. A cancellation cancels the operation."""
    watcher = client._watcher()
    completions = watcher.completions
    operation = start(*arguments, completions)
    if completions.is_ready:
        watcher.take()
    if operation.is_done():
        return operation.result()
    future = asyncio.get_running_loop().create_future()
    key = operation.key
    watcher.futures[key] = future
    try:
        await future
    except BaseException:
        watcher.futures.pop(key, None)
        operation.cancel()
        raise
    return operation.result()


class _Body:
    """The ``async with`` block of a lease: it is cancelled when the lease is lost."""

    __slots__ = ("_cancelling", "_has_cancelled", "_lease", "_loss", "_scheduled", "_watcher", "task")

    def __init__(self, lease: _backend.Lease, watcher: _Watcher) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a lease's block needs a task of asyncio")
        self.task = task
        self._cancelling = task.cancelling()
        self._has_cancelled = False
        self._scheduled: asyncio.Handle | None = None
        self._watcher = watcher
        self._lease = lease
        self._loss: _backend.Operation[str | None] | None = None
        self.watch()

    def watch(self) -> None:
        """Waits for the loss, in the loop."""
        self._end_watch()
        try:
            self._loss = loss = self._lease.lost(self._watcher.completions)
        except ValueError:  # They were closed with the client, and so was the lease.
            self._schedule()
            return
        if loss.is_done():
            self._on_loss()
        else:
            self._watcher.callbacks[loss.key] = self._on_loss

    def _end_watch(self) -> None:
        loss, self._loss = self._loss, None
        if loss is not None:
            self._watcher.callbacks.pop(loss.key, None)
            loss.cancel()

    def _on_loss(self) -> None:
        loss, self._loss = self._loss, None
        if loss is not None and loss.result() is not None:
            self._schedule()

    def _schedule(self) -> None:
        # Never at once: this may be called by the task itself, whose next await may be behind the block.
        self._scheduled = asyncio.get_running_loop().call_soon(self._cancel_task)

    def _cancel_task(self) -> None:
        self._scheduled = None
        self._has_cancelled = True
        self.task.cancel()

    def leave(self) -> bool:
        """The block ends. Whether a cancellation that ends it is that of the loss alone."""
        self._end_watch()
        if self._scheduled is not None:
            self._scheduled.cancel()
        return self._has_cancelled and self.task.uncancel() <= self._cancelling


class Lease(BaseLease):
    """A lock that is held, for a bounded time, which is renewed in the background until it is released.

    In an ``async with`` block it is released at the end, and its loss cancels the block.
    """

    __slots__ = ("_body", "_cancels", "_client", "_upgrading")

    def __init__(self, client: Client, lease: _backend.Lease, cancel_on_lost: bool = True) -> None:
        super().__init__(lease)
        self._client = client
        self._cancels = cancel_on_lost
        self._body: _Body | None = None
        self._upgrading: asyncio.Future[None] | None = None

    async def release(self, timeout: Seconds | None = None) -> None:
        """Releases the lock, and waits for the store's confirmation. A second call does nothing. If it is cancelled, the release goes on.

        Raises `LeaseLost` if it was lost before. With `Unavailable`, and `Timeout` after ``timeout`` seconds, the release is retried in the
        background, and the lease expires in any case.
        """
        _fork.check(self._generation)
        if self._ended:
            return
        limit = optional_seconds(timeout, "timeout")
        self._end()
        await _call(self._client, self._lease.release, limit)

    async def wait_lost(self) -> str | None:
        """Waits until the lease is lost, and returns the reason; None once it was released."""
        _fork.check(self._generation)
        while True:
            reason: str | None = await _call(self._client, self._lease.lost)
            if reason is not None or self._ended:
                return reason
            # An upgrade has ended the operation. If it fails, the lease goes on, or is lost.
            if self._upgrading is not None:
                await asyncio.wait({self._upgrading})

    async def renew(self) -> None:
        """Renews the lease to its whole ttl now. `LeaseLost`; `Unavailable` if the store did not confirm it."""
        _fork.check(self._generation)
        await _call(self._client, self._lease.renew)

    async def detach(self) -> str:
        """Lets the lease outlive this object and this process. It is not renewed any more. The returned text is a secret: `Client.attach` makes the
        lease of it again, once, in any process."""
        _fork.check(self._generation)
        text: str = await _call(self._client, self._consumed(self._lease.detach))
        return text

    async def downgrade(self) -> Lease:
        """Of a writer (or an upgradable reader): becomes a reader, with no moment in which the lock is free. The returned lease replaces this one.
        `Unsupported` for leases of other locks. After another error, or if it is cancelled, nothing is held: this lease is lost."""
        _fork.check(self._generation)
        return await self._replaced(_call(self._client, self._lease.downgrade))

    async def upgrade(self, wait: Seconds | None = None) -> Lease:
        """Of an upgradable reader: becomes a writer, with no writer in between. The returned lease replaces this one. `Timeout` after ``wait``
        seconds; this lease is held as before. `Unsupported` for leases of other locks. After another error, or if it is cancelled, nothing is held:
        this lease is lost."""
        _fork.check(self._generation)
        return await self._replaced(_call(self._client, self._lease.upgrade, optional_seconds(wait, "wait")), wait)

    async def _replaced(self, call: Coroutine[Any, Any, Any], wait: Seconds | None = None) -> Lease:
        lease = None
        upgrading = self._upgrading = asyncio.get_running_loop().create_future()
        try:
            lease = await call
        finally:
            self._upgrading = None
            upgrading.set_result(None)
            if lease is None:
                self._watch_again()
                if self._body is not None:
                    self._body.watch()
        if lease is None:
            raise Timeout(f"{self.name!r}: not upgraded within {wait} s")
        self._end()
        return Lease(self._client, lease, self._cancels)

    async def __aenter__(self) -> Self:
        _fork.check(self._generation)
        if self._cancels:
            self._body = _Body(self._lease, self._client._watcher())
        entered(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        left(self)
        body, self._body = self._body, None
        is_strange = body is not None and asyncio.current_task() is not body.task
        is_of_loss = body is not None and body.leave() and isinstance(error, asyncio.CancelledError)
        failed: Exception | None = None
        lost = LeaseLost(self._lease.loss_error(), self._lease.loss()) if is_of_loss else None
        try:
            await self.release()
        except Exception as release_failed:
            failed = release_failed
        if is_strange:
            raise RuntimeError(
                f"the block of {self.name!r} ends in another task than it began, so its loss would cancel the wrong task: use cancel_on_lost=False"
            ) from error
        if lost is not None:
            raise lost from error
        if failed is not None and not is_ignored(failed, error):
            raise failed


class _Handle:
    __slots__ = ("_cancels", "_client", "_held", "_lock", "_terms", "_wait")

    def __init__(self, client: Client, terms: Terms, wait: Seconds | None, cancel_on_lost: bool) -> None:
        self._client = client
        self._terms = terms
        self._wait = optional_seconds(wait, "wait")
        self._cancels = cancel_on_lost
        self._lock: _backend.Lock | None = None
        self._held = Blocks()

    @property
    def name(self) -> str:
        """The lock's name, with the client's namespace; of `Client.lock_all` all names, separated by commas."""
        return ",".join(self._terms.names)

    async def _acquire(self, wait: float | None) -> Lease | None:
        backend = self._client._open()
        lock = self._lock
        if lock is None:
            lock = self._lock = backend.lock(self._terms)
        lease = await _call(self._client, lock.acquire, wait)
        return None if lease is None else Lease(self._client, lease, self._cancels)

    async def _enter(self, frame: FrameType, lease: Lease | None) -> None:
        if lease is not None:
            await lease.__aenter__()
        self._held.push(frame, asyncio.current_task(), lease)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        lease: Lease | None = self._held.pop(sys._getframe(1), asyncio.current_task())
        if lease is not None:
            await lease.__aexit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<leasehold.aio.{type(self).__qualname__} {self._terms.kind} {self.name!r} of {self._client!r}>"


class Lock(_Handle):
    """A lock that can be acquired any number of times, by any task. Created by a `Client`; creating it sends nothing."""

    __slots__ = ()

    async def acquire(self, *, wait: Seconds | None | EllipsisType = ...) -> Lease:
        """Waits in the lock's queue at most ``wait`` seconds (by default those of the lock; None waits without a limit), and returns the lease.
        A cancelled task leaves the queue.

        Raises `Timeout`; `Unavailable` if the store does not answer; `QueueFull`; `InvalidInput`; `ClientClosed`.
        """
        limit = self._wait if wait is ... else optional_seconds(wait, "wait")
        lease = await self._acquire(limit)
        if lease is None:
            raise not_granted(self.name, limit)
        return lease

    async def try_acquire(self) -> Lease | None:
        """The lease if the lock is free now, or None."""
        return await self._acquire(0.0)

    async def __aenter__(self) -> Lease:
        frame = sys._getframe(1)
        lease = await self.acquire()
        await self._enter(frame, lease)
        return lease


class TryLock(_Handle):
    """A lock that may not be granted: the block runs in any case, and gets None then."""

    __slots__ = ()

    async def acquire(self) -> Lease | None:
        """The lease, or None if the lock was not granted."""
        return await self._acquire(self._wait)

    async def __aenter__(self) -> Lease | None:
        frame = sys._getframe(1)
        lease = await self.acquire()
        await self._enter(frame, lease)
        return lease


class RwLock:
    """Many readers or one writer. Created by `Client.rwlock`."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[str], Lock]) -> None:
        self._make = make

    def read(self) -> Lock:
        """The lock of a reader, which readers share."""
        return self._make("read")

    def write(self) -> Lock:
        """The lock of a writer, which excludes all others. Its lease can be downgraded."""
        return self._make("write")

    def upgradable(self) -> Lock:
        """The lock of the one reader that may become a writer by `Lease.upgrade`. Other readers share it."""
        return self._make("upgradable")


class Election(Lock):
    """One leader at a time; holding the lock is the leadership. Created by `Client.election`."""

    __slots__ = ()

    async def leader(self) -> Holder | None:
        """The current leader, or None."""
        return leader_of(await self._client._inspect("election", self.name))

    def observe(self, *, every: Seconds = 1.0) -> Observer:
        """An asynchronous iterator over the leaders: the current one first, then each that differs from the last one; None stands for no leader. It
        looks every ``every`` seconds (at least 0.01), and sees no leader that comes and goes between two looks.

        Raises `Unavailable`, after which it can be asked again, and `ClientClosed` once the client is closed.
        """
        return Observer(self, every)


class Observer:
    """The leaders of an election, one after the other. Created by `Election.observe`."""

    __slots__ = ("_changes", "_election")

    def __init__(self, election: Election, every: Seconds) -> None:
        self._election = election
        self._changes = Changes(every)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Holder | None:
        while True:
            await asyncio.sleep(self._changes.pause())
            self._changes.begin_look()
            leader = await self._election.leader()
            if self._changes.are_news(leader):
                return leader


class Client(BaseClient):
    """A client of a store, for asyncio. Created by `connect`. Its loops may be several, in several threads."""

    __slots__ = ("_watchers",)

    def __init__(self, url: str, namespace: str | None, settings: Settings) -> None:
        super().__init__(url, namespace, settings)
        # By the id of the loop.
        self._watchers: dict[int, weakref.ref[_Watcher]] = {}

    def _watcher(self) -> _Watcher:
        loop = asyncio.get_running_loop()
        found = self._watchers.get(id(loop))
        watcher = None if found is None else found()
        if watcher is not None and watcher.loop() is loop and self._generation == _fork.generation:
            return watcher
        watcher = _Watcher(loop, self._open().completions())
        # Other threads may have loops of their own.
        with self._opening:
            self._watchers = {key: found for key, found in self._watchers.items() if found() is not None}
            self._watchers[id(loop)] = weakref.ref(watcher)
        return watcher

    def lock(
        self,
        name: str,
        *,
        wait: Seconds | None = None,
        ttl: Seconds | None = None,
        cancel_on_lost: bool = True,
        **options: Unpack[MutexOptions],
    ) -> Lock:
        """A lock with one holder at a time. ``wait``: how long an acquisition waits in the queue, in seconds (None: without a limit). ``ttl``: after
        this many seconds the lock of a crashed holder is free (None: the client's; at least 0.1). A living holder renews it.

        ``cancel_on_lost=False``: the loss does not cancel the block, and the block may end in another task; look at `Lease.is_lost`.
        """
        return Lock(self, Terms("mutex", (self._name(name),), ttl=ttl, **options), wait, cancel_on_lost)

    def try_lock(
        self, name: str, *, ttl: Seconds | None = None, cancel_on_lost: bool = True, **options: Unpack[MutexOptions]
    ) -> TryLock:
        """As `lock`, but does not wait: the block gets None if the lock is held."""
        return TryLock(self, Terms("mutex", (self._name(name),), ttl=ttl, **options), 0.0, cancel_on_lost)

    def reentrant(
        self,
        name: str,
        *,
        owner: str,
        wait: Seconds | None = None,
        ttl: Seconds | None = None,
        cancel_on_lost: bool = True,
        **options: Unpack[LockOptions],
    ) -> Lock:
        """A mutex that its ``owner`` may acquire again, from any thread, task or process. Each acquisition has its own lease; the lock is free after
        the last one."""
        terms = Terms("reentrant", (self._name(name),), ttl=ttl, owner=owner, **options)
        return Lock(self, terms, wait, cancel_on_lost)

    def rwlock(
        self,
        name: str,
        *,
        wait: Seconds | None = None,
        ttl: Seconds | None = None,
        cancel_on_lost: bool = True,
        **options: Unpack[LockOptions],
    ) -> RwLock:
        """Many readers or one writer."""
        names = (self._name(name),)
        return RwLock(lambda kind: Lock(self, Terms(kind, names, ttl=ttl, **options), wait, cancel_on_lost))

    def semaphore(
        self,
        name: str,
        *,
        permits: int,
        take: int = 1,
        wait: Seconds | None = None,
        ttl: Seconds | None = None,
        cancel_on_lost: bool = True,
        **options: Unpack[LockOptions],
    ) -> Lock:
        """Up to ``permits`` permits (the same number everywhere), of which a holder takes ``take``."""
        terms = Terms("semaphore", (self._name(name),), ttl=ttl, capacity=permits, permits=take, **options)
        return Lock(self, terms, wait, cancel_on_lost)

    def lock_all(
        self,
        names: Iterable[str],
        *,
        wait: Seconds | None = None,
        ttl: Seconds | None = None,
        cancel_on_lost: bool = True,
        **options: Unpack[MutexOptions],
    ) -> Lock:
        """Several mutexes, all or none, without deadlock, in any order of the names."""
        terms = Terms("set", tuple(map(self._name, several(names))), ttl=ttl, **options)
        return Lock(self, terms, wait, cancel_on_lost)

    def once_per(
        self,
        name: str,
        period: Seconds,
        *,
        at_least_once: bool = False,
        wait: Seconds | None = None,
        ttl: Seconds | None = None,
        cancel_on_lost: bool = True,
        **options: Unpack[LockOptions],
    ) -> TryLock:
        """One start in each ``period`` (seconds, at least 1) among many candidates: the block gets None in all others. With ``at_least_once`` the others
        wait (at most ``wait`` seconds) until the work is done, and start it if its holder fails; `Timeout` if neither has happened."""
        terms = Terms("once_per", (self._name(name),), ttl=ttl, period=period, at_least_once=at_least_once, **options)
        return TryLock(self, terms, wait, cancel_on_lost)

    def election(
        self,
        name: str,
        *,
        wait: Seconds | None = None,
        ttl: Seconds | None = None,
        cancel_on_lost: bool = True,
        **options: Unpack[LockOptions],
    ) -> Election:
        """One leader at a time, which every client can look up. Holding the lock is the leadership."""
        return Election(self, Terms("election", (self._name(name),), ttl=ttl, **options), wait, cancel_on_lost)

    async def attach(self, text: str, *, cancel_on_lost: bool = True) -> Lease:
        """The lease that was detached, which is renewed again, in any process. `LeaseLost` if it has ended.

        Attach a text once. A text that is attached twice (by a message that is delivered twice) gives two leases with one token, which do not exclude
        each other; if one of them is released, the lock is free, and the other one is lost at its next renewal.
        """
        return Lease(self, await _call(self, self._open().attach, checked_text(text, "a detached lease")), cancel_on_lost)

    async def inspect(self, name: str, kind: str = "mutex") -> LockInfo:
        """The holders and waiters of a lock. ``kind``: ``mutex`` (also reentrant, once_per), ``rw``, ``semaphore``, ``election``."""
        return await self._inspect(kind, self._name(name))

    async def _inspect(self, kind: str, name: str) -> LockInfo:
        return lock_info(await _call(self, self._open().inspect, kind, name))

    async def list(self) -> list[LockInfo]:
        """All locks with a holder or a waiter, ordered by name: those of the client's namespace, if it has one."""
        infos = lock_infos(await _call(self, self._open().list))
        prefix = self._name("")
        return [info for info in infos if info.name.startswith(prefix)]

    async def force_release(self, name: str, kind: str = "mutex", *, token: int | None = None) -> Holders:
        """Takes the lock from its holders, or from the one with ``token``. Returns the former holders. They learn it at their next renewal, so only
        the fencing token protects what they write until then."""
        return holders(await _call(self, self._open().force_release, kind, self._name(name), optional_token(token)))

    def locked(
        self,
        name: str,
        *,
        wait: Seconds | None = None,
        busy: Literal["raise", "skip"] = "raise",
        ttl: Seconds | None = None,
        **options: Unpack[MutexOptions],
    ) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
        """A decorator of coroutine functions: as `leasehold.Client.locked`."""
        from ._locked import check, has_run, namer

        check(name, busy)

        def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
            import functools

            name_of = namer(name, function, is_async=True)

            @functools.wraps(function)
            async def locked(*arguments: P.args, **named: P.kwargs) -> T:
                lock = self.lock(name_of(arguments, named), wait=wait, ttl=ttl, **options)
                try:
                    lease = await lock.acquire()
                except Timeout:
                    if busy == "skip":
                        return None  # type: ignore[return-value]
                    raise
                async with lease:
                    return has_run(function, await function(*arguments, **named))

            return locked

        return decorate

    async def close(self, timeout: Seconds | None = None) -> None:
        """Releases all leases and ends all waits of this client; waits until the store has confirmed it, at most ``timeout`` seconds. A second call does
        nothing. `Unavailable` and `Timeout`: the releases go on in the background."""
        if self._generation != _fork.generation:
            return
        with self._opening:
            backend, was_closed, self._is_closed = self._backend, self._is_closed, True
        if backend is None or was_closed:
            return
        try:
            await _call(self, backend.close, optional_seconds(timeout, "timeout"))
        finally:
            self._close_watchers()

    def _close_watchers(self) -> None:
        with self._opening:
            watchers, self._watchers = self._watchers, {}
        for found in watchers.values():
            watcher = found()
            if watcher is not None:
                watcher.close_later()

    def __del__(self) -> None:
        if getattr(self, "_watchers", None) and self._generation == _fork.generation:
            self._close_watchers()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await self.close()
        except Exception as failed:
            if not is_ignored(failed, error):
                raise


def connect(
    url: str,
    *,
    namespace: str | None = None,
    ttl: Seconds | None = None,
    label: str | None = None,
    max_waiters: int | None = None,
    replicas: int | None = None,
    connect_timeout: Seconds | None = None,
    token: str | None = None,
) -> Client:
    """A client for asyncio of the store at ``url``: the addresses and options of `leasehold.connect`. Nothing is opened before the first use."""
    settings = Settings(
        ttl=ttl,
        label=label,
        max_waiters=max_waiters,
        replicas=replicas,
        connect_timeout=connect_timeout,
        token=token,
    )
    return Client(url, namespace, settings)
