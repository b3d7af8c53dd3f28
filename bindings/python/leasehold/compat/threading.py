"""Locks in the shape of those of the standard library's `threading`, which exclude the threads of all processes and hosts.

    locks = leasehold.compat.threading.Factory(client, "app")
    lock = locks.Lock("orders")
    with lock:
        ...

They go wherever a `threading.Lock`, an `RLock` or a `BoundedSemaphore` goes, also into `threading.Condition`. Two differences remain, because a lease
can be lost: ``release`` then raises `LeaseLost`, and ``acquire`` may raise `Unavailable`. `Lock.lease` has the fencing token.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Literal

from ._leases import Leases

if TYPE_CHECKING:
    from types import TracebackType

    from .. import _client

# More seconds than that are no limit.
_NO_LIMIT = 1e8


def _wait(blocking: bool, timeout: float) -> float | None:
    """What the arguments of `threading.Lock.acquire` are for `leasehold.Lock.acquire`, with its errors."""
    if not blocking:
        if timeout != -1:
            raise ValueError("can't specify a timeout for a non-blocking call")
        return 0.0
    if timeout == -1:
        return None
    if timeout < 0:
        raise ValueError("timeout value must be a non-negative number")
    if timeout > threading.TIMEOUT_MAX:
        raise OverflowError("timeout value is too large")
    return timeout if timeout < _NO_LIMIT else None


class Lock:
    """As `threading.Lock`. Any thread of this process may release it."""

    def __init__(self, client: _client.Client, name: str, *, ttl: float | None = None) -> None:
        self._lock = client.lock(name, ttl=ttl)
        self._leases = Leases()

    @property
    def lease(self) -> _client.Lease | None:
        """The lease while this object holds the lock, and after its loss until it is released."""
        return self._leases.next()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        lease = self._lock._acquire(_wait(blocking, timeout))
        if lease is None:
            return False
        self._leases.add(lease)
        return True

    def release(self) -> None:
        lease = self._leases.take()
        if lease is None:
            raise RuntimeError("release unlocked lock")
        lease.release()

    def locked(self) -> bool:
        """Whether this object holds the lock; other processes do not count."""
        return self._leases.are_held()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        """For the standard library: a child of a fork holds nothing."""
        self._leases = Leases()

    def __repr__(self) -> str:
        state = "locked" if self.locked() else "unlocked"
        return f"<{state} {type(self).__module__}.{type(self).__qualname__} object {self._lock.name!r} at {id(self):#x}>"


class RLock:
    """As `threading.RLock`: the thread that holds it may acquire it again. It has one lease, which ends with the last release."""

    def __init__(self, client: _client.Client, name: str, *, ttl: float | None = None) -> None:
        self._block = Lock(client, name, ttl=ttl)
        self._owner: int | None = None
        self._count = 0
        # For both: after a loss another thread may acquire the lock at any moment.
        self._mutex = threading.RLock()

    @property
    def lease(self) -> _client.Lease | None:
        """The lease while a thread holds the lock."""
        return self._block.lease

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._is_owned():
            _wait(blocking, timeout)
            lease = self._block.lease
            if lease is not None:
                # It may be another's by now.
                lease.check()
            self._count += 1
            return True
        if not self._block.acquire(blocking, timeout):
            return False
        with self._mutex:
            self._owner, self._count = threading.get_ident(), 1
        return True

    def release(self) -> None:
        with self._mutex:
            is_owned = self._is_owned()
            if is_owned:
                self._count -= 1
                if self._count > 0:
                    return
                self._owner = None
        # If it was lost, another thread may have acquired the lock since.
        if not is_owned and not self._block._leases.has_own():
            raise RuntimeError("cannot release un-acquired lock")
        self._block.release()

    def locked(self) -> bool:
        """Whether a thread of this process holds the lock by this object."""
        return self._block.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    # For `threading.Condition`.

    def _is_owned(self) -> bool:
        return self._owner == threading.get_ident()

    def _recursion_count(self) -> int:
        return self._count if self._is_owned() else 0

    def _release_save(self) -> tuple[int, int]:
        with self._mutex:
            if not self._is_owned():
                raise RuntimeError("cannot release un-acquired lock")
            count, self._count, self._owner = self._count, 0, None
        self._block.release()
        return count, threading.get_ident()

    def _acquire_restore(self, state: tuple[int, int]) -> None:
        self._block.acquire()
        with self._mutex:
            self._count, self._owner = state

    def _at_fork_reinit(self) -> None:
        self._block._at_fork_reinit()
        self._owner, self._count, self._mutex = None, 0, threading.RLock()

    def __repr__(self) -> str:
        state = "locked" if self.locked() else "unlocked"
        what = f"{type(self).__module__}.{type(self).__qualname__}"
        return f"<{state} {what} object {self._block._lock.name!r} owner={self._owner} count={self._count} at {id(self):#x}>"


class BoundedSemaphore:
    """As `threading.BoundedSemaphore`: `value` permits for all processes, which pass the same number. A release needs a permit of this object."""

    def __init__(self, client: _client.Client, name: str, value: int = 1, *, ttl: float | None = None) -> None:
        if value < 1:
            raise ValueError("a semaphore has at least one permit")
        self._semaphore = client.semaphore(name, permits=value, ttl=ttl)
        self._value = value
        self._leases = Leases()

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        if not blocking and timeout is not None:
            raise ValueError("can't specify timeout for non-blocking acquire")
        # A negative number of seconds does not wait.
        lease = self._semaphore._acquire(_wait(blocking, -1 if timeout is None else max(timeout, 0.0)))
        if lease is None:
            return False
        self._leases.add(lease)
        return True

    def release(self, n: int = 1) -> None:
        if n < 1:
            raise ValueError("n must be one or more")
        if n > len(self._leases):
            raise ValueError("Semaphore released too many times")
        failed = None
        for _ in range(n):
            lease = self._leases.take()
            try:
                if lease is not None:
                    lease.release()
            except Exception as error:  # The others are released all the same.
                failed = failed or error
        if failed is not None:
            raise failed

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        free = self._value - len(self._leases)
        return f"<leasehold.{type(self).__qualname__} at {id(self):#x}: value={free}/{self._value}>"


class Factory:
    """Makes locks whose names begin with a prefix. Those without a name of their own are numbered in the order in which they are made, which must then be
    the same in all processes.

    >>> locks = Factory(client, "app")
    >>> with locks.Lock("orders") as is_locked:
    ...     print(is_locked)
    True
    >>> locks.RLock()
    <unlocked leasehold.compat.threading.RLock object 'app:rlock-1' owner=None count=0 at 0x...>
    """

    def __init__(self, client: _client.Client, prefix: str, *, ttl: float | None = None) -> None:
        self._client = client
        self._prefix = prefix
        self._ttl = ttl
        self._counts: dict[str, int] = {}
        self._mutex = threading.Lock()

    def Lock(self, name: str | None = None) -> Lock:  # noqa: N802
        """A `Lock`."""
        return Lock(self._client, self._name("lock", name), ttl=self._ttl)

    def RLock(self, name: str | None = None) -> RLock:  # noqa: N802
        """An `RLock`."""
        return RLock(self._client, self._name("rlock", name), ttl=self._ttl)

    def BoundedSemaphore(self, value: int = 1, name: str | None = None) -> BoundedSemaphore:  # noqa: N802
        """A `BoundedSemaphore`."""
        return BoundedSemaphore(self._client, self._name("semaphore", name), value, ttl=self._ttl)

    def _name(self, kind: Literal["lock", "rlock", "semaphore"], name: str | None) -> str:
        if name is None:
            with self._mutex:
                number = self._counts[kind] = self._counts.get(kind, 0) + 1
            name = f"{kind}-{number}"
        return f"{self._prefix}:{name}"
