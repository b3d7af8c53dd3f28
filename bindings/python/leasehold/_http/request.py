"""What is asked for: checked terms as the path and the fields of a request."""

import urllib.parse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .._errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    from .. import _backend

# The server's default: three times a failover of ten seconds.
DEFAULT_TTL = 30.0
MIN_TTL = 0.1
MAX_TTL = 2_592_000.0

_KINDS = {
    "mutex": "mutex",
    "reentrant": "mutex",
    "once_per": "mutex",
    "read": "rw",
    "write": "rw",
    "semaphore": "semaphore",
    "election": "election",
    "set": "mutex",
}


@dataclass(frozen=True, slots=True)
class Request:
    """An acquisition. `is_set`: of several mutexes, all or none."""

    path: str
    what: str
    names: tuple[str, ...]
    ttl: float
    is_renewed: bool
    max_hold: float | None
    is_set: bool
    fields: dict[str, Any] = field(default_factory=dict)


def lock_path(kind: str, name: str, action: str = "") -> str:
    """The path of a lock. Names of folders do not arrive in a path, so that they go into the query."""
    locks = f"/v1/locks/{urllib.parse.quote(kind, safe='')}"
    if name in (".", ".."):
        return f"{locks}/_{action}?name={name}"
    return f"{locks}/{urllib.parse.quote(name, safe='')}{action}"


def request_of(terms: "_backend.Terms", settings: "_backend.Settings") -> Request:
    """Raises `Unsupported` for what the HTTP API does not have, and `InvalidInput`."""
    _refuse_unsupported(terms)
    kind = _KINDS[terms.kind]
    names = tuple(dict.fromkeys(terms.names))
    if not names or "" in names:
        raise InvalidInput("a lock has a name")
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"the name {name!r} is no Unicode text") from None
    ttl = terms.ttl if terms.ttl is not None else settings.ttl if settings.ttl is not None else DEFAULT_TTL
    if not MIN_TTL <= ttl <= MAX_TTL:
        raise InvalidInput(f"ttl is {MIN_TTL:g} to {MAX_TTL:g} seconds, not {ttl:g}")
    fields: dict[str, Any] = {"ttl_ms": _ms(ttl)}
    label = terms.label if terms.label is not None else settings.label
    if label is not None:
        fields["label"] = label
    if terms.min_hold:
        fields["min_hold_ms"] = _ms(terms.min_hold)
    match terms.kind:
        case "set":
            fields["names"] = list(names)
        case "reentrant":
            fields["owner"] = terms.owner
        case "read" | "write":
            fields["mode"] = terms.kind
        case "semaphore":
            fields |= {"capacity": terms.capacity, "permits": terms.permits}
        case "once_per":
            fields["once_per_ms"] = _ms(terms.period)
        case _:
            pass
    is_set = terms.kind == "set"
    path = "/v1/locks/acquire" if is_set else lock_path(kind, names[0], "/acquire")
    what = f"{kind} {', '.join(map(repr, names))}"
    return Request(path, what, names, ttl, terms.auto_renew, terms.max_hold, is_set, fields)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _refuse_unsupported(terms: "_backend.Terms") -> None:
    store = "with the address of its store in place of the server's"
    for is_given, what, instead in [
        (terms.kind not in _KINDS, "an upgradable reader", f"use it {store}"),
        (terms.bridge is not None, "a bridge to another library's lock", f"use it {store}"),
        (terms.max_waiters is not None, "max_waiters", "the server has limits of its own"),
        (terms.replicas is not None, "replicas", f"use it {store}"),
        (terms.trace_id is not None, "trace_id", "put it into the label"),
        (terms.at_least_once, "once_per(at_least_once=True)", f"use it {store}"),
        (terms.kind == "set" and bool(terms.min_hold), "min_hold of several locks", "lock them one by one"),
    ]:
        if is_given:
            raise Unsupported(f"a server's HTTP API does not have {what}: {instead}")
