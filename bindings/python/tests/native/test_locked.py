"""Decorated functions whose bodies would run after the call, and so without the lock."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import leasehold
import leasehold.aio
from leasehold.celery import one_at_a_time

begun: list[str] = []


async def coroutine(*_: Any) -> None:
    begun.append("coroutine")


def generator(*_: Any) -> Iterator[int]:
    begun.append("generator")
    yield 1


async def async_generator(*_: Any) -> AsyncIterator[int]:
    begun.append("asynchronous generator")
    yield 1


class Service:
    async def __call__(self, *_: Any) -> None:
        begun.append("service")


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """As decorators for metrics or retries do it."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


LATER: dict[str, Callable[..., Any]] = {
    "a decorated coroutine function": wrapped(coroutine),
    "a partial coroutine function": functools.partial(wrapped(coroutine)),
    "an object whose call is a coroutine": Service(),
    "a lambda that returns a coroutine": lambda *_: coroutine(),
    "a decorated generator": wrapped(generator),
    "a decorated asynchronous generator": wrapped(async_generator),
    "a context manager": contextlib.contextmanager(generator),
    "an asynchronous context manager": contextlib.asynccontextmanager(async_generator),
}


@pytest.mark.parametrize("what", LATER)
def test_body_that_would_run_after_the_release_does_not_run(what: str) -> None:
    begun.clear()
    with leasehold.connect("memory:") as client:
        with pytest.raises(leasehold.InvalidInput, match="later|after the release|coroutine function"):
            client.locked("job")(LATER[what])()
        with pytest.raises(leasehold.InvalidInput, match="later|after the release|coroutine function"):
            one_at_a_time(client, "job")(LATER[what])(None)
        with client.lock("job", wait=5):
            pass
    assert begun == []


@pytest.mark.parametrize("later", [generator, async_generator, coroutine])
def test_coroutine_function_that_returns_a_body_is_refused(later: Callable[..., Any]) -> None:
    begun.clear()

    async def work() -> Any:
        return later()

    async def main() -> None:
        async with leasehold.aio.connect("memory:") as client:
            with pytest.raises(leasehold.InvalidInput, match="after the release"):
                await client.locked("job")(work)()
            async with client.lock("job", wait=5):
                pass

    asyncio.run(main())
    assert begun == []


def test_decorated_coroutine_runs_under_the_lock_of_an_asyncio_client() -> None:
    async def main() -> None:
        async with leasehold.aio.connect("memory:") as client:

            async def body() -> bool:
                return await client.lock("job").try_acquire() is None

            assert await client.locked("job")(wrapped(body))()

    asyncio.run(main())
