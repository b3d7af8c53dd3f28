"""A decorator for FastAPI: a path operation runs while it holds a lock.

    client = leasehold.aio.connect("redis://127.0.0.1")

    @app.post("/orders/{order_id}/ship")
    @locked(client, "orders:{order_id}", wait=2)
    async def ship(order_id: int) -> None:
        leasehold.current().check()     # before each write
        ...

The fields of the name are arguments of the function, also those of its dependencies (``"users:{user.id}"``), with the values that FastAPI has made of the request: the
orders ``/orders/1`` and ``/orders/01`` are one.

A request whose lock is not granted within ``wait`` seconds is answered with 409, and one whose store does not answer, or whose lease is lost, with 503; both have
a ``Retry-After``. The lock is released before the response is sent.

A path operation with ``async def`` needs a client of `leasehold.aio`, and is cancelled when its lease is lost. One with ``def`` needs a client of `leasehold.connect`: it
waits in its thread, and holds the lock until it returns, also if its request is cancelled.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import HTTPException

from . import _client, aio
from ._errors import InvalidInput, LeaseLost, QueueFull, Timeout, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Unpack

    from ._kinds import MutexOptions
    from ._terms import Seconds

F = TypeVar("F", bound="Callable[..., Any]")


def locked(
    client: _client.Client | aio.Client,
    name: str,
    *,
    wait: Seconds | None = 0.0,
    ttl: Seconds | None = None,
    **options: Unpack[MutexOptions],
) -> Callable[[F], F]:
    """Decorates a path operation, below the decorator of FastAPI. ``name`` has the function's arguments in braces."""
    is_async = isinstance(client, aio.Client)
    lock: Any = client.locked(name, wait=wait, ttl=ttl, **options)

    def decorate(function: F) -> F:
        if is_async and not inspect.iscoroutinefunction(inspect.unwrap(function)):
            raise InvalidInput(f"{function.__qualname__} is no coroutine function: decorate it with a client of leasehold.connect")
        under_lock = lock(function)

        @functools.wraps(function)
        async def in_loop(*arguments: Any, **named: Any) -> Any:
            with _answers():
                return await under_lock(*arguments, **named)

        @functools.wraps(function)
        def in_thread(*arguments: Any, **named: Any) -> Any:
            with _answers():
                return under_lock(*arguments, **named)

        return in_loop if is_async else in_thread  # type: ignore[return-value]

    return decorate


@contextmanager
def _answers() -> Iterator[None]:
    try:
        yield
    except (Timeout, QueueFull, Unavailable, LeaseLost) as error:
        status = 409 if isinstance(error, Timeout) else 503
        # The error's own text names the store, which is not for the caller.
        detail = "the resource is in use" if status == 409 else "the lock of the resource is not available"
        raise HTTPException(status, detail, headers={"Retry-After": "1"}) from error
