"""What a back end offers: the native engine (``_native``) for stores, and ``_http`` for servers. For type checkers only: nothing imports it.

**A call is an operation.** Each method that talks to a store returns an `Operation`, which has been started. The synchronous API calls
``wait`` and then ``result``. The asyncio API passes its loop's `Completions` to the method, watches ``completions.fileno()`` with
``add_reader``, and calls ``take`` when it is readable.

**No thread of a back end calls into the API**, no exception but those of `leasehold._errors` leaves a back end (besides `KeyboardInterrupt`),
and no back end knows asyncio. Durations are seconds as float. A back end of a process that has forked is never called in the child: the API
compares generations (`leasehold._fork`). Its objects may however be dropped there, which must do nothing.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Operation(Protocol, Generic[T_co]):
    """A started call. Dropping it cancels it."""

    @property
    def key(self) -> int:
        """By which `Completions.take` names it; unique among the operations of one `Completions`."""
        ...

    def is_done(self) -> bool:
        """Whether it has a result, an error, or was cancelled. Never blocks."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks, without the GIL, until the operation is done: True. After ``timeout`` seconds: False. Signal handlers run within 100 ms, and
        what they raise (`KeyboardInterrupt`) is raised here; the operation goes on until it is cancelled. Only for operations without completions."""
        ...

    def cancel(self) -> None:
        """Ends the operation without a result. An acquisition leaves the queue, and a lease that was granted meanwhile is released, in the
        background. A no-op once it is done, except that a lease in a result that was not taken is released."""
        ...

    def result(self) -> T_co:
        """The result, once: it raises the operation's error. `RuntimeError` before it is done, after it was cancelled, and for the second call."""
        ...


class Completions(Protocol):
    """The operations of one event loop (or of the package's own thread) that have ended. Used by one thread."""

    def fileno(self) -> int:
        """Readable while `take` would return something."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether `take` should be called now, because a call on this thread (a release that hands the lock over) has ended other operations."""
        ...

    def take(self) -> list[int]:
        """The keys of the operations that have ended since the last call, in that order; makes the descriptor unreadable. Each started operation
        that is not done at once is named exactly once, unless it was cancelled. One that is done when its method returns is not named."""
        ...

    def close(self) -> None:
        """Closes the descriptor. Operations that are still running are never reported."""
        ...


class Terms(Protocol):
    """What to lock, and how: an instance of `leasehold._terms.Terms`."""

    kind: str
    """``mutex``, ``reentrant``, ``read``, ``write``, ``upgradable``, ``semaphore``, ``once_per``, ``election`` or ``set``."""
    names: tuple[str, ...]
    """One name; several for a ``set`` of mutexes, all or none."""
    ttl: float | None
    """None: the client's."""
    auto_renew: bool
    min_hold: float
    max_hold: float | None
    max_waiters: int | None
    replicas: int | None
    label: str | None
    trace_id: str | None
    owner: str | None
    """Of a reentrant lock."""
    permits: int
    """How many this holder takes of a semaphore."""
    capacity: int
    """How many a semaphore has."""
    period: float
    """Of ``once_per``."""
    at_least_once: bool
    """Of ``once_per``."""
    global_fifo: bool
    detachable: bool
    bridge: tuple[str, ...] | None
    """The other library's lock that is taken too: the name of a function in `leasehold.bridge`, and its arguments."""


class Settings(Protocol):
    """Of a client: an instance of `leasehold._terms.Settings`."""

    ttl: float | None
    label: str | None
    max_waiters: int | None
    replicas: int | None
    connect_timeout: float | None
    token: str | None
    """The bearer token of a server of ``leasehold serve``."""


class Lease(Protocol):
    """A granted lease. Dropping it releases it in the background (native), or lets it expire after an attempt to release it (HTTP)."""

    @property
    def name(self) -> str: ...
    @property
    def token(self) -> int: ...
    @property
    def tokens(self) -> dict[str, int]:
        """By name: one, or those of a set."""
        ...

    def remaining(self) -> float:
        """Seconds for which the lease may be trusted, by a clock that counts suspend where there is one. 0.0 once it is lost, released or detached."""
        ...

    def loss(self) -> str | None:
        """Why the lease is lost: a reason of `LeaseLost`. None while it is held, and after it was released or detached."""
        ...

    def loss_error(self) -> str:
        """The message of `LeaseLost` for `loss`."""
        ...

    def completions(self) -> Completions:
        """As `Backend.completions`, for the thread that calls ``on_lost`` callbacks: it takes one for all leases of this class."""
        ...

    def lost(self, completions: Completions | None = None) -> Operation[str | None]:
        """Ends with the reason once the lease is lost, with None when it is released or detached."""
        ...

    def renew(self, completions: Completions | None = None) -> Operation[None]: ...

    def release(self, timeout: float | None = None, completions: Completions | None = None) -> Operation[None]:
        """`LeaseLost` if it was lost before. `Timeout` after ``timeout`` seconds, and `Unavailable`: it is then retried in the background. The
        lease is not held from the call on, also if the operation is cancelled."""
        ...

    def detach(self, completions: Completions | None = None) -> Operation[str]: ...

    def downgrade(self, completions: Completions | None = None) -> Operation[Lease]:
        """Of ``write`` and ``upgradable``: the lease of a reader, which replaces this one. `Unsupported` for others."""
        ...

    def upgrade(self, wait: float | None = None, completions: Completions | None = None) -> Operation[Lease | None]:
        """Of ``upgradable``: the lease of a writer, which replaces this one. None after ``wait`` seconds: this lease is held as before."""
        ...

    def set_min_hold(self, seconds: float) -> None: ...

    def abandon(self) -> None:
        """Releases the lease in the background. Returns at once, and never raises; for finalizers."""
        ...


class Lock(Protocol):
    """Checked terms. Nothing is sent, and nothing is held."""

    def completions(self) -> Completions:
        """As `Backend.completions`."""
        ...

    def acquire(self, wait: float | None = None, completions: Completions | None = None) -> Operation[Lease | None]:
        """Waits at most ``wait`` seconds in the queue; None waits without a limit, 0 does not wait. The result is None if the lock was not granted
        within ``wait``, and for ``once_per`` if the period's start was taken."""
        ...


class Backend(Protocol):
    """A client of one store or server. Thread-safe. Created by ``open(url, settings)`` of its module, which does not block and sends nothing; the
    first operation connects. Dropping it closes it without waiting."""

    @property
    def address(self) -> str:
        """For messages, without passwords."""
        ...

    def completions(self) -> Completions: ...

    def lock(self, terms: Terms) -> Lock:
        """Raises `InvalidInput` or `Unsupported`."""
        ...

    def attach(self, lease: str, completions: Completions | None = None) -> Operation[Lease]: ...

    def inspect(self, kind: str, name: str, completions: Completions | None = None) -> Operation[str]:
        """The JSON of schema ``Lock`` of ``GET /v1/locks/{kind}/{name}``. The kinds are ``mutex``, ``rw``, ``semaphore``, ``election`` ..."""
        ...

    def list(self, completions: Completions | None = None) -> Operation[str]:
        """A JSON array of such objects."""
        ...

    def force_release(
        self, kind: str, name: str, token: int | None = None, completions: Completions | None = None
    ) -> Operation[str]:
        """A JSON array of schema ``Holder``: those that were released; only the one with ``token``, if it is given."""
        ...

    def close(self, timeout: float | None = None, completions: Completions | None = None) -> Operation[None]:
        """Releases all leases (their reason is ``"closed"``) and ends all waits with `ClientClosed`. Later calls raise `ClientClosed`."""
        ...


class Module(Protocol):
    """A back end's module."""

    __name__: str

    def open(self, url: str, settings: Settings) -> Backend:
        """`InvalidInput` for an address that cannot be used."""
        ...

    def shut_down(self, timeout: float) -> None:
        """At exit: wakes every wait of the process, closes all clients, and waits at most ``timeout`` seconds. Later calls raise `ClientClosed`."""
        ...
