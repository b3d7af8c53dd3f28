"""For tests of programs that use locks: a store in memory whose clock the test moves.

No real time passes. Leases are renewed and expire, waits end, and losses are reported when the test moves the clock. The engine is the same as for every
other store, so the program behaves as it does there.

>>> store = leasehold.testing.TestStore()
>>> with leasehold.connect(store.url) as client:
...     lease = client.lock("report", ttl=10).acquire()
...     store.advance(60)  # Renewed all the while.
...     held = not lease.is_lost
...     store.suspend(11)  # As if the process had slept.
...     print(held, lease.loss)
True expired
"""

from __future__ import annotations

from ._native import TestStore as _TestStore
from ._terms import seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._terms import Seconds

__all__ = ["TestStore"]


class TestStore:
    """A store in memory whose clock the test moves. Each client of its address stands for a process.

    A call that moves the clock returns when everything that was due has been done. A task of asyncio that it woke runs when the test awaits next.
    A synchronous call that waits blocks its thread until another thread moves the clock or releases the lock; so does `Client.close` while the store is
    unreachable, and leases are held.
    """

    __slots__ = ("_store",)
    __test__ = False

    def __init__(self) -> None:
        self._store = _TestStore()

    @property
    def url(self) -> str:
        """The address for ``connect``, in this process, as long as this object exists.

        >>> store = leasehold.testing.TestStore()
        >>> here, there = leasehold.connect(store.url), leasehold.connect(store.url)
        >>> with here.lock("orders"):
        ...     print(there.lock("orders").try_acquire())
        None
        """
        return self._store.address

    def advance(self, by: Seconds) -> None:
        """Moves the clock. Renewals, expiries, timeouts and retries happen at their times and in their order."""
        self._store.advance(seconds(by, "by"))

    def suspend(self, by: Seconds) -> None:
        """Moves the clock at once, as if all clients were suspended: no lease is renewed in between."""
        self._store.suspend(seconds(by, "by"))

    def set_reachable(self, is_reachable: bool) -> None:
        """Whether commands reach the store; True at first. Without it they raise `Unavailable`, and leases are lost when they expire."""
        self._store.set_reachable(is_reachable)

    @property
    def elapsed(self) -> float:
        """The seconds by which the clock was moved."""
        return self._store.elapsed()

    def __repr__(self) -> str:
        return f"<leasehold.testing.TestStore {self.url}, {self.elapsed:g} s>"
