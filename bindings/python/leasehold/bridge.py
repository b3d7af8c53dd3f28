"""The locks of other libraries that a lock can take too, so that old and new processes exclude each other: ``client.lock(name, bridge=…)``.

`docs/bridges.md` has what each library's lock is on the server, and the limits. The store must be Redis.
"""

from __future__ import annotations

from collections.abc import Iterable


class Bridge:
    """Another library's lock. Created by the functions of this module."""

    __slots__ = ("terms",)

    def __init__(self, *terms: str) -> None:
        self.terms = terms

    def __repr__(self) -> str:
        function, *arguments = self.terms
        return f"leasehold.bridge.{function}({', '.join(map(repr, arguments))})"


def redis_py(name: str) -> Bridge:
    """``redis.Redis.lock(name)`` of redis-py, also its asyncio form."""
    return Bridge("redis_py", name)


def pottery(name: str) -> Bridge:
    """``pottery.Redlock(key=name)`` with one server."""
    return Bridge("pottery", name)


def python_redis_lock(name: str) -> Bridge:
    """``redis_lock.Lock(client, name)`` of python-redis-lock."""
    return Bridge("python_redis_lock", name)


def set_nx_px(key: str) -> Bridge:
    """A key of ``SET key value NX PX ttl`` with a value of its holder, as most small locks have."""
    return Bridge("set_nx_px", key)


def redsync(name: str) -> Bridge:
    """redsync (Go) with one server."""
    return Bridge("redsync", name)


def node_redlock(resource: str) -> Bridge:
    """node-redlock with one server."""
    return Bridge("node_redlock", resource)


def rslock(resource: str) -> Bridge:
    """rslock (Rust) with one server."""
    return Bridge("rslock", resource)


def bsm_redislock(key: str) -> Bridge:
    """bsm/redislock (Go)."""
    return Bridge("bsm_redislock", key)


def rueidislock(name: str) -> Bridge:
    """rueidislock (Go)."""
    return Bridge("rueidislock", name)


def dapr(app_id: str, resource: str) -> Bridge:
    """Dapr's lock component on Redis."""
    return Bridge("dapr", app_id, resource)


def spring_integration(registry: str, name: str) -> Bridge:
    """``RedisLockRegistry`` of Spring Integration."""
    return Bridge("spring_integration", registry, name)


def redisson_lock(name: str) -> Bridge:
    """``RLock`` of Redisson."""
    return Bridge("redisson_lock", name)


def redisson_fenced_lock(name: str) -> Bridge:
    """``RFencedLock`` of Redisson."""
    return Bridge("redisson_fenced_lock", name)


def redisson_read_write_lock(name: str) -> Bridge:
    """``RReadWriteLock`` of Redisson: for `Client.rwlock`, or as its write lock for `Client.lock`."""
    return Bridge("redisson_read_write_lock", name)


def redlock(servers: Iterable[str], key: str) -> Bridge:
    """The same key on several independent servers, as the Redlock algorithm has it. ``servers``: their addresses."""
    return Bridge("redlock", key, *servers)


def redisson_redlock(servers: Iterable[str], name: str) -> Bridge:
    """``RedissonRedLock`` over several independent servers. ``servers``: their addresses."""
    return Bridge("redisson_redlock", name, *servers)
