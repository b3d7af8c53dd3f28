"""What the clients of both APIs share: the settings, the opening of the back end, and the names of locks."""

from __future__ import annotations

import _thread

from . import _fork
from ._errors import ClientClosed, InvalidInput, Unsupported
from ._terms import Settings, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypedDict

    from . import _backend
    from ._terms import Seconds
    from .bridge import Bridge

    class LockOptions(TypedDict, total=False):
        """Options of a lock. All are optional."""

        auto_renew: bool
        """Whether the lease is renewed until it is released: True by default. Without it the lease ends ``ttl`` after the grant or `Lease.renew`."""
        min_hold: Seconds
        """After an earlier release the lock stays taken until this long after the grant."""
        max_hold: Seconds | None
        """The lease is lost this long after the grant, although it is renewed."""
        max_waiters: int | None
        """The longest wait queue, 100,000 by default; more waiters get `QueueFull`."""
        replicas: int | None
        """How many replicas must confirm a grant. Redis only."""
        label: str | None
        """A text that `Client.inspect` shows."""
        trace_id: str | None
        """A text that `Client.inspect` shows, for finding the trace."""
        detachable: bool
        """Lets another process renew or release a detached lease in one command."""

    class MutexOptions(LockOptions, total=False):
        """Options of a mutex. All are optional."""

        global_fifo: bool
        """One order among the waiters of all processes: False by default, where a lock goes from thread to thread of a process for up to 10 ms while
        other processes wait."""
        bridge: Bridge | None
        """The lock of another library that is taken too: `leasehold.bridge`."""


HTTP_SCHEMES = ("http:", "https:", "unix:")

# Which module opened a back end, so that only those that were used are shut down.
_is_exit_registered_in = -1


def _at_exit() -> None:
    import sys

    for name in ("leasehold._native", "leasehold._http"):
        module = sys.modules.get(name)
        if module is not None:
            module.shut_down(2.0)


def _register_exit() -> None:
    global _is_exit_registered_in
    if _is_exit_registered_in == _fork.generation:
        return
    import sys

    if _is_exit_registered_in == -1:
        import atexit

        atexit.register(_at_exit)
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        # A child of multiprocessing may end by os._exit, without atexit.
        Finalize(None, _at_exit, exitpriority=-100)
    _is_exit_registered_in = _fork.generation


_is_logging_in = -1


def _log_native(module: _backend.Module) -> None:
    global _is_logging_in
    if _is_logging_in != _fork.generation:
        _is_logging_in = _fork.generation
        from ._reporter import log_records

        log_records(module)


class BaseClient:
    """A client of a store. Created by ``connect``; it opens at its first use. Thread-safe."""

    __slots__ = ("__weakref__", "_backend", "_generation", "_is_closed", "_namespace", "_opening", "_settings", "_url")

    def __init__(self, url: str, namespace: str | None, settings: Settings) -> None:
        if ":" not in text(url, "the address of a store"):
            raise InvalidInput(f"{url!r} is no address of a store: it begins with a scheme, as redis://127.0.0.1 does")
        if namespace is not None and (not text(namespace, "a namespace") or namespace.endswith(":")):
            raise InvalidInput(f"a namespace is a text that does not end with a colon, not {namespace!r}")
        self._url = url
        self._namespace = namespace
        self._settings = settings
        self._generation = _fork.generation
        self._backend: _backend.Backend | None = None
        self._is_closed = False
        # The handler of a signal may close the client while it opens.
        self._opening = _thread.RLock()

    def _open(self) -> _backend.Backend:
        if self._generation != _fork.generation:
            if self._backend is None and not self._is_closed:
                # It was not used in the parent, so that nothing is shared with it.
                self._generation, self._opening = _fork.generation, _thread.RLock()
            _fork.check(self._generation)
        backend = self._backend
        if backend is not None:
            return backend
        with self._opening:
            if self._is_closed:
                raise ClientClosed("the client was closed")
            if self._backend is None:
                module = _module(self._url)
                self._backend = module.open(self._url, self._settings)
                _register_exit()
                if module.__name__ == "leasehold._native":
                    _log_native(module)
            return self._backend

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def _name(self, name: str) -> str:
        text(name, "a lock's name")
        return name if self._namespace is None else f"{self._namespace}:{name}"

    def __repr__(self) -> str:
        backend = self._backend
        if backend is None:
            scheme = self._url.partition(":")[0]
            return f"<{type(self).__module__}.{type(self).__qualname__} of {scheme}:…, not open>"
        return f"<{type(self).__module__}.{type(self).__qualname__} of {backend.address}>"


def _module(url: str) -> _backend.Module:
    if url.startswith(HTTP_SCHEMES):
        from . import _http

        return _http
    from . import _interpreter

    if not _interpreter.is_main():
        # Its end would close the clients of all others.
        raise Unsupported(
            "stores need the main interpreter of the process (mod_wsgi: WSGIApplicationGroup %{GLOBAL}; uWSGI: single-interpreter): "
            "in a sub-interpreter use the address of a server of leasehold serve"
        )
    from . import _native

    return _native
