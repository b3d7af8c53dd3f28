"""Locks in Django: around transactions, until a commit, and around a command of ``manage.py``.

    # settings.py
    INSTALLED_APPS = [..., "leasehold.django"]                 # for manage.py with_lock
    LEASEHOLD = {"url": "redis://127.0.0.1", "namespace": "shop"}   # the arguments of leasehold.connect

    with leasehold.django.transaction_lock("account:7"):       # commits before it releases
        Account.objects.filter(pk=7).update(...)

A lock that is released before its transaction is committed protects nothing: the next holder reads what was there before.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import transaction

from .. import _fork
from .._client import Client, Lease, connect

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Unpack

    from .._kinds import MutexOptions
    from .._terms import Seconds


def client() -> Client:
    """The client of this process, with the arguments of ``settings.LEASEHOLD``. A child process has another one than its parent."""
    return _client_of(_fork.generation)


@functools.cache
def _client_of(generation: int) -> Client:
    return connect(**settings.LEASEHOLD)


@contextmanager
def transaction_lock(
    name: str,
    *,
    wait: Seconds | None = None,
    ttl: Seconds | None = None,
    using: str | None = None,
    **options: Unpack[MutexOptions],
) -> Iterator[Lease]:
    """A block that is a transaction under a lock: it is committed before the release, and rolled back if the lease is lost. It must be the outermost transaction
    (``RuntimeError`` of Django): within one, use `lock_until_commit`."""
    # Without types of Django's own, its function is taken for the decorator only.
    atomic: Any = transaction.atomic
    with client().lock(name, wait=wait, ttl=ttl, **options) as lease, atomic(using=using, durable=True):
        yield lease
        lease.check()


def lock_until_commit(
    name: str,
    *,
    wait: Seconds | None = None,
    ttl: Seconds | None = None,
    using: str | None = None,
    **options: Unpack[MutexOptions],
) -> Lease:
    """Acquires a lock that is released after the transaction around this call is committed or rolled back, as with ``ATOMIC_REQUESTS``: the outermost one, also if
    a part of it is rolled back. Without a transaction it raises ``RuntimeError``. Call ``lease.check()`` before each write: a loss after the last one is only logged."""
    if not transaction.get_connection(using).in_atomic_block:
        raise RuntimeError("lock_until_commit needs a transaction: use it in transaction.atomic(), or use transaction_lock")
    lease = client().lock(name, wait=wait, ttl=ttl, **options).acquire()
    # Of the whole transaction: Django forgets what belongs to a savepoint that is rolled back.
    connection = transaction.get_connection(using)
    savepoints, connection.savepoint_ids = connection.savepoint_ids, []
    try:
        transaction.on_commit(_Release(lease), using=using, robust=True)
    finally:
        connection.savepoint_ids = savepoints
    return lease


class _Release:
    """Releases a lease after the commit. Django drops it at a rollback, which it does not tell."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def __call__(self) -> None:
        self._lease.release()

    def __del__(self) -> None:
        lease = self._lease
        if not lease._ended and lease._generation == _fork.generation:
            lease._end()
            lease._lease.abandon()
