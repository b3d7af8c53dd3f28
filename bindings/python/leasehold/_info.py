"""What `inspect` and `list` return."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Process(NamedTuple):
    """What a holder or a waiter says about itself."""

    host: str | None
    pid: int | None
    program: str | None
    label: str | None
    trace_id: str | None

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> Process:
        return cls(*(fields.get(name) for name in cls._fields))


class Holder(NamedTuple):
    """A holder of a lock."""

    client: str
    """A name for the client: a digest of its random id."""
    token: int
    weight: int
    """Its share of the capacity."""
    mode: str | None
    """``read``, ``upgradable`` or ``write`` of a read-write lock."""
    owner: str | None
    """Of a reentrant lock."""
    held_for: float
    """Seconds since the grant."""
    expires_in: float
    """Seconds until the lease expires unless it is renewed."""
    is_retained: bool
    """Released, and kept by its minimum hold."""
    is_own: bool
    """Whether it is a holder of this client."""
    process: Process

    @classmethod
    def _of(cls, holder: dict[str, Any]) -> Holder:
        return cls(
            client=holder["client"],
            token=holder["token"],
            weight=holder["weight"],
            mode=holder["mode"],
            owner=holder["owner"],
            held_for=holder["held_for_ms"] / 1000,
            expires_in=holder["expires_in_ms"] / 1000,
            is_retained=holder["retained"],
            is_own=holder["is_own"],
            process=Process._of(holder["metadata"]),
        )


class Waiter(NamedTuple):
    """A waiter in the queue of a lock."""

    client: str
    """A name for the client: a digest of its random id."""
    position: int
    """From 1."""
    weight: int
    mode: str | None
    waiting_for: float
    """Seconds since it began to wait."""
    is_skipped: bool
    """Unreachable: it keeps its position, and is skipped."""
    is_own: bool
    process: Process

    @classmethod
    def _of(cls, waiter: dict[str, Any]) -> Waiter:
        return cls(
            client=waiter["client"],
            position=waiter["position"],
            weight=waiter["weight"],
            mode=waiter["mode"],
            waiting_for=waiter["waiting_for_ms"] / 1000,
            is_skipped=waiter["skipped"],
            is_own=waiter["is_own"],
            process=Process._of(waiter["metadata"]),
        )


class LockInfo(NamedTuple):
    """The state of a lock."""

    kind: str
    """``mutex``, ``rw``, ``semaphore``, ``election`` …"""
    name: str
    capacity: int
    """Maximum total weight of the holders; 0 if the lock is unused."""
    in_use: int
    """Total weight of the holders."""
    last_token: int | None
    holders: list[Holder]
    waiters: list[Waiter]
    """In queue order."""
    is_foreign: bool
    """Whether another program's value is in the lock's key."""

    @classmethod
    def _of(cls, info: dict[str, Any]) -> LockInfo:
        return cls(
            kind=info["kind"],
            name=info["name"],
            capacity=info["capacity"],
            in_use=info["in_use"],
            last_token=info["last_token"],
            holders=[Holder._of(holder) for holder in info["holders"]],
            waiters=[Waiter._of(waiter) for waiter in info["waiters"]],
            is_foreign=info["foreign"] is not None,
        )


def lock_info(text: str) -> LockInfo:
    """Of the JSON that a back end returns."""
    return LockInfo._of(json.loads(text))


def lock_infos(text: str) -> list[LockInfo]:
    """Of a JSON array."""
    return [LockInfo._of(info) for info in json.loads(text)]


def holders(text: str) -> list[Holder]:
    """Of a JSON array."""
    return [Holder._of(holder) for holder in json.loads(text)]
