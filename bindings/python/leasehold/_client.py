"""The synchronous API. A call blocks without the GIL, and Ctrl-C interrupts it within 100 ms."""

from __future__ import annotations

import sys
import time
from _thread import get_ident

from . import _fork
from ._errors import Timeout
from ._kinds import BaseClient
from ._lease import BaseLease, Blocks, entered, is_ignored, left
from ._terms import Settings, Terms, optional_seconds, optional_token, seconds, several
from ._terms import text as checked_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import EllipsisType, TracebackType
    from typing import Any, Literal, ParamSpec, Self, TypeAlias, TypeVar, Unpack

    from . import _backend
    from ._info import Holder, LockInfo
    from ._kinds import LockOptions, MutexOptions
    from ._terms import Seconds

    T = TypeVar("T")
    P = ParamSpec("P")
    # `list` is a method of the client.
    Holders: TypeAlias = list[Holder]


def _call(start: Callable[..., Any], *arguments: Any) -> Any:
    """Starts an operation, waits for it, and returns its result."""
    if "gevent" in sys.modules and _gevent_waits():
        from . import _gevent

        return _gevent.call(start, arguments)
    operation = start(*arguments)
    if not operation.is_done():
        try:
            operation.wait()
        except BaseException:
            operation.cancel()
            raise
    return operation.result()


def _gevent_waits() -> bool:
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


class Lease(BaseLease):
    """A lock that is held, for a bounded time, which is renewed in the background until it is released.

    As a context manager it is released at the end of the block:

    >>> with client.lock("orders:42").acquire() as lease:
    ...     print(lease.name)
    orders:42
    """

    __slots__ = ()

    def release(self, timeout: Seconds | None = None) -> None:
        """Releases the lock, and waits for the store's confirmation. A second call does nothing.

        Raises `LeaseLost` if it was lost before. With `Unavailable`, and `Timeout` after ``timeout`` seconds, the release is retried in the
        background, and the lease expires in any case.

        >>> lease = client.lock("orders:42").acquire()
        >>> lease.release()
        """
        _fork.check(self._generation)
        if self._ended:
            return
        self._end()
        _call(self._lease.release, optional_seconds(timeout, "timeout"))

    def renew(self) -> None:
        """Renews the lease to its whole ttl now. `LeaseLost`; `Unavailable` if the store did not confirm it.

        >>> with client.lock("orders:42", auto_renew=False) as lease:
        ...     lease.renew()
        """
        _fork.check(self._generation)
        _call(self._lease.renew)

    def detach(self) -> str:
        """Lets the lease outlive this object and this process. It is not renewed any more. The returned text is a secret: `Client.attach` makes the
        lease of it again, once, in any process.

        >>> text = client.lock("deploy", ttl=300).acquire().detach()
        >>> client.attach(text).release()
        """
        _fork.check(self._generation)
        text: str = _call(self._consumed(self._lease.detach))
        return text

    def downgrade(self) -> Lease:
        """Of a writer (or an upgradable reader): becomes a reader, with no moment in which the lock is free. The returned lease replaces this one.
        `Unsupported` for leases of other locks. After another error, and after Ctrl-C, nothing is held: this lease is lost.

        >>> writer = client.rwlock("prices").write().acquire()
        >>> reader = writer.downgrade()
        >>> reader.release()
        """
        _fork.check(self._generation)
        return self._replaced(_call(self._lease.downgrade))

    def upgrade(self, wait: Seconds | None = None) -> Lease:
        """Of an upgradable reader: becomes a writer, with no writer in between. The returned lease replaces this one. `Timeout` after ``wait``
        seconds; this lease is held as before. `Unsupported` for leases of other locks. After another error, and after Ctrl-C, nothing is held: this
        lease is lost.

        >>> reader = client.rwlock("prices").upgradable().acquire()
        >>> writer = reader.upgrade()
        >>> writer.release()
        """
        _fork.check(self._generation)
        upgraded = None
        try:
            upgraded = _call(self._lease.upgrade, optional_seconds(wait, "wait"))
        finally:
            if upgraded is None:
                self._watch_again()
        if upgraded is None:
            raise Timeout(f"{self.name!r}: not upgraded within {wait} s")
        return self._replaced(upgraded)

    def _replaced(self, lease: _backend.Lease) -> Lease:
        self._end()
        return Lease(lease)

    def __enter__(self) -> Self:
        entered(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        left(self)
        try:
            self.release()
        except Exception as failed:
            if not is_ignored(failed, error):
                raise


class _Handle:
    __slots__ = ("_client", "_held", "_lock", "_terms", "_wait")

    def __init__(self, client: Client, terms: Terms, wait: Seconds | None) -> None:
        self._client = client
        self._terms = terms
        self._wait = optional_seconds(wait, "wait")
        self._lock: _backend.Lock | None = None
        self._held = Blocks()

    @property
    def name(self) -> str:
        """The lock's name, with the client's namespace; of `Client.lock_all` all names, separated by commas."""
        return ",".join(self._terms.names)

    def _acquire(self, wait: float | None) -> Lease | None:
        backend = self._client._open()
        lock = self._lock
        if lock is None:
            lock = self._lock = backend.lock(self._terms)
        lease = _call(lock.acquire, wait)
        return None if lease is None else Lease(lease)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        lease: Lease | None = self._held.pop(sys._getframe(1), get_ident())
        if lease is not None:
            lease.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<{type(self).__qualname__} {self._terms.kind} {self.name!r} of {self._client!r}>"


class Lock(_Handle):
    """A lock that can be acquired any number of times, by any thread. Created by a `Client`; creating it sends nothing.

    >>> orders = client.lock("orders:42", wait=30)
    >>> with orders as lease:
    ...     print(lease.name)
    orders:42
    """

    __slots__ = ()

    def acquire(self, *, wait: Seconds | None | EllipsisType = ...) -> Lease:
        """Waits in the lock's queue at most ``wait`` seconds (by default those of the lock; None waits without a limit), and returns the lease.

        Raises `Timeout`; `Unavailable` if the store does not answer; `QueueFull`; `InvalidInput`; `ClientClosed`.

        >>> lease = client.lock("orders:42").acquire(wait=30)
        >>> lease.release()
        """
        limit = self._wait if wait is ... else optional_seconds(wait, "wait")
        lease = self._acquire(limit)
        if lease is None:
            raise not_granted(self.name, limit)
        return lease

    def try_acquire(self) -> Lease | None:
        """The lease if the lock is free now, or None.

        >>> with client.lock("orders:42"):
        ...     print(client.lock("orders:42").try_acquire())
        None
        """
        return self._acquire(0.0)

    def __enter__(self) -> Lease:
        lease = self.acquire()
        entered(lease)
        self._held.push(sys._getframe(1), get_ident(), lease)
        return lease


class TryLock(_Handle):
    """A lock that may not be granted: the block runs in any case, and gets None then.

    >>> with client.try_lock("orders:42") as lease:
    ...     print("mine" if lease else "busy")
    mine
    """

    __slots__ = ()

    def acquire(self) -> Lease | None:
        """The lease, or None if the lock was not granted.

        >>> client.once_per("lottery", 3600).acquire() is None
        False
        """
        return self._acquire(self._wait)

    def __enter__(self) -> Lease | None:
        lease = self.acquire()
        if lease is not None:
            entered(lease)
        self._held.push(sys._getframe(1), get_ident(), lease)
        return lease


class RwLock:
    """Many readers or one writer. Created by `Client.rwlock`.

    >>> with client.rwlock("prices").read():
    ...     pass
    """

    __slots__ = ("_client", "_make")

    def __init__(self, client: Client, make: Callable[[str], Lock]) -> None:
        self._client = client
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
    """One leader at a time; holding the lock is the leadership. Created by `Client.election`.

    >>> with client.election("scheduler", label="http://10.0.0.7:8080"):
    ...     print(client.election("scheduler").leader().process.label)
    http://10.0.0.7:8080
    """

    __slots__ = ()

    def leader(self) -> Holder | None:
        """The current leader, or None.

        >>> client.election("scheduler").leader() is None
        True
        """
        return leader_of(self._client._inspect("election", self.name))

    def observe(self, *, every: Seconds = 1.0) -> Observer:
        """An iterator over the leaders: the current one first, then each that differs from the last one; None stands for no leader. It looks every
        ``every`` seconds (at least 0.01), and sees no leader that comes and goes between two looks.

        Raises `Unavailable`, after which it can be asked again, and `ClientClosed` once the client is closed.

        >>> with client.election("scheduler") as leadership:
        ...     for leader in client.election("scheduler").observe():
        ...         print(leader.token == leadership.token)
        ...         break
        True
        """
        return Observer(self, every)


class Observer:
    """The leaders of an election, one after the other. Created by `Election.observe`."""

    __slots__ = ("_changes", "_election")

    def __init__(self, election: Election, every: Seconds) -> None:
        self._election = election
        self._changes = Changes(every)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Holder | None:
        while True:
            time.sleep(self._changes.pause())
            self._changes.begin_look()
            leader = self._election.leader()
            if self._changes.are_news(leader):
                return leader


class Changes:
    """Which looks at a leader show a change, and when the next look is due."""

    __slots__ = ("_due", "_every", "_is_first", "_token")

    def __init__(self, every: Seconds) -> None:
        # A day at most: the system's clock does not sleep for ever.
        self._every = min(max(0.01, seconds(every, "every")), 86_400.0)
        self._due = 0.0
        self._is_first = True
        self._token: int | None = None

    def pause(self) -> float:
        """Seconds until the next look is due."""
        return max(0.0, self._due - time.monotonic())

    def begin_look(self) -> None:
        """The next look is due later, also if this one fails."""
        self._due = time.monotonic() + self._every

    def are_news(self, leader: Holder | None) -> bool:
        token = None if leader is None else leader.token
        if not self._is_first and token == self._token:
            return False
        self._is_first, self._token = False, token
        return True


def leader_of(info: LockInfo) -> Holder | None:
    return next((holder for holder in info.holders if not holder.is_retained), None)


def not_granted(name: str, wait: float | None) -> Timeout:
    return Timeout(f"{name!r}: not granted within {0.0 if wait is None else wait:g} s")


class Client(BaseClient):
    """A client of a store. Created by `connect`. Thread-safe; one for the whole program is enough."""

    __slots__ = ()

    def lock(
        self, name: str, *, wait: Seconds | None = None, ttl: Seconds | None = None, **options: Unpack[MutexOptions]
    ) -> Lock:
        """A lock with one holder at a time. ``wait``: how long an acquisition waits in the queue, in seconds (None: without a limit). ``ttl``: after
        this many seconds the lock of a crashed holder is free (None: the client's; at least 0.1). A living holder renews it.

        >>> with client.lock("orders:42", ttl=10, wait=30) as lease:
        ...     print(lease.is_lost)
        False
        """
        return Lock(self, Terms("mutex", (self._name(name),), ttl=ttl, **options), wait)

    def try_lock(self, name: str, *, ttl: Seconds | None = None, **options: Unpack[MutexOptions]) -> TryLock:
        """As `lock`, but does not wait: the block gets None if the lock is held.

        >>> with client.try_lock("orders:42") as lease:
        ...     if lease:
        ...         print("mine")
        mine
        """
        return TryLock(self, Terms("mutex", (self._name(name),), ttl=ttl, **options), 0.0)

    def reentrant(
        self,
        name: str,
        *,
        owner: str,
        wait: Seconds | None = None,
        ttl: Seconds | None = None,
        **options: Unpack[LockOptions],
    ) -> Lock:
        """A mutex that its ``owner`` may acquire again, from any thread, task or process. Each acquisition has its own lease; the lock is free after
        the last one.

        >>> with client.reentrant("account:7", owner="request-93ab"):
        ...     with client.reentrant("account:7", owner="request-93ab"):
        ...         pass
        """
        return Lock(self, Terms("reentrant", (self._name(name),), ttl=ttl, owner=owner, **options), wait)

    def rwlock(
        self, name: str, *, wait: Seconds | None = None, ttl: Seconds | None = None, **options: Unpack[LockOptions]
    ) -> RwLock:
        """Many readers or one writer.

        >>> with client.rwlock("prices").write() as lease:
        ...     pass
        """
        names = (self._name(name),)
        return RwLock(self, lambda kind: Lock(self, Terms(kind, names, ttl=ttl, **options), wait))

    def semaphore(
        self,
        name: str,
        *,
        permits: int,
        take: int = 1,
        wait: Seconds | None = None,
        ttl: Seconds | None = None,
        **options: Unpack[LockOptions],
    ) -> Lock:
        """Up to ``permits`` permits (the same number everywhere), of which a holder takes ``take``.

        >>> with client.semaphore("uploads", permits=3):
        ...     pass
        """
        terms = Terms("semaphore", (self._name(name),), ttl=ttl, capacity=permits, permits=take, **options)
        return Lock(self, terms, wait)

    def lock_all(
        self,
        names: Iterable[str],
        *,
        wait: Seconds | None = None,
        ttl: Seconds | None = None,
        **options: Unpack[MutexOptions],
    ) -> Lock:
        """Several mutexes, all or none, without deadlock, in any order of the names.

        >>> with client.lock_all(["account:9", "account:7"]) as lease:
        ...     sorted(lease.tokens)
        ['account:7', 'account:9']
        """
        return Lock(self, Terms("set", tuple(map(self._name, several(names))), ttl=ttl, **options), wait)

    def once_per(
        self,
        name: str,
        period: Seconds,
        *,
        at_least_once: bool = False,
        wait: Seconds | None = None,
        ttl: Seconds | None = None,
        **options: Unpack[LockOptions],
    ) -> TryLock:
        """One start in each ``period`` (seconds, at least 1) among many candidates: the block gets None in all others. With ``at_least_once`` the others
        wait (at most ``wait`` seconds) until the work is done, and start it if its holder fails; `Timeout` if neither has happened.

        >>> for candidate in range(2):
        ...     with client.once_per("nightly", 3600) as lease:
        ...         print("started" if lease else "someone else has")
        started
        someone else has
        """
        terms = Terms("once_per", (self._name(name),), ttl=ttl, period=period, at_least_once=at_least_once, **options)
        return TryLock(self, terms, wait)

    def election(
        self, name: str, *, wait: Seconds | None = None, ttl: Seconds | None = None, **options: Unpack[LockOptions]
    ) -> Election:
        """One leader at a time, which every client can look up. Holding the lock is the leadership.

        >>> with client.election("scheduler") as leadership:
        ...     client.election("scheduler").leader().token == leadership.token
        True
        """
        return Election(self, Terms("election", (self._name(name),), ttl=ttl, **options), wait)

    def attach(self, text: str) -> Lease:
        """The lease that was detached, which is renewed again, in any process. `LeaseLost` if it has ended.

        Attach a text once. A text that is attached twice (by a message that is delivered twice) gives two leases with one token, which do not exclude
        each other; if one of them is released, the lock is free, and the other one is lost at its next renewal.

        >>> text = client.lock("deploy").acquire().detach()
        >>> with client.attach(text):
        ...     pass
        """
        return Lease(_call(self._open().attach, checked_text(text, "a detached lease")))

    def inspect(self, name: str, kind: str = "mutex") -> LockInfo:
        """The holders and waiters of a lock. ``kind``: ``mutex`` (also reentrant, once_per), ``rw``, ``semaphore``, ``election``.

        >>> with client.lock("orders:42") as lease:
        ...     client.inspect("orders:42").holders[0].token == lease.token
        True
        """
        return self._inspect(kind, self._name(name))

    def _inspect(self, kind: str, name: str) -> LockInfo:
        from ._info import lock_info

        return lock_info(_call(self._open().inspect, kind, name))

    def list(self) -> list[LockInfo]:
        """All locks with a holder or a waiter, ordered by name: those of the client's namespace, if it has one.

        >>> with client.lock("orders:42"):
        ...     [lock.name for lock in client.list()]
        ['orders:42']
        """
        from ._info import lock_infos

        infos = lock_infos(_call(self._open().list))
        prefix = self._name("")
        return [info for info in infos if info.name.startswith(prefix)]

    def force_release(self, name: str, kind: str = "mutex", *, token: int | None = None) -> Holders:
        """Takes the lock from its holders, or from the one with ``token``. Returns the former holders. They learn it at their next renewal, so only
        the fencing token protects what they write until then.

        >>> lease = client.lock("orders:42").acquire()
        >>> len(client.force_release("orders:42"))
        1
        """
        from ._info import holders

        return holders(_call(self._open().force_release, kind, self._name(name), optional_token(token)))

    def locked(
        self,
        name: str,
        *,
        wait: Seconds | None = None,
        busy: Literal["raise", "skip"] = "raise",
        ttl: Seconds | None = None,
        **options: Unpack[MutexOptions],
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """A decorator: the function runs under the lock whose name is ``name``, with the function's arguments by name in braces. If the lock is not
        granted within ``wait`` seconds it raises `Timeout`, or returns None with ``busy="skip"``.

        >>> @client.locked("report:{user_id}", wait=0, busy="skip")
        ... def report(user_id: int) -> str:
        ...     return f"report of {user_id}"
        >>> report(7)
        'report of 7'
        """
        from ._locked import check, has_run, namer

        check(name, busy)

        def decorate(function: Callable[P, T]) -> Callable[P, T]:
            import functools

            name_of = namer(name, function, is_async=False)

            @functools.wraps(function)
            def locked(*arguments: P.args, **named: P.kwargs) -> T:
                lock = self.lock(name_of(arguments, named), wait=wait, ttl=ttl, **options)
                try:
                    lease = lock.acquire()
                except Timeout:
                    if busy == "skip":
                        return None  # type: ignore[return-value]
                    raise
                with lease:
                    return has_run(function, function(*arguments, **named))

            return locked

        return decorate

    def close(self, timeout: Seconds | None = None) -> None:
        """Releases all leases and ends all waits of this client; waits until the store has confirmed it, at most ``timeout`` seconds. A second call does
        nothing. `Unavailable` and `Timeout`: the releases go on in the background.

        >>> other = leasehold.connect("memory:")
        >>> other.close()
        """
        if self._generation != _fork.generation:
            return
        with self._opening:
            backend, was_closed, self._is_closed = self._backend, self._is_closed, True
        if backend is not None and not was_closed:
            _call(backend.close, optional_seconds(timeout, "timeout"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
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
    """A client of the store at ``url``: ``redis://host[:port]``, ``rediss://…``, ``redis-sentinel://…``, ``redis-cluster://…``, ``redlock://…``,
    ``postgres://user@host/database``, ``sqlite:/path/to/file``, ``memory:``, or a server of ``leasehold serve``: ``http://…``, ``https://…``, ``unix:/path``.

    Nothing is opened before the first use, so a program may fork after this call. Close the client, or use it in a ``with`` block.

    - ``namespace``: the names of all locks begin with it and a colon.
    - ``ttl``: of locks that set none, in seconds (10 by default; 30 over HTTP).
    - ``label``: a text that `Client.inspect` shows, besides the host, the process and the program.
    - ``max_waiters``, ``replicas``: the defaults of the locks' options.
    - ``connect_timeout``: in seconds; 5 by default on Redis.
    - ``token``: the bearer token of a server of ``leasehold serve``.

    >>> with leasehold.connect("memory:") as client:
    ...     with client.lock("orders:42") as lease:
    ...         print(lease.name)
    orders:42
    """
    settings = Settings(
        ttl=ttl,
        label=label,
        max_waiters=max_waiters,
        replicas=replicas,
        connect_timeout=connect_timeout,
        token=token,
    )
    return Client(url, namespace, settings)
