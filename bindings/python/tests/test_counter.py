"""Processes with threads, and with tasks of asyncio, count in a file under one lock, while some of them are killed.

Each turn appends a line with the next number and its token. Two holders at a time would write one number twice, and a stale one a lower token.
`LEASEHOLD_COUNTER_SECONDS=60` runs for a minute with each store.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers import Postgres, Redis, Serve, environment, until

SECONDS = float(os.environ.get("LEASEHOLD_COUNTER_SECONDS", "5"))
PROCESSES = 8

WORKER = """
import asyncio, os, sys, threading, time
import leasehold

url, file, mode = sys.argv[1:]

# A machine without a moment's time for a process may cost it its lease, or an answer. The worker prints that, and goes on.
EXPECTED = (leasehold.LeaseLost, leasehold.Unavailable)

def turn(lease):
    with open(file, "rb+", buffering=0) as counter:
        counter.seek(-min(64, os.fstat(counter.fileno()).st_size), 2)
        number, token = map(int, counter.read().splitlines()[-1].split())
        assert lease.token > token, (lease.token, token)
        lease.check()
        counter.seek(0, 2)
        counter.write(f"{number + 1} {lease.token}\\n".encode())

def in_threads():
    client = leasehold.connect(url, ttl=3)
    def work():
        while True:
            try:
                with client.lock("counter") as lease:
                    turn(lease)
            except EXPECTED as error:
                print(repr(error), file=sys.stderr, flush=True)
    for _ in range(4):
        threading.Thread(target=work).start()

async def in_tasks():
    client = leasehold.aio.connect(url, ttl=3)
    async def work():
        while True:
            try:
                async with client.lock("counter") as lease:
                    turn(lease)
                    await asyncio.sleep(0)
            except EXPECTED as error:
                print(repr(error), file=sys.stderr, flush=True)
    await asyncio.gather(*(work() for _ in range(50)))

def guarded(work):
    try:
        work()
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(3)

threading.excepthook = lambda args: guarded(lambda: (_ for _ in ()).throw(args.exc_value))
guarded(in_threads if mode == "threads" else lambda: asyncio.run(in_tasks()))
"""


@pytest.fixture(params=["sqlite", "redis", "postgres", "serve over sqlite", "serve over redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    server = Redis(tmp_path) if "redis" in request.param else Postgres() if "postgres" in request.param else None
    store = server.url if server else f"sqlite:{tmp_path}/locks.db"
    serve = Serve(store, tmp_path) if "serve" in request.param else None
    yield serve.url if serve else store
    for started in (serve, server):
        if started:
            started.stop()


@pytest.mark.parametrize("mode", ["threads", "tasks"])
def test_counter_is_exact_while_processes_are_killed(url: str, mode: str, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0 0\n")

    errors = tmp_path / "errors"

    def start() -> "subprocess.Popen[bytes]":
        with errors.open("ab") as file:
            return subprocess.Popen([sys.executable, "-c", WORKER, url, str(counter), mode], env=environment(), stderr=file)

    def check() -> None:
        """A worker that has ended by itself has found a violation, or an error."""
        assert all(worker.poll() is None for worker in workers), errors.read_text()

    workers = [start() for _ in range(PROCESSES)]
    killed = 0
    try:
        until(lambda: counter.stat().st_size > 100)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            time.sleep(random.uniform(0.5, 1.5))
            check()
            number = random.randrange(PROCESSES)
            workers[number].kill()
            workers[number].wait()
            workers[number] = start()
            killed += 1
        # The lock of the last one that was killed is free after its ttl.
        size = counter.stat().st_size
        until(lambda: counter.stat().st_size > size)
        check()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    lines = [tuple(map(int, line.split())) for line in counter.read_text().splitlines()]
    numbers, tokens = zip(*lines, strict=True)
    assert list(numbers) == list(range(len(lines)))
    assert all(before < after for before, after in zip(tokens, tokens[1:], strict=False))
    assert killed > 2
    lost = len(errors.read_text().splitlines())
    assert lost < len(lines)
    print(f"{len(lines)} turns, {killed} processes killed, {lost} leases or answers lost")
