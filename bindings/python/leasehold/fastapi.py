"""A dependency of FastAPI: a path operation runs while it holds a lock.

    client = leasehold.aio.connect("redis://127.0.0.1")

    @app.post("/orders/{order_id}/ship")
    async def ship(order_id: int, lease: Annotated[leasehold.aio.Lease, locked(client, "orders:{order_id}", wait=2)]) -> None:
        ...

A request whose lock is not granted within ``wait`` seconds is answered with 409, and one whose store does not answer, or whose lease is lost, with 503; both have
a ``Retry-After``. The lock is released before the response is sent.

With a client of `leasehold.connect` it is for path operations with ``def``, which FastAPI runs in threads. A lost lease cancels those with ``async def`` only:
others call ``lease.check()`` before each write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import Depends, HTTPException, Request

from . import _client, aio
from ._errors import LeaseLost, QueueFull, Timeout, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from typing import Unpack

    from ._kinds import MutexOptions
    from ._terms import Seconds


def locked(
    client: _client.Client | aio.Client,
    name: str | Callable[[Request], str],
    *,
    wait: Seconds | None = 0.0,
    ttl: Seconds | None = None,
    **options: Unpack[MutexOptions],
) -> Any:
    """The dependency. ``name`` has the parameters of the path in braces, or it is a function of the request."""

    def name_of(request: Request) -> str:
        return name(request) if callable(name) else name.format(**request.path_params)

    async def hold(request: Request) -> AsyncIterator[aio.Lease]:
        assert isinstance(client, aio.Client)
        try:
            async with client.lock(name_of(request), wait=wait, ttl=ttl, **options) as lease:
                yield lease
        except (Timeout, QueueFull, Unavailable, LeaseLost) as error:
            raise _answer(error) from error

    def hold_in_thread(request: Request) -> Iterator[_client.Lease]:
        assert isinstance(client, _client.Client)
        try:
            with client.lock(name_of(request), wait=wait, ttl=ttl, **options) as lease:
                yield lease
        except (Timeout, QueueFull, Unavailable, LeaseLost) as error:
            raise _answer(error) from error

    # `scope`: the response says whether the lock was held to the end.
    return Depends(hold if isinstance(client, aio.Client) else hold_in_thread, scope="function")


def _answer(error: Timeout | QueueFull | Unavailable | LeaseLost) -> HTTPException:
    status = 409 if isinstance(error, Timeout) else 503
    # The error's own text names the store, which is not for the caller.
    detail = "the resource is in use" if status == 409 else "the lock of the resource is not available"
    return HTTPException(status, detail, headers={"Retry-After": "1"})
