"""`leasehold.fastapi` in a real application."""

import threading
from collections.abc import Iterator
from typing import Annotated

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import leasehold
import leasehold.aio
from leasehold.fastapi import locked

from servers import until


@pytest.fixture
def other() -> Iterator[leasehold.Client]:
    with leasehold.connect("memory:fastapi") as client:
        yield client


@pytest.fixture
def web() -> Iterator[TestClient]:
    client = leasehold.aio.connect("memory:fastapi")
    in_threads = leasehold.connect("memory:fastapi")
    gone = leasehold.aio.connect("unix:/nonexistent.sock", connect_timeout=0.1)
    app = FastAPI()

    @app.post("/orders/{order}/ship")
    async def ship(order: int, lease: Annotated[leasehold.aio.Lease, locked(client, "orders:{order}", wait=0.1)]) -> dict[str, str]:
        return {"lock": lease.name}

    @app.post("/orders/{order}/lose")
    async def lose(order: int, lease: Annotated[leasehold.aio.Lease, locked(client, lambda request: request.url.path, ttl=0.5)]) -> dict[str, str]:
        import asyncio

        await client.force_release(lease.name)
        await asyncio.sleep(30)
        return {}

    @app.post("/threads/{order}")
    def in_thread(order: int, lease: Annotated[leasehold.Lease, locked(in_threads, "orders:{order}")]) -> dict[str, str]:
        return {"lock": lease.name}

    @app.post("/gone")
    async def unreachable(lease: Annotated[leasehold.aio.Lease, locked(gone, "a")]) -> None:
        raise AssertionError

    with TestClient(app) as test_client:
        yield test_client
    in_threads.close()


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


def test_requests_for_one_order_take_turns(web: TestClient, other: leasehold.Client) -> None:
    statuses: list[int] = []
    with other.lock("orders:7"):
        thread = threading.Thread(target=lambda: statuses.append(web.post("/orders/7/ship").status_code))
        thread.start()
        until(lambda: other.inspect("orders:7").waiters or statuses)
    thread.join()
    assert statuses in ([200], [409])
