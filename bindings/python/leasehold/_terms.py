"""Options as values: what the API passes to a back end."""

from __future__ import annotations

from ._errors import InvalidInput

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta
    from typing import TypeAlias

    from .bridge import Bridge

    Seconds: TypeAlias = float | timedelta


def seconds(value: Seconds, what: str) -> float:
    """The number of seconds of a number or a `datetime.timedelta`."""
    total = getattr(value, "total_seconds", None)
    number = total() if total is not None else value
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        raise InvalidInput(f"{what} is a number of seconds or a timedelta, not {value!r}")
    if not number >= 0:
        raise InvalidInput(f"{what} is not negative, but it is {value!r}")
    return float(number)


def optional_seconds(value: Seconds | None, what: str) -> float | None:
    """As `seconds`; None and infinity are no limit."""
    if value is None:
        return None
    number = seconds(value, what)
    return None if number == float("inf") else number


class Settings:
    """The settings of a client."""

    __slots__ = ("connect_timeout", "label", "max_waiters", "replicas", "token", "ttl")

    def __init__(
        self,
        *,
        ttl: Seconds | None = None,
        label: str | None = None,
        max_waiters: int | None = None,
        replicas: int | None = None,
        connect_timeout: Seconds | None = None,
        token: str | None = None,
    ) -> None:
        self.ttl = optional_seconds(ttl, "ttl")
        self.label = label
        self.max_waiters = max_waiters
        self.replicas = replicas
        self.connect_timeout = optional_seconds(connect_timeout, "connect_timeout")
        self.token = token


class Terms:
    """What to lock, and how. `leasehold._backend.Terms` explains the attributes."""

    __slots__ = (
        "at_least_once",
        "auto_renew",
        "bridge",
        "capacity",
        "detachable",
        "global_fifo",
        "kind",
        "label",
        "max_hold",
        "max_waiters",
        "min_hold",
        "names",
        "owner",
        "period",
        "permits",
        "replicas",
        "trace_id",
        "ttl",
    )

    def __init__(
        self,
        kind: str,
        names: tuple[str, ...],
        *,
        ttl: Seconds | None = None,
        auto_renew: bool = True,
        min_hold: Seconds = 0.0,
        max_hold: Seconds | None = None,
        max_waiters: int | None = None,
        replicas: int | None = None,
        label: str | None = None,
        trace_id: str | None = None,
        owner: str | None = None,
        permits: int = 1,
        capacity: int = 1,
        period: Seconds = 0.0,
        at_least_once: bool = False,
        global_fifo: bool = False,
        detachable: bool = False,
        bridge: Bridge | None = None,
    ) -> None:
        self.kind = kind
        self.names = names
        self.ttl = None if ttl is None else seconds(ttl, "ttl")
        self.auto_renew = auto_renew
        self.min_hold = 0.0 if min_hold == 0.0 else seconds(min_hold, "min_hold")
        self.max_hold = None if max_hold is None else seconds(max_hold, "max_hold")
        self.max_waiters = max_waiters
        self.replicas = replicas
        self.label = label
        self.trace_id = trace_id
        self.owner = owner
        self.permits = permits
        self.capacity = capacity
        self.period = 0.0 if period == 0.0 else seconds(period, "period")
        self.at_least_once = at_least_once
        self.global_fifo = global_fifo
        self.detachable = detachable
        self.bridge = None if bridge is None else bridge.terms
