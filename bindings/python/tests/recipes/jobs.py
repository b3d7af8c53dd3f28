"""The tasks of the tests of Celery, which a real worker runs."""

import os
import time
from pathlib import Path
from typing import Any

import celery

import leasehold
from leasehold.celery import one_at_a_time

app = celery.Celery("jobs", broker=os.environ.get("TEST_BROKER"), backend=os.environ.get("TEST_BROKER"))
app.conf.update(broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)

client = leasehold.connect(os.environ.get("TEST_STORE", "memory:"), ttl=5)


def note(word: str) -> None:
    with Path(os.environ["TEST_NOTES"]).open("a") as file:
        file.write(f"{word} {os.getpid()}\n")


@app.task(bind=True, acks_late=True)  # type: ignore[untyped-decorator]
@one_at_a_time(client, "report:{user}", countdown=0.2)
def report(task: Any, user: int, seconds: float = 0.3) -> int:
    note(f"begin {user}")
    time.sleep(seconds)
    lease = leasehold.current()
    assert lease is not None
    lease.check()
    note(f"end {user}")
    return lease.token


@app.task(bind=True)  # type: ignore[untyped-decorator]
@one_at_a_time(client, "report:{user}", busy="skip")
def skipping(task: Any, user: int) -> str:
    return "done"


@app.task(bind=True, time_limit=5)  # type: ignore[untyped-decorator]
@one_at_a_time(client, "endless")
def endless(task: Any) -> None:
    note("begin endless")
    time.sleep(60)
