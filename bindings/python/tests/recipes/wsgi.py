"""The application of the tests of gunicorn: it counts in a file, under a lock."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import leasehold

# With --preload the master imports this before it forks. The client connects in each worker.
client = leasehold.connect(os.environ["TEST_STORE"])


def app(environ: dict[str, Any], start_response: Callable[[str, list[tuple[str, str]]], object]) -> Iterable[bytes]:
    counter = Path(os.environ["TEST_COUNTER"])
    with client.lock("counter", wait=30) as lease:
        value = int(counter.read_text()) + 1
        lease.check()
        counter.write_text(str(value))
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{value} {os.getpid()}".encode()]
