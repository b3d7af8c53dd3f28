"""The leases of a lock in another library's shape, whose `release` does not say which one it ends."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .. import _client


class Leases:
    """The leases of an object that several threads acquire and release. One that was lost stays until it is released, which raises `LeaseLost`: a lease that
    another thread was granted meanwhile is left alone."""

    def __init__(self, *, is_shared: bool = False) -> None:
        """`is_shared`: a thread that has acquired none ends the newest, though others were lost before, and may acquire without a release after a loss."""
        self._is_shared = is_shared
        self._leases: list[tuple[int, _client.Lease]] = []
        # A signal handler may release, too.
        self._mutex = threading.RLock()

    def add(self, lease: _client.Lease) -> None:
        ident = threading.get_ident()
        with self._mutex:
            if self._is_shared:
                self._leases = [entry for entry in self._leases if entry[0] != ident or not entry[1].is_lost]
            self._leases.append((ident, lease))

    def next(self) -> _client.Lease | None:
        """What the next release of this thread ends: its own newest lease, else the oldest that was lost, else the newest."""
        with self._mutex:
            newest = [lease for _, lease in reversed(self._leases)]
            own = self._own()
        lost = [] if self._is_shared else [lease for lease in reversed(newest) if lease.is_lost]
        return next(iter(own or lost or newest), None)

    def take(self) -> _client.Lease | None:
        """Removes that lease."""
        with self._mutex:
            lease = self.next()
            self._leases = [entry for entry in self._leases if entry[1] is not lease]
        return lease

    def has_own(self) -> bool:
        """Whether this thread has acquired one."""
        with self._mutex:
            return bool(self._own())

    def _own(self) -> list[_client.Lease]:
        ident = threading.get_ident()
        return [lease for owner, lease in reversed(self._leases) if owner == ident]

    def are_held(self) -> bool:
        with self._mutex:
            return any(not lease.is_lost for _, lease in self._leases)

    def __len__(self) -> int:
        return len(self._leases)
