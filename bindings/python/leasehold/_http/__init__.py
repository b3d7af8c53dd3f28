"""The back end for servers of `leasehold serve`: `http:`, `https:` and `unix:` addresses, in Python and with its standard library alone.

It works wherever Python does: without the native module, in free-threaded builds and in sub-interpreters. Its leases are renewed by a Python
thread. A blocked event loop loses nothing, but a thread that holds the GIL for longer than two thirds of the ttl may: the native engine, for the
addresses of stores, renews without it.
"""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from .._errors import ClientClosed, Unsupported
from . import runtime as _runtime
from .core import Core
from .held import Held
from .operation import Completions, Operation
from .request import Request, request_of

if TYPE_CHECKING:
    from .. import _backend

T = TypeVar("T")

_is_shut_down = False


class Lease:
    """A lease. One that nothing refers to is released."""

    __slots__ = ("_backend", "_core", "_held", "__weakref__")

    def __init__(self, backend: "Backend", held: Held) -> None:
        self._backend = backend
        self._core = backend.core
        self._held = held

    @property
    def name(self) -> str:
        return ",".join(grant.name for grant in self._held.grants)

    @property
    def token(self) -> int:
        return max(grant.token for grant in self._held.grants)

    @property
    def tokens(self) -> dict[str, int]:
        return {grant.name: grant.token for grant in self._held.grants}

    def remaining(self) -> float:
        return self._held.remaining()

    def loss(self) -> str | None:
        loss = self._held.loss()
        return None if loss is None else loss[0]

    def loss_error(self) -> str:
        loss = self._held.loss()
        return "" if loss is None else loss[1]

    def completions(self) -> Completions:
        return Completions()

    def lost(self, completions: "_backend.Completions | None" = None) -> Operation[str | None]:
        return Operation(self._core.runtime, self._held.lost, _own(completions), keep=self._backend)

    def renew(self, completions: "_backend.Completions | None" = None) -> Operation[None]:
        return self._backend.start(lambda: self._core.renew(self._held), completions)

    def release(
        self, timeout: float | None = None, completions: "_backend.Completions | None" = None
    ) -> Operation[None]:
        # It is carried out also if nobody waits for it, and while the client is closed.
        self._held.end()
        self._core.runtime.call_soon(self._core.begin_release, self._held)
        return Operation(self._core.runtime, lambda: self._core.released(self._held, timeout), _own(completions), keep=self._backend)

    def detach(self, completions: "_backend.Completions | None" = None) -> Operation[str]:
        if len(self._held.grants) > 1:
            raise Unsupported("the leases of several locks can't be detached together: acquire the locks one by one")
        return self._backend.start(lambda: self._core.detach(self._held), completions)

    def downgrade(self, completions: "_backend.Completions | None" = None) -> "Operation[_backend.Lease]":
        raise Unsupported("a server's HTTP API can't downgrade a lease: use the address of its store")

    def upgrade(
        self, wait: float | None = None, completions: "_backend.Completions | None" = None
    ) -> "Operation[_backend.Lease | None]":
        raise Unsupported("a server's HTTP API can't upgrade a lease: use the address of its store")

    def set_min_hold(self, seconds: float) -> None:
        raise Unsupported("a server's HTTP API can't change the minimum hold of a lease: use the address of its store")

    def abandon(self) -> None:
        self._core.runtime.call_soon(self._core.abandon, self._held)

    def __del__(self) -> None:
        if hasattr(self, "_held"):
            self.abandon()


class Lock:
    """Checked terms of a lock."""

    __slots__ = ("_backend", "_request")

    def __init__(self, backend: "Backend", request: Request) -> None:
        self._backend = backend
        self._request = request

    def completions(self) -> Completions:
        return Completions()

    def acquire(
        self, wait: float | None = None, completions: "_backend.Completions | None" = None
    ) -> "Operation[_backend.Lease | None]":
        backend, request = self._backend, self._request
        # Those that did not start the work of a period do not wait for the next one.
        limit = 0.0 if "once_per_ms" in request.fields else wait

        async def acquire() -> "_backend.Lease | None":
            held = await backend.core.acquire(request, limit)
            return None if held is None else Lease(backend, held)

        # A lease that nothing refers to releases itself.
        return backend.start(acquire, completions)


class Backend:
    """A client of the servers of one store. It is closed when nothing refers to it, its locks and its leases."""

    __slots__ = ("core", "__weakref__")

    def __init__(self, url: str, settings: "_backend.Settings") -> None:
        self.core = Core(url, settings, _runtime.runtime())

    @property
    def address(self) -> str:
        return self.core.address

    def completions(self) -> Completions:
        return Completions()

    def start(
        self, work: Callable[[], Coroutine[Any, Any, T]], completions: "_backend.Completions | None" = None
    ) -> Operation[T]:
        core = self.core
        return Operation(core.runtime, lambda: core.called(work), _own(completions), keep=self)

    def lock(self, terms: "_backend.Terms") -> Lock:
        return Lock(self, request_of(terms, self.core.settings))

    def attach(self, lease: str, completions: "_backend.Completions | None" = None) -> "Operation[_backend.Lease]":
        async def attach() -> "_backend.Lease":
            return Lease(self, await self.core.attach(lease))

        return self.start(attach, completions)

    def inspect(self, kind: str, name: str, completions: "_backend.Completions | None" = None) -> Operation[str]:
        return self.start(lambda: self.core.inspect(kind, name), completions)

    def list(self, completions: "_backend.Completions | None" = None) -> Operation[str]:
        return self.start(lambda: self.core.all_states(), completions)

    def force_release(
        self, kind: str, name: str, token: int | None = None, completions: "_backend.Completions | None" = None
    ) -> Operation[str]:
        return self.start(lambda: self.core.force_release(kind, name, token), completions)

    def close(
        self, timeout: float | None = None, completions: "_backend.Completions | None" = None
    ) -> Operation[None]:
        self.core.runtime.call_soon(self.core.begin_close)
        return Operation(self.core.runtime, lambda: self.core.closed(timeout), _own(completions), keep=self)

    def __del__(self) -> None:
        if hasattr(self, "core"):
            self.core.runtime.call_soon(self.core.begin_close)


def _own(completions: "_backend.Completions | None") -> Completions | None:
    assert completions is None or isinstance(completions, Completions)
    return completions


def open(url: str, settings: "_backend.Settings") -> Backend:
    """A client of the servers at `url`. Sends nothing."""
    if _is_shut_down:
        raise ClientClosed("the interpreter exits")
    for is_given, what in [
        (settings.max_waiters is not None, "max_waiters"),
        (settings.replicas is not None, "replicas"),
    ]:
        if is_given:
            raise Unsupported(f"{what} is no option over HTTP: the server and its store decide it")
    return Backend(url, settings)


def shut_down(timeout: float) -> None:
    """At exit: closes all clients, and waits for their releases for at most this many seconds."""
    global _is_shut_down
    _is_shut_down = True
    runtime = _runtime.current()
    if runtime is not None:
        runtime.shut_down(timeout)
