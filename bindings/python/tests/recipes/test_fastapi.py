"""`leasehold.fastapi` in a real application."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Annotated, Any
from uuid import UUID

import httpx
import pytest
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient

import leasehold
import leasehold.aio
from leasehold.fastapi import locked

from servers import until


@pytest.fixture
def other() -> Iterator[leasehold.Client]:
    with leasehold.connect("memory:fastapi") as client:
        yield client


client = leasehold.aio.connect("memory:fastapi", ttl=0.5)
in_threads = leasehold.connect("memory:fastapi", ttl=0.5)
gone = leasehold.aio.connect("unix:/nonexistent.sock", connect_timeout=0.1)
app = FastAPI()
# What the path operations are doing, and the most of them at once.
inside: Counter[Any] = Counter()
most: Counter[Any] = Counter()
go_on = threading.Event()


@contextmanager
def counted(what: Any) -> Iterator[None]:
    inside[what] += 1
    most[what] = max(most[what], inside[what])
    yield
    inside[what] -= 1


def held() -> str:
    lease = leasehold.current()
    assert lease is not None
    lease.check()
    return lease.name


@app.post("/orders/{order}/ship")
@locked(client, "orders:{order}", wait=0.1)
async def ship(order: int) -> dict[str, str]:
    return {"lock": held()}


@app.post("/orders/{order}/wait")
@locked(client, "orders:{order}", wait=60)
async def ship_later(order: int) -> None:
    with counted(order):
        await asyncio.sleep(0.05)


@app.post("/batches/{batch}")
@locked(client, "batches:{batch}", wait=60)
async def ship_batch(batch: UUID) -> None:
    with counted(batch):
        await asyncio.sleep(0.05)


@app.post("/orders/{order}/lose")
@locked(client, "orders:{order}")
async def lose(order: int) -> None:
    await client.force_release(held())
    await asyncio.sleep(30)


@app.post("/threads/{order}")
@locked(in_threads, "orders:{order}")
def in_thread(order: int) -> dict[str, str]:
    return {"lock": held()}


@app.post("/threads/{order}/wait")
@locked(in_threads, "orders:{order}", wait=None)
def in_thread_later(order: int) -> None:
    with counted("thread"):
        time.sleep(0.01)


@app.post("/threads/{order}/long")
@locked(in_threads, "orders:{order}", wait=None)
def in_thread_long(order: int) -> None:
    with counted(order):
        go_on.wait(60)
        held()


def user(number: int) -> SimpleNamespace:
    return SimpleNamespace(id=number)


@app.post("/users/{number}")
@locked(client, "users:{user.id}")
async def of_user(user: Annotated[SimpleNamespace, Depends(user)]) -> dict[str, str]:
    return {"lock": held()}


@app.get("/alive")
def alive() -> None:
    pass


@app.post("/gone")
@locked(gone, "a")
async def unreachable() -> None:
    raise AssertionError


@pytest.fixture
def web() -> Iterator[TestClient]:
    inside.clear()
    most.clear()
    with TestClient(app) as test_client:
        yield test_client


def at_once(*paths: str) -> list[int]:
    """The statuses of requests that are sent at the same time."""

    async def main() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app", timeout=60) as http:
            answers = await asyncio.gather(*(http.post(path) for path in paths))
            return [answer.status_code for answer in answers]

    return asyncio.run(main())


def test_request_runs_under_the_lock_and_a_busy_one_is_answered_with_409(web: TestClient, other: leasehold.Client) -> None:
    for path in ("/orders/42/ship", "/threads/42"):
        assert web.post(path).json() == {"lock": "orders:42"}
        # It is free again when the response has arrived.
        with other.try_lock("orders:42") as lease:
            assert lease is not None
            busy = web.post(path)
            assert (busy.status_code, busy.headers["retry-after"]) == (409, "1")
            assert "orders" not in busy.text
        assert web.post(path).status_code == 200


def test_store_that_does_not_answer_is_503(web: TestClient) -> None:
    answer = web.post("/gone")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "nonexistent" not in answer.text


def test_lost_lease_cancels_the_request_and_is_503(web: TestClient) -> None:
    assert web.post("/orders/42/lose").status_code == 503


def test_spellings_of_one_value_are_one_lock(web: TestClient) -> None:
    spellings = ["1", "01", "%2B1", "1.0", "%201"]
    assert at_once(*(f"/orders/{order}/wait" for order in spellings)) == [200] * 5
    batch = UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")
    assert at_once(*(f"/batches/{spelling}" for spelling in (batch, str(batch).upper(), batch.hex))) == [200] * 3
    assert most == {1: 1, batch: 1}
    assert web.post("/orders/no-number/ship").status_code == 422
    assert web.post("/users/007").json() == {"lock": "users:7"}


def test_waiting_requests_take_no_thread_of_the_holder(web: TestClient) -> None:
    assert at_once(*["/threads/7/wait"] * 100) == [200] * 100
    assert web.get("/alive").status_code == 200
    assert most == {"thread": 1}


def test_thread_of_a_cancelled_request_holds_its_lock_until_it_returns(web: TestClient) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app", timeout=60) as http:
            cancelled = asyncio.create_task(http.post("/threads/7/long"))
            while not inside[7]:
                await asyncio.sleep(0.01)
            cancelled.cancel()
            await asyncio.wait({cancelled})
            assert cancelled.cancelled()
            later = asyncio.create_task(http.post("/orders/7/wait"))
            while not (inside[7] == 2 or (await client.inspect("orders:7")).waiters):
                await asyncio.sleep(0.01)
            go_on.set()
            assert (await later).status_code == 200

    asyncio.run(asyncio.wait_for(main(), 60))
    assert most == {7: 1}


def test_client_of_the_other_kind_is_refused() -> None:
    with pytest.raises(leasehold.InvalidInput, match=r"leasehold\.connect"):
        locked(client, "orders:{order}")(in_thread)
    with pytest.raises(leasehold.InvalidInput, match=r"leasehold\.aio"):
        locked(in_threads, "orders:{order}")(ship)


def test_requests_for_one_order_take_turns(web: TestClient, other: leasehold.Client) -> None:
    statuses: list[int] = []
    with other.lock("orders:7"):
        thread = threading.Thread(target=lambda: statuses.append(web.post("/orders/7/ship").status_code))
        thread.start()
        until(lambda: other.inspect("orders:7").waiters or statuses)
    thread.join()
    assert statuses in ([200], [409])
