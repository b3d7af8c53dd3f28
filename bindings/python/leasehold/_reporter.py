"""One Python thread of this package: it calls `on_lost` callbacks and passes the engine's records to `logging`. Started on demand.

It waits in ``poll`` for the descriptors of completions; no thread of a back end runs Python.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from typing import TYPE_CHECKING, Any

from . import _fork

if TYPE_CHECKING:
    from collections.abc import Callable

    from . import _backend

logger = logging.getLogger("leasehold")


class _Reporter:
    def __init__(self) -> None:
        self.generation = _fork.generation
        self.mutex = threading.Lock()
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self.wake_write, False)
        self.arriving: list[_Watch] = []
        # Daemonic: a program that ends does not wait for it, and it holds nothing.
        self.thread = threading.Thread(target=self._run, name="leasehold-reporter", daemon=True)
        self.thread.start()

    def add(self, watch: _Watch) -> None:
        with self.mutex:
            self.arriving.append(watch)
        self.wake()

    def wake(self) -> None:
        try:
            os.write(self.wake_write, b"\0")
        except BlockingIOError:  # It is awake soon anyway.
            pass

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self.wake_read, select.POLLIN)
        watches: dict[int, _Watch] = {}
        while True:
            with self.mutex:
                arrived, self.arriving = self.arriving, []
            for watch in arrived:
                descriptor = watch.completions.fileno()
                watches[descriptor] = watch
                poll.register(descriptor, select.POLLIN)
            arrived.clear()
            del arrived[:]
            for descriptor, _ in poll.poll():
                if descriptor == self.wake_read:
                    os.read(self.wake_read, 4096)
            for descriptor, watch in list(watches.items()):
                if watch.is_over or watch.look():
                    poll.unregister(descriptor)
                    del watches[descriptor]
                    watch.completions.close()
            watch = None  # type: ignore[assignment]


class _Watch:
    """A descriptor of the thread, and what it calls."""

    def __init__(self, completions: _backend.Completions, look: Callable[[], bool]) -> None:
        self.completions = completions
        self.look = look
        self.is_over = False


class _OnLost:
    """A callback of a lease. Dropping it ends it."""

    def __init__(self, reporter: _Reporter, watch: _Watch) -> None:
        self.reporter = reporter
        self.watch = watch

    def __del__(self) -> None:
        self.watch.is_over = True
        if self.reporter.generation == _fork.generation:
            self.reporter.wake()


_reporter: _Reporter | None = None
_starting = threading.Lock()


def _started() -> _Reporter:
    global _reporter, _starting
    if _reporter is not None and _reporter.generation == _fork.generation:
        return _reporter
    if _reporter is not None:
        _starting = threading.Lock()  # That of the parent may be held for ever here.
    with _starting:
        if _reporter is None or _reporter.generation != _fork.generation:
            _reporter = _Reporter()
        return _reporter


def on_lost(lease: _backend.Lease, completions: _backend.Completions, callback: Callable[[str], object]) -> object:
    """Calls ``callback`` with the reason once the lease is lost. The callback ends with the returned object."""
    operation = lease.lost(completions)

    def look() -> bool:
        if not operation.is_done():
            return False
        reason = operation.result()
        if reason is not None:
            try:
                callback(reason)
            except Exception:
                logger.exception("the on_lost callback %r failed", callback)
        return True

    reporter = _started()
    watch = _Watch(completions, look)
    reporter.add(watch)
    return _OnLost(reporter, watch)
