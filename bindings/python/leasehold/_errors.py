"""The exceptions. Contention is none of them: ``try_acquire`` returns ``None``."""

from __future__ import annotations


class Error(Exception):
    """Base class of all errors of this package. The message names the lock, the store, what happened and the fix.

    >>> issubclass(Timeout, Error)
    True
    """


class InvalidInput(Error, ValueError):
    """A name, an option or an address is invalid. The call has no effect."""


class Unsupported(Error):
    """This store or this kind of lock has no such feature. The message says which one has."""


class Unavailable(Error, ConnectionError):
    """The store did not answer. What was asked may have been done: a lease that was granted meanwhile is released."""


class Refused(Unavailable, PermissionError):
    """The store answered, and refused: a wrong password, a missing right, a full disk."""


class Timeout(Error, TimeoutError):
    """The lock was not granted within ``wait`` seconds, or a release was not confirmed within its limit."""


class LeaseLost(Error):
    """The lease ended before the work: another holder may have the lock now.

    ``reason`` is ``"expired"`` (no renewal succeeded in time), ``"gone"`` (released by force, or lost by the store), ``"max_hold"``,
    ``"closed"`` (the client was closed), ``"bridge"`` (the other library's lock was lost), or, in `check` alone, ``"released"``.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class QueueFull(Error):
    """The wait queue of the lock has its maximum length (``max_waiters``)."""


class ClientClosed(Error):
    """The client was closed, or the interpreter exits."""


class ForkedError(Error):
    """The client, lock or lease belongs to the process that forked this one. Call ``connect`` in the child."""
