"""`leasehold.fastapi` in a real application."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any
from uuid import UUID

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

import leasehold
import leasehold.aio
from leasehold.fastapi import locked

from servers import until


@pytest.fixture
def other() -> Iterator[leasehold.Client]:
    with leasehold.connect("memory:fastapi") as client:
        yield client


def order_lock(order: int) -> str:
    return f"orders:{order}"


def batch_lock(batch: UUID) -> str:
    return f"batches:{batch}"


def path_lock(request: Request) -> str:
    return request.url.path


client = leasehold.aio.connect("memory:fastapi", ttl=0.5)
gone = leasehold.aio.connect("unix:/nonexistent.sock", connect_timeout=0.1)
app = FastAPI()
# What the path operations are doing, and the most of them at once.
inside: dict[Any, int] = {}
most: dict[Any, int] = {}


async def work(what: Any) -> None:
    inside[what] = inside.get(what, 0) + 1
    most[what] = max(most.get(what, 0), inside[what])
    await asyncio.sleep(0.05)
    inside[what] -= 1


OrderLease = Annotated[leasehold.aio.Lease, locked(client, order_lock, wait=0.1)]


@app.post("/orders/{order}/ship")
async def ship(order: int, lease: OrderLease) -> dict[str, str]:
    return {"lock": lease.name}


@app.post("/orders/{order}/wait")
async def ship_later(order: int, lease: Annotated[leasehold.aio.Lease, locked(client, order_lock, wait=60)]) -> None:
    await work(order)


@app.post("/batches/{batch}")
async def ship_batch(batch: UUID, lease: Annotated[leasehold.aio.Lease, locked(client, batch_lock, wait=60)]) -> None:
    await work(batch)


@app.post("/orders/{order}/lose")
async def lose(order: int, lease: Annotated[leasehold.aio.Lease, locked(client, path_lock)]) -> None:
    await client.force_release(lease.name)
    await asyncio.sleep(30)


@app.post("/threads/{order}")
def in_thread(order: int, lease: OrderLease) -> dict[str, str]:
    assert leasehold.current() is lease
    return {"lock": lease.name}


@app.post("/threads/{order}/wait")
def in_thread_later(order: int, lease: Annotated[leasehold.aio.Lease, locked(client, order_lock, wait=None)]) -> None:
    time.sleep(0.01)


@app.post("/threads/{order}/lose")
def lose_in_thread(order: int, lease: OrderLease) -> None:
    with leasehold.connect("memory:fastapi") as other:
        other.force_release(lease.name)
    until(lambda: lease.is_lost)
    time.sleep(0.3)
    inside["after the loss"] = 1


@app.post("/alive")
def alive() -> None:
    pass


@app.post("/gone")
async def unreachable(lease: Annotated[leasehold.aio.Lease, locked(gone, "a")]) -> None:
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


def test_lost_lease_of_a_thread_is_503_at_its_end(web: TestClient) -> None:
    assert web.post("/threads/42/lose").status_code == 503
    assert inside == {"after the loss": 1}


def test_spellings_of_one_value_are_one_lock() -> None:
    most.clear()
    spellings = ["1", "01", "%2B1", "1.0", "%201"]
    assert at_once(*(f"/orders/{order}/wait" for order in spellings)) == [200] * 5
    batch = UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")
    assert at_once(*(f"/batches/{spelling}" for spelling in (batch, str(batch).upper(), batch.hex))) == [200] * 3
    assert most == {1: 1, batch: 1}


def test_name_that_has_no_value_is_refused(web: TestClient) -> None:
    assert web.post("/orders/no-number/ship").status_code == 422
    untyped: Any = lambda order: f"orders:{order}"  # noqa: E731
    for name in ("orders:{order}", untyped):
        with pytest.raises(leasehold.InvalidInput, match="order"):
            locked(client, name)


def test_waiting_requests_take_no_thread_of_the_holder() -> None:
    assert at_once(*["/threads/7/wait"] * 100, "/alive") == [200] * 101
    synchronous: Any = leasehold.connect("memory:fastapi")
    with pytest.raises(leasehold.InvalidInput, match=r"leasehold\.aio"):
        locked(synchronous, order_lock)


def test_requests_for_one_order_take_turns(web: TestClient, other: leasehold.Client) -> None:
    statuses: list[int] = []
    with other.lock("orders:7"):
        thread = threading.Thread(target=lambda: statuses.append(web.post("/orders/7/ship").status_code))
        thread.start()
        until(lambda: other.inspect("orders:7").waiters or statuses)
    thread.join()
    assert statuses in ([200], [409])
