"""What a lease is in both APIs: its token, its time and its loss."""

from __future__ import annotations

import contextvars
import itertools
import sys
import warnings
from _weakref import ref

from . import _fork
from ._errors import LeaseLost

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType
    from typing import Any, NoReturn, TypeAlias, TypeVar

    from . import _backend
    from ._reporter import Registration

    T = TypeVar("T")
    # Its number, who has begun it, and its lease, if it has one.
    _Block: TypeAlias = tuple[int, object, Any]
    # A callback of `on_lost`, and the operation behind it, which ends when it is dropped.
    _Watch: TypeAlias = tuple[Callable[[str], object], Registration]


# Weak, because an exception of a signal's handler may keep a block from taking its lease away again.
_current: contextvars.ContextVar[tuple[ref[BaseLease], ...]] = contextvars.ContextVar("leasehold", default=())


def current() -> BaseLease | None:
    """The lease of the innermost ``with`` block around this code, in this thread or task; None outside of one.

    >>> with client.lock("orders:42") as lease:
    ...     leasehold.current() is lease
    True
    """
    return next(reversed(_open_leases()), None)


def _open_leases() -> list[BaseLease]:
    """Without those of blocks that have ended in another context."""
    return [lease for reference in _current.get() if (lease := reference()) is not None and not lease._ended]


class BaseLease:
    """A lock that is held for a bounded time, which is renewed until it is released. Created by the locks of a client."""

    __slots__ = ("__weakref__", "_callbacks", "_ended", "_generation", "_lease")

    def __init__(self, lease: _backend.Lease) -> None:
        self._lease = lease
        self._generation = _fork.generation
        self._ended = False
        self._callbacks: list[_Watch] = []

    @property
    def name(self) -> str:
        """The lock's name, with the client's namespace."""
        return self._lease.name

    @property
    def token(self) -> int:
        """The fencing token: higher than that of every earlier holder. Pass it along with each write, and let the resource refuse lower ones.

        >>> with client.lock("orders:42") as lease:
        ...     first = lease.token
        >>> with client.lock("orders:42") as lease:
        ...     lease.token > first
        True
        """
        return self._lease.token

    @property
    def tokens(self) -> Mapping[str, int]:
        """The tokens by the names of the locks: several for `Client.lock_all`."""
        return self._lease.tokens

    @property
    def expires_in(self) -> float:
        """Seconds for which the lease may be trusted if no further renewal succeeds. 0.0 once it is lost or released.

        >>> with client.lock("orders:42", ttl=10) as lease:
        ...     0 < lease.expires_in <= 10
        True
        """
        if self._generation != _fork.generation:
            return 0.0
        return self._lease.remaining()

    @property
    def is_lost(self) -> bool:
        """Whether the lease has ended although it was not released. Look at it before each step that the lock protects."""
        return self.loss is not None

    @property
    def loss(self) -> str | None:
        """Why the lease is lost, as `LeaseLost.reason`; None while it is held, and after it was released."""
        _fork.check(self._generation)
        return None if self._ended else self._lease.loss()

    def check(self) -> None:
        """Raises `LeaseLost` if the lease is not held any more: it is lost, or was released or detached. Sends nothing.

        >>> with client.lock("orders:42") as lease:
        ...     for step in range(3):
        ...         lease.check()
        """
        loss = self.loss
        if loss is not None:
            raise LeaseLost(self._lease.loss_error(), loss)
        if self._ended:
            raise LeaseLost(f"{self.name!r}: the lease was released or detached before", "released")
        if self._lease.remaining() == 0.0:
            # Nothing is known of it until the upgrade has ended.
            loss = self._lease.loss()
            raise LeaseLost(self._lease.loss_error() if loss else f"{self.name!r}: an upgrade is pending, so that the lease may not be trusted", loss or "gone")

    def on_lost(self, callback: Callable[[str], object]) -> None:
        """Calls ``callback(reason)`` once the lease is lost, in a thread of this package. It should return soon. It is never called for a lease that is
        released before.

        >>> with client.lock("orders:42") as lease:
        ...     lease.on_lost(lambda reason: print("stop the work:", reason))
        """
        from . import _reporter

        _fork.check(self._generation)
        self._callbacks.append((callback, _reporter.on_lost(self._lease, callback)))

    def set_min_hold(self, seconds: float) -> None:
        """Replaces the lock's ``min_hold``: 0 lets the release free the lock at once.

        >>> with client.lock("lottery", min_hold=3600) as lease:
        ...     lease.set_min_hold(0)
        """
        _fork.check(self._generation)
        self._lease.set_min_hold(seconds)

    def _end(self) -> None:
        self._ended = True
        if self._callbacks:
            is_lost = self._lease.loss() is not None
            for _, registration in self._callbacks:
                registration.is_due = is_lost
            self._callbacks.clear()

    def _watch_again(self) -> None:
        """After an upgrade that has failed, since it has ended the operations of `on_lost`."""
        from . import _reporter

        self._callbacks = [(callback, _reporter.on_lost(self._lease, callback)) for callback, _ in self._callbacks]

    def _consumed(self, start: Callable[..., T]) -> Callable[..., T]:
        """A call that ends this lease, whatever comes of it, unless it is refused before it starts."""

        def started(*arguments: object) -> T:
            operation = start(*arguments)
            self._end()
            return operation

        # As a bound method has it.
        started.__self__ = start.__self__  # type: ignore[attr-defined]
        return started

    def __repr__(self) -> str:
        if self._generation != _fork.generation:
            return f"<{type(self).__qualname__} of the parent process>"
        state = "released" if self._ended else f"lost: {self.loss}" if self.is_lost else f"{self.expires_in:.3f} s left"
        return f"<{type(self).__qualname__} {self.name!r} token {self.token}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a lease cannot be pickled, because its holder is this process: pass the str of lease.detach() on, and call client.attach(…) there"
        )

    def __del__(self) -> None:
        if getattr(self, "_ended", True) or self._generation != _fork.generation:
            return
        self._ended = True
        self._lease.abandon()
        try:
            warnings.warn(f"lease of {self.name!r} was not released", ResourceWarning, stacklevel=2, source=self)
        except Exception:  # The interpreter ends, or warnings are errors: nothing can be raised here.
            pass


class Blocks:
    """The leases of the blocks that a handle has opened.

    A `with` begins and ends in one frame, even that of a generator which other threads or tasks resume; the blocks of an `ExitStack` are its own. A block
    that a function begins and another one ends has neither: it is known by its thread or task, in which the newest ends first. Threads change only what is
    their own, because another thread may be anywhere in between.
    """

    __slots__ = ("_numbers", "_of")

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._of: dict[object, tuple[_Block, ...]] = {}

    def push(self, frame: FrameType, owner: object, lease: BaseLease | None) -> None:
        place = _place(frame)
        self._of[place] = (*self._of.get(place, ()), (next(self._numbers), owner, lease))

    def pop(self, frame: FrameType, owner: object) -> Any:
        """The lease of the block that ends in this frame. Raises RuntimeError if it is not known which: another one may still work."""
        place = _place(frame)
        if place not in self._of:
            place = self._begun_in(place, owner)
        *others, (_, _, lease) = self._of[place]
        if others:
            self._of[place] = tuple(others)
        else:
            del self._of[place]
        return lease

    def _begun_in(self, ends: object, owner: object) -> object:
        open_blocks = [(blocks[-1], place) for place, blocks in list(self._of.items())]
        own = [(block, place) for block, place in open_blocks if block[1] == owner]
        # A stack may have got the blocks of another one, or one that a function has begun.
        alike = [(block, place) for block, place in own if _is_frame(place) == _is_frame(ends)]
        newest = max(alike or own or open_blocks[:1], key=lambda found: found[0][0], default=None)
        # Who has lost a lease may end its block in any thread: it must not end a good one.
        is_certain = len(open_blocks) == 1 or (bool(own) and not any(_is_lost(block) for block, _ in open_blocks))
        if newest is not None and (is_certain or _is_lost(newest[0])):
            return newest[1]
        raise RuntimeError(
            f"{len(open_blocks)} blocks of this lock are open, and it is not known which of them ends here: "
            "use the lease as the context manager (with lock.acquire() as lease)"
        )


def _place(frame: FrameType) -> object:
    """What begins and ends a block: the frame of a `with`, or an `ExitStack`."""
    if frame.f_globals.get("__name__") == "contextlib":
        return frame.f_locals.get("self", frame)
    return frame


def _is_lost(block: _Block) -> bool:
    lease = block[2]
    return lease is not None and lease.is_lost


def _is_frame(place: object) -> bool:
    return isinstance(place, _FRAME)


_FRAME = type(sys._getframe())


def entered(lease: BaseLease) -> None:
    """The lease is that of the innermost block."""
    _current.set((*map(ref, _open_leases()), ref(lease)))


def left(lease: BaseLease) -> None:
    """The block has ended. Blocks may end in another order, or in another context."""
    leases, own = _current.get(), ref(lease)
    if own in leases:
        _current.set(tuple(other for other in leases if other is not own))


def is_ignored(error: BaseException, body: BaseException | None) -> bool:
    """Whether an error of the release goes to the log because another error is on its way."""
    if body is None:
        return False
    body.add_note(f"leasehold: the release failed too: {error}")
    return True
