"""The thread of the HTTP back end: one for the whole process, with an event loop of its own that sends all requests and renews all leases.

Every other thread only gives it work and waits for the results, so a caller's event loop that is blocked delays no renewal. A child process
never touches what it has inherited: it closes the sockets, which ends no connection of the parent, and starts a thread of its own when needed.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import _fork, _interpreter

if TYPE_CHECKING:
    from .core import Core


class Runtime:
    def __init__(self) -> None:
        self.generation = _fork.generation
        self.sockets: set[socket.socket] = set()
        # Those that are not closed. Only the thread uses it.
        self.clients: set[Core] = set()
        self.thread: int | None = None
        self._closing: asyncio.Task[None] | None = None
        self._selector = selectors.DefaultSelector()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self._start()

    def _start(self) -> None:
        # The main interpreter ends daemon threads after `shut_down`, which waits for all other threads that may hold leases. A sub-interpreter
        # must not have daemon threads at its end: its thread is told just before the interpreter waits for it.
        is_main = _interpreter.is_main()
        threading.Thread(target=self._run, name="leasehold-http", daemon=is_main).start()
        if not is_main:
            threading._register_atexit(self._stop)  # type: ignore[attr-defined]

    def _run(self) -> None:
        self.thread = threading.get_ident()
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _stop(self) -> None:
        self.shut_down(2.0)
        self.call_soon(self.loop.stop)

    def shut_down(self, timeout: float) -> None:
        """Closes all clients, and waits for their releases for at most this many seconds."""
        is_done = threading.Event()

        async def close_all() -> None:
            clients = list(self.clients)
            for client in clients:
                client.begin_close()
            await asyncio.gather(*(client.closed(timeout) for client in clients), return_exceptions=True)
            is_done.set()

        def start() -> None:
            self._closing = self.loop.create_task(close_all())

        if self.call_soon(start):
            is_done.wait(timeout)

    def call_soon(self, function: Callable[..., Any], *arguments: Any) -> bool:
        """Calls the function in the runtime's thread. Takes no lock, so that finalizers may call it; False if there is no such thread any more."""
        if self.generation != _fork.generation:
            return False
        try:
            self.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False
        return True

    def _abandon_in_child(self) -> None:
        """Closes the copies of the descriptors. The objects stay for ever, because their finalizers would use the descriptors once more."""
        _abandoned.append(self)
        for sock in list(self.sockets):
            try:
                os.close(sock.detach())
            except OSError:
                pass
        self._selector.close()


_abandoned: list[Runtime] = []
_lock = threading.Lock()
_runtime: Runtime | None = None


def runtime() -> Runtime:
    """The runtime of this process, which is started at the first call."""
    global _runtime
    current = _runtime
    if current is not None:
        return current
    with _lock:
        if _runtime is None:
            _runtime = Runtime()
        return _runtime


def current() -> Runtime | None:
    """The runtime of this process if it has been started."""
    return _runtime


def _in_child() -> None:
    global _lock, _runtime
    _lock = threading.Lock()
    former, _runtime = _runtime, None
    if former is not None:
        former._abandon_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
