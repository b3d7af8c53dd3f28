"""Locks in the shape of redis-py's, for programs that move to leasehold one process after another.

    lock = redis_client.lock("jobs", timeout=30, lock_class=leasehold.compat.redis.Lock)

It holds redis-py's own lock with the same name as well, by a bridge, so that it also excludes the processes that still use redis-py's lock. Waiters are woken
instead of polling, the lease is renewed, and `Lock.lease` has its fencing token.

What differs from redis-py's lock:

- ``timeout`` is the ttl: how long the lock outlasts a holder that has crashed. A living holder keeps it, since it is renewed. None is 10 s, and not for ever.
- ``extend`` and ``reacquire`` renew the lease to its ttl; they can't make it longer.
- ``sleep`` is ignored, because waiters do not poll.
- ``acquire(token=...)`` is refused: the token is the lease's.
- ``local.token`` is not there: `lease.token` is a number, and no secret.
- A lease that is lost raises `redis.exceptions.LockNotOwnedError` at its release, as redis-py's; `Lock.lease` tells it at once.
- The address comes from the client's connection pool: one server over TCP or a Unix socket, with or without TLS and a password. For Sentinel, or for TLS with options
  of its own, pass a client of leasehold: ``lock_class=functools.partial(leasehold.compat.redis.Lock, client=client)``. Clusters can't be bridged.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import LockError, LockNotOwnedError

from .. import _fork, bridge
from .._client import Client, connect
from .._errors import LeaseLost, Unavailable, Unsupported
from ._leases import Leases

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from .._client import Lease

logger = logging.getLogger("leasehold")

_clients: dict[tuple[int, str], Client] = {}
_mutex = threading.Lock()


def _in_child() -> None:
    global _mutex
    _mutex = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _url(redis: Any) -> str:
    """The address of the server of a client of redis-py."""
    pool = getattr(redis, "connection_pool", None)
    options: dict[str, Any] = getattr(pool, "connection_kwargs", {})
    kind = getattr(getattr(pool, "connection_class", None), "__name__", "")
    if pool is None or "sentinel" in type(pool).__name__.lower() or kind not in _SCHEMES:
        raise Unsupported(f"the address of {redis!r} is unknown: pass client=…, a client of leasehold")
    tls_options = [name for name in options if name.startswith("ssl_") and options[name] not in _TLS_DEFAULTS]
    if tls_options:
        raise Unsupported(f"{tls_options[0]} can't be taken over: pass client=…, a client of leasehold with rediss://…")
    user, password = options.get("username"), options.get("password")
    access = f"{quote(user or '', safe='')}:{quote(password, safe='')}@" if password else ""
    database = options.get("db") or 0
    if kind == "UnixDomainSocketConnection":
        return f"redis+unix://{access}{quote(str(options['path']))}?db={database}"
    host = str(options.get("host") or "localhost")
    host = f"[{host}]" if ":" in host else host
    return f"{_SCHEMES[kind]}://{access}{host}:{options.get('port') or 6379}/{database}"


_SCHEMES = {"Connection": "redis", "SSLConnection": "rediss", "UnixDomainSocketConnection": "redis+unix"}
_TLS_DEFAULTS: tuple[object, ...] = (None, False, True, "required", [])


def _client(redis: Any) -> Client:
    """One client of leasehold for all locks of one server."""
    url = _url(redis)
    with _mutex:
        client = _clients.get((_fork.generation, url))
        if client is None or client.is_closed:
            client = _clients[_fork.generation, url] = connect(url)
        return client


class Lock:
    """As `redis.lock.Lock`: see the module's differences."""

    def __init__(
        self,
        redis: Any,
        name: str | bytes,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        client: Client | None = None,
    ) -> None:
        self.redis = redis
        self.name = name
        self.timeout = timeout
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = thread_local
        self.raise_on_release_error = raise_on_release_error
        text = name.decode() if isinstance(name, bytes) else name
        client = _client(redis) if client is None else client
        self._lock = client.lock(text, ttl=timeout, bridge=bridge.redis_py(text))
        self._leases = Leases(is_shared=True)
        self._of_thread = threading.local()

    @property
    def lease(self) -> Lease | None:
        """The lease while the lock is held: by this thread, if ``thread_local`` is set."""
        return self._held.next()

    @property
    def _held(self) -> Leases:
        if not self.thread_local:
            return self._leases
        held: Leases | None = getattr(self._of_thread, "leases", None)
        if held is None:
            held = self._of_thread.leases = Leases()
        return held

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | None = None,
    ) -> bool:
        if token is not None:
            raise Unsupported("acquire(token=…) is not possible with leasehold.compat.redis.Lock: a lease has a token of its own")
        if blocking is None:
            blocking = self.blocking
        if blocking_timeout is None:
            blocking_timeout = self.blocking_timeout
        try:
            lease = self._lock._acquire(blocking_timeout if blocking else 0.0)
        except Unavailable as error:
            raise RedisConnectionError(str(error)) from error
        if lease is None:
            return False
        if self.thread_local:
            # As in redis-py, the newest one of a thread counts.
            self._of_thread.leases = Leases()
        self._held.add(lease)
        return True

    def locked(self) -> bool:
        """Whether anyone holds redis-py's lock: a process that uses it, or one with a bridge."""
        return bool(self.redis.exists(self.name))

    def owned(self) -> bool:
        lease = self.lease
        return lease is not None and not lease.is_lost

    def release(self) -> None:
        lease = self._held.take()
        if lease is None:
            raise LockError("Cannot release a lock that's not owned or is already unlocked.", lock_name=self._lock.name)
        try:
            lease.release()
        except LeaseLost as error:
            raise LockNotOwnedError(f"Cannot release a lock that's no longer owned: {error}", lock_name=self._lock.name) from error
        except Unavailable as error:
            raise RedisConnectionError(str(error)) from error

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Renews the lease to its ttl, which the lease's renewal does as well."""
        return self._renew("extend")

    def reacquire(self) -> Literal[True]:
        """Renews the lease to its ttl."""
        return self._renew("reacquire")

    def _renew(self, what: str) -> Literal[True]:
        lease = self.lease
        if lease is None:
            raise LockError(f"Cannot {what} an unlocked lock", lock_name=self._lock.name)
        try:
            lease.renew()
        except LeaseLost as error:
            raise LockNotOwnedError(f"Cannot {what} a lock that's no longer owned: {error}", lock_name=self._lock.name) from error
        except Unavailable as error:
            raise RedisConnectionError(str(error)) from error
        return True

    def __enter__(self) -> Self:
        if self.acquire():
            return self
        raise LockError("Unable to acquire lock within the time specified", lock_name=self._lock.name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.release()
        except LockError:
            if self.raise_on_release_error:
                raise
            logger.warning("the lock %r was unlocked or no longer owned at the end of its block", self._lock.name)
