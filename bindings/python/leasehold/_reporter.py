"""One Python thread of this package: it calls ``on_lost`` callbacks, and passes the engine's records to `logging`. Started on demand.

It waits in ``poll`` for the descriptors of completions, so no thread of a back end runs Python. It alone starts and takes its operations.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from . import _fork, _interpreter

if TYPE_CHECKING:
    from collections.abc import Callable

    from . import _backend

logger = logging.getLogger("leasehold")


class _Source:
    """The completions of one back end's module, and what is called when an operation ends."""

    def __init__(self, completions: _backend.Completions) -> None:
        self.completions = completions
        self.ended: dict[int, Callable[[], None]] = {}

    def start(self, operation: _backend.Operation[Any], ended: Callable[[], None]) -> None:
        if operation.is_done():
            ended()
        else:
            self.ended[operation.key] = ended

    def take(self) -> None:
        for key in self.completions.take():
            ended = self.ended.pop(key, None)
            if ended is not None:
                ended()


class _Reporter:
    def __init__(self) -> None:
        self.generation = _fork.generation
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        # Finalizers append to it, also between two lines of the thread: a deque needs no lock.
        self._tasks: deque[Callable[[], None]] = deque()
        self._sources: dict[type, _Source] = {}
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)
        self._is_ending = False
        # A daemon: a program that ends does not wait for it. A sub-interpreter must not have any, so its thread is told before the interpreter waits for it.
        is_main = _interpreter.is_main()
        threading.Thread(target=self._run, name="leasehold-reporter", daemon=is_main).start()
        if not is_main:
            threading._register_atexit(self.run_soon, self._end)  # type: ignore[attr-defined]

    def run_soon(self, task: Callable[[], None]) -> None:
        """Runs this in the thread."""
        self._tasks.append(task)
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:  # It has enough to wake up for.
            pass

    def source(self, kind: type, completions: Callable[[], _backend.Completions]) -> _Source:
        """In the thread: the source of this kind of objects."""
        source = self._sources.get(kind)
        if source is None:
            source = self._sources[kind] = _Source(completions())
            self._poll.register(source.completions.fileno(), select.POLLIN)
        return source

    def _end(self) -> None:
        self._is_ending = True

    def _run(self) -> None:
        while not self._is_ending:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wake_read:
                    os.read(self._wake_read, 4096)
            while self._tasks:
                self._call(self._tasks.popleft())
            for source in list(self._sources.values()):
                self._call(source.take)

    def _call(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception:
            logger.exception("a task of leasehold's reporter failed")


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


class _Callback:
    """A callback of a lease, which ends with this object."""

    def __init__(self, callback: Callable[[str], object]) -> None:
        self._callback = callback
        self._operation: _backend.Operation[str | None] | None = None
        self._is_over = False

    def start(self, lease: _backend.Lease, reporter: _Reporter) -> None:
        if self._is_over:
            return
        source = reporter.source(type(lease), lease.completions)
        self._operation = lease.lost(source.completions)
        source.start(self._operation, self._ended)
        if source.completions.is_ready:
            source.take()

    def _ended(self) -> None:
        operation, self._operation = self._operation, None
        if self._is_over or operation is None:
            return
        reason = operation.result()
        if reason is not None:
            try:
                self._callback(reason)
            except Exception:
                logger.exception("the on_lost callback %r failed", self._callback)

    def end(self) -> None:
        self._is_over = True
        operation, self._operation = self._operation, None
        if operation is not None:
            operation.cancel()


class Registration:
    """Dropping it ends the callback, unless the lease is lost, so that it is on its way."""

    def __init__(self, callback: _Callback, generation: int) -> None:
        self._callback = callback
        self._generation = generation
        self.is_due = False

    def __del__(self) -> None:
        if not self.is_due and self._generation == _fork.generation:
            self._callback.end()


def on_lost(lease: _backend.Lease, callback: Callable[[str], object]) -> Registration:
    """Calls ``callback`` with the reason once the lease is lost, unless the returned object is dropped before."""
    reporter = _started()
    one = _Callback(callback)
    reporter.run_soon(lambda: one.start(lease, reporter))
    return Registration(one, reporter.generation)


def log(level: int, message: str) -> None:
    """Logs a record in the thread, for a back end whose own thread must not wait for a handler."""
    _started().run_soon(lambda: logger.log(level, "%s", message))


def log_records(module: Any) -> None:
    """From now on the records of the native engine go to the logger ``leasehold``."""
    reporter = _started()

    def start() -> None:
        source = reporter.source(type(module), module.Completions)
        operation = module.records(source.completions)
        source.start(operation, lambda: pass_on(operation))
        if source.completions.is_ready:
            source.take()

    def pass_on(operation: _backend.Operation[list[tuple[int, str]]]) -> None:
        for level, message in operation.result():
            logger.log(level, "%s", message)
        start()

    reporter.run_soon(start)
