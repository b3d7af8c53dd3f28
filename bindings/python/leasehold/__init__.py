"""Distributed locks with leases, fencing tokens and FIFO queues, on Redis, PostgreSQL, SQLite, memory, or a server of ``leasehold serve``.

>>> import leasehold
>>> client = leasehold.connect("memory:")
>>> with client.lock("orders:42", ttl=10, wait=30) as lease:
...     print(lease.token > 0)
True

`leasehold.aio` has the same for asyncio.
"""

from __future__ import annotations

from ._client import Client, Election, Lease, Lock, Observer, RwLock, TryLock, connect
from ._errors import (
    ClientClosed,
    Error,
    ForkedError,
    InvalidInput,
    LeaseLost,
    QueueFull,
    Refused,
    Timeout,
    Unavailable,
    Unsupported,
)
from ._lease import current

TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import aio, bridge, testing
    from ._info import Holder, LockInfo, Process, Waiter

__version__ = "0.1.0"

__all__ = [
    "Client",
    "ClientClosed",
    "Election",
    "Error",
    "ForkedError",
    "Holder",
    "InvalidInput",
    "Lease",
    "LeaseLost",
    "Lock",
    "LockInfo",
    "Observer",
    "Process",
    "QueueFull",
    "Refused",
    "RwLock",
    "Timeout",
    "TryLock",
    "Unavailable",
    "Unsupported",
    "Waiter",
    "aio",
    "bridge",
    "connect",
    "current",
    "testing",
]

_INFO = ("Holder", "LockInfo", "Process", "Waiter")


def __getattr__(name: str) -> object:
    """Imports what not every program needs when it is first used: asyncio above all."""
    if name in ("aio", "bridge", "testing"):
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
    if name in _INFO:
        from . import _info

        return getattr(_info, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
