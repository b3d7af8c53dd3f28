"""A dependency of FastAPI: a path operation runs while it holds a lock.

    client = leasehold.aio.connect("redis://127.0.0.1")

    def order_lock(order_id: int) -> str:
        return f"orders:{order_id}"

    @app.post("/orders/{order_id}/ship")
    async def ship(order_id: int, lease: Annotated[leasehold.aio.Lease, locked(client, order_lock, wait=2)]) -> None:
        ...

The name is made by a dependency, so that its parameters have the values that the path operation gets: ``/orders/1`` and ``/orders/01`` are the same order.

A request whose lock is not granted within ``wait`` seconds is answered with 409, and one whose store does not answer, or whose lease is lost, with 503; both have
a ``Retry-After``. The lock is released before the response is sent.

A path operation with ``def`` runs in a thread, and its lock is waited for without one: waiters in FastAPI's threads would keep the holder out of them. A lost lease
cancels path operations with ``async def`` only: others call ``lease.check()`` before each write.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from fastapi import Depends, HTTPException, Request

from . import aio
from ._errors import InvalidInput, LeaseLost, QueueFull, Timeout, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import Unpack

    from ._kinds import MutexOptions
    from ._terms import Seconds


def locked(
    client: aio.Client,
    name: str | Callable[..., str],
    *,
    wait: Seconds | None = 0.0,
    ttl: Seconds | None = None,
    **options: Unpack[MutexOptions],
) -> Any:
    """The dependency. ``name`` is a text without braces, or a function whose typed parameters FastAPI provides, as those of a path operation."""
    if not isinstance(client, aio.Client):
        raise InvalidInput("a path operation waits with a client of leasehold.aio.connect, also one with def")
    name_of = name if callable(name) else _constant(name)
    for parameter in inspect.signature(name_of).parameters.values():
        if parameter.annotation is parameter.empty:
            raise InvalidInput(f"the parameter {parameter.name!r} of the name of a lock has no type: its text would name several locks for one value")

    async def hold(request: Request, name: str = Depends(name_of)) -> AsyncIterator[aio.Lease]:
        # The thread of a path operation with `def` would go on, without what other dependencies have opened for it.
        cancels = inspect.iscoroutinefunction(inspect.unwrap(request.scope["endpoint"]))
        try:
            async with client.lock(name, wait=wait, ttl=ttl, cancel_on_lost=cancels, **options) as lease:
                yield lease
        except (Timeout, QueueFull, Unavailable, LeaseLost) as error:
            raise _answer(error) from error

    # `scope`: the response says whether the lock was held to the end.
    return Depends(hold, scope="function")


def _constant(name: str) -> Callable[[], str]:
    if "{" in name or "}" in name:
        raise InvalidInput(f"{name!r}: braces have no values here; pass a function, as `def order_lock(order_id: int) -> str`")
    return lambda: name


def _answer(error: Timeout | QueueFull | Unavailable | LeaseLost) -> HTTPException:
    status = 409 if isinstance(error, Timeout) else 503
    # The error's own text names the store, which is not for the caller.
    detail = "the resource is in use" if status == 409 else "the lock of the resource is not available"
    return HTTPException(status, detail, headers={"Retry-After": "1"})
