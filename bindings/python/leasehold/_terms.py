"""Options as values: what the API passes to a back end."""

from __future__ import annotations

from ._errors import InvalidInput

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
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
        raise InvalidInput(f"{what} is a number of seconds from 0 on, not {value!r}")
    return float(number)


def optional_seconds(value: Seconds | None, what: str) -> float | None:
    """As `seconds`; None and infinity are no limit."""
    if value is None:
        return None
    number = seconds(value, what)
    return None if number == float("inf") else number


def text(value: str, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{what} is a text, not {value!r}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"{what} is no valid text: {value!r}") from None
    return value


def optional_text(value: str | None, what: str) -> str | None:
    return None if value is None else text(value, what)


def count(value: int, what: str) -> int:
    """A number of 32 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
        raise InvalidInput(f"{what} is a whole number from 0 on, not {value!r}")
    return value


def optional_count(value: int | None, what: str) -> int | None:
    return None if value is None else count(value, what)


def optional_token(value: int | None) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**64):
        raise InvalidInput(f"a fencing token is a positive whole number, not {value!r}")
    return value


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
        self.ttl = None if ttl is None else seconds(ttl, "ttl")
        self.label = optional_text(label, "label")
        self.max_waiters = optional_count(max_waiters, "max_waiters")
        self.replicas = optional_count(replicas, "replicas")
        self.connect_timeout = optional_seconds(connect_timeout, "connect_timeout")
        self.token = optional_text(token, "token")


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
        owner: str = "",
        permits: int = 1,
        capacity: int = 1,
        period: Seconds = 0.0,
        at_least_once: bool = False,
        global_fifo: bool = False,
        detachable: bool = False,
        bridge: Bridge | None = None,
    ) -> None:
        if kind == "set" and len(set(names)) < len(names):
            raise InvalidInput(f"several names are different ones, not {names!r}")
        self.kind = kind
        self.names = names
        self.ttl = None if ttl is None else seconds(ttl, "ttl")
        self.auto_renew = auto_renew
        self.min_hold = 0.0 if min_hold == 0.0 else seconds(min_hold, "min_hold")
        self.max_hold = None if max_hold is None else seconds(max_hold, "max_hold")
        self.max_waiters = optional_count(max_waiters, "max_waiters")
        self.replicas = optional_count(replicas, "replicas")
        self.label = optional_text(label, "label")
        self.trace_id = optional_text(trace_id, "trace_id")
        self.owner = text(owner, "owner") if kind == "reentrant" else None
        self.permits = count(permits, "take")
        self.capacity = count(capacity, "permits")
        self.period = 0.0 if period == 0.0 else seconds(period, "period")
        self.at_least_once = at_least_once
        self.global_fifo = global_fifo
        self.detachable = detachable
        self.bridge = None if bridge is None else terms_of(bridge)


def terms_of(bridge: Bridge) -> tuple[str, ...]:
    terms = getattr(bridge, "terms", None)
    if not isinstance(terms, tuple):
        raise InvalidInput(f"a bridge is created by a function of leasehold.bridge, and not {bridge!r}")
    return tuple(text(term, "a name of another library's lock") for term in terms)


def several(names: Iterable[str]) -> Iterable[str]:
    if isinstance(names, (str, bytes)):
        raise InvalidInput(f"several names are a list, not {names!r}")
    return names
