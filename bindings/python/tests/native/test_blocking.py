"""Waits that block: signals, the GIL, the end of the interpreter."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import leasehold

from servers import LIMIT, Redis, until


def run(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python process of its own."""
    return subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    with process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out, err


INTERRUPTED = """
import sys, time, leasehold
client = leasehold.connect(sys.argv[1])
other = leasehold.connect(sys.argv[1])
held = other.lock("a").acquire()
print("waits", flush=True)
try:
    client.lock("a").acquire()
except KeyboardInterrupt:
    print(time.monotonic(), flush=True)
held.release()
other.lock("a").acquire(wait=60).release()
print("free", flush=True)
"""


def test_ctrl_c_interrupts_a_wait_and_leaves_the_queue(tmp_path: Path) -> None:
    delays = []
    for _ in range(3):
        process = run(INTERRUPTED, f"sqlite:{tmp_path}/locks.db")
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        with leasehold.connect(f"sqlite:{tmp_path}/locks.db") as client:
            until(lambda: client.inspect("a").waiters, "nobody waits")
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        code, out, err = outcome(process)
        assert code == 0, err
        interrupted, free = out.split()
        assert free == "free"
        delays.append(float(interrupted) - sent)
    # 100 ms are promised; one of three may meet a stall of the machine.
    assert sorted(delays)[0] < 0.1, delays


HOLDS_GIL = """
import ctypes, os, sys, leasehold
client = leasehold.connect(sys.argv[1])
with client.lock("a", ttl=0.5) as lease:
    # PyDLL keeps the GIL, unlike time.sleep: no Python thread runs for three times the ttl.
    ctypes.PyDLL(None).usleep(1_500_000)
    lease.check()
    print("held", flush=True)
"""


def test_lease_is_kept_while_a_thread_holds_the_gil_for_three_times_the_ttl(tmp_path: Path) -> None:
    code, out, err = outcome(run(HOLDS_GIL, f"sqlite:{tmp_path}/locks.db"))
    assert (code, out) == (0, "held\n"), err


EXIT = """
import sys, threading, time, leasehold
client = leasehold.connect(sys.argv[1])
other = leasehold.connect(sys.argv[1])
held = other.lock("a").acquire()
def wait():
    client.lock("a").acquire()
for _ in range(8):
    threading.Thread(target=wait, daemon=True).start()
while not other.inspect("a").waiters:
    time.sleep(0.01)
kept = client.lock("kept").acquire()
kept.on_lost(print)
print(time.monotonic(), flush=True)
"""


def test_interpreter_ends_while_threads_wait_and_releases_what_it_holds(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/locks.db"
    for _ in range(3):
        code, out, err = outcome(run(EXIT, url))
        assert code == 0, err
        assert "Fatal" not in err and "panicked" not in err
        assert time.monotonic() - float(out.split()[0]) < 30
        with leasehold.connect(url) as client:
            # The ttl is 10 s: they were released, and did not expire.
            began = time.monotonic()
            client.lock_all(["a", "kept"]).acquire(wait=60).release()
            assert time.monotonic() - began < 9


EXIT_ASYNCIO = """
import asyncio, sys, leasehold
async def main():
    global held, task
    client = leasehold.aio.connect(sys.argv[1])
    other = leasehold.aio.connect(sys.argv[1])
    held = await other.lock("a").acquire()
    task = asyncio.create_task(client.lock("a").acquire())
    while not (await other.inspect("a")).waiters:
        await asyncio.sleep(0.001)
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
print("ends", flush=True)
"""


@pytest.mark.parametrize("close", ["", "loop.close()\n"])
def test_interpreter_ends_with_a_pending_task_and_with_a_closed_loop(tmp_path: Path, close: str) -> None:
    code, out, err = outcome(run(EXIT_ASYNCIO + close, f"sqlite:{tmp_path}/locks.db"))
    assert (code, out) == (0, "ends\n"), err
    assert "Fatal" not in err and "panicked" not in err


def test_store_that_does_not_answer_delays_the_exit_by_two_seconds(own_redis: Redis) -> None:
    script = """
import os, signal, sys, time, leasehold
client = leasehold.connect(sys.argv[1])
lease = client.lock("a", ttl=60).acquire()
os.kill(int(sys.argv[2]), signal.SIGSTOP)
print(time.monotonic(), flush=True)
"""
    process = run(script, own_redis.url, str(own_redis.process.pid))
    code, out, err = outcome(process)
    took = time.monotonic() - float(out)
    assert code == 0, err
    # 2 s, and what a busy machine adds; the lease would last 60 s.
    assert took < 20, took
