"""Started calls, and the queue that tells an event loop which of them have ended: see `leasehold._backend`."""

import asyncio
import itertools
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from .._errors import ClientClosed, Error
from .runtime import Runtime

T = TypeVar("T")

_keys = itertools.count(1)

# A wait without a limit ignores Ctrl-C on Windows.
_WAIT_SLICE = 0.05 if sys.platform == "win32" else None


class Completions:
    """The descriptor is that of a socket pair, which every system's event loops can watch.

    An operation ends in another thread: it may be done when its method returns, and is named all the same.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._ended: deque[_State[Any]] = deque()
        self._lock = threading.Lock()
        self._is_signalled = False

    def fileno(self) -> int:
        return self._reader.fileno()

    @property
    def is_ready(self) -> bool:
        return bool(self._ended)

    def _push(self, state: "_State[Any]") -> None:
        """Called by the runtime's thread."""
        with self._lock:
            self._ended.append(state)
            if self._is_signalled:
                return
            self._is_signalled = True
            try:
                self._writer.send(b"\0")
            except OSError:
                pass  # closed

    def take(self) -> list[int]:
        with self._lock:
            if self._is_signalled:
                self._is_signalled = False
                try:
                    self._reader.recv(64)
                except OSError:
                    pass
            ended = list(self._ended)
            self._ended.clear()
        return [state.key for state in ended if not state.is_cancelled]

    def close(self) -> None:
        with self._lock:
            self._reader.close()
            self._writer.close()
            self._ended.clear()


class _State(Generic[T]):
    """What an operation and the runtime's thread share, so that an operation that nothing refers to any more is cancelled."""

    __slots__ = ("completions", "error", "is_cancelled", "is_ended", "is_taken", "key", "task", "value")

    def __init__(self, completions: Completions | None) -> None:
        self.key = next(_keys)
        self.completions = completions
        self.task: asyncio.Task[T] | None = None
        self.is_ended = threading.Event()
        self.is_cancelled = False
        self.is_taken = False
        self.value: T | None = None
        self.error: BaseException | None = None

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        if self.is_cancelled:
            self.is_ended.set()
            return
        self.task = asyncio.get_running_loop().create_task(work())
        self.task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[T]") -> None:
        self.task = None
        if not task.cancelled():
            self.error = task.exception()
            if self.error is None:
                # A lease that nobody takes releases itself once nothing refers to it.
                self.value = None if self.is_cancelled else task.result()
        self.is_ended.set()
        if self.completions is not None and not self.is_cancelled:
            self.completions._push(self)

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()
        else:
            self.value = None


class Operation(Generic[T]):
    __slots__ = ("__weakref__", "_keep", "_runtime", "_state")

    def __init__(
        self,
        runtime: Runtime,
        work: Callable[[], Coroutine[Any, Any, T]],
        completions: Completions | None = None,
        *,
        keep: object = None,
    ) -> None:
        """Starts the work. `keep` lives as long as the operation."""
        self._runtime = runtime
        self._keep = keep
        self._state: _State[T] = _State(completions)
        if not runtime.call_soon(self._state.start, work):
            raise ClientClosed("the interpreter exits")

    @property
    def key(self) -> int:
        return self._state.key

    def is_done(self) -> bool:
        return self._state.is_cancelled or self._state.is_ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        if self.is_done():
            return True
        if threading.get_ident() == self._runtime.thread:
            # A finalizer of the caller's that the garbage collector runs here would stop all renewals.
            raise Error("a finalizer can't wait for a lock or its release")
        if timeout is not None or _WAIT_SLICE is None:
            return self._state.is_ended.wait(timeout)
        while not self._state.is_ended.wait(_WAIT_SLICE):
            pass
        return True

    def cancel(self) -> None:
        state = self._state
        if not state.is_cancelled and not state.is_taken:
            state.is_cancelled = True
            self._runtime.call_soon(state.cancel)

    def result(self) -> T:
        state = self._state
        if state.is_cancelled or state.is_taken or not state.is_ended.is_set():
            raise RuntimeError("the operation has no result, or its result was taken")
        state.is_taken = True
        error, value = state.error, state.value
        state.error = state.value = None
        if error is None:
            return value  # type: ignore[return-value]
        if isinstance(error, Error):
            raise error
        raise Error(f"a defect of the HTTP back end: {error!r}") from error

    def __del__(self) -> None:
        state: _State[T] | None = getattr(self, "_state", None)
        if state is not None and (not state.is_ended.is_set() or state.value is not None):
            self.cancel()
