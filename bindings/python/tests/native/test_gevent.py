"""A program that gevent has patched: a wait blocks its greenlet alone."""

from __future__ import annotations

from pathlib import Path

from servers import Redis

from .test_blocking import outcome, run

SCRIPT = """
from gevent import monkey
monkey.patch_all()
import sys, gevent, leasehold
client = leasehold.connect(sys.argv[1])
other = leasehold.connect(sys.argv[1])
events = []
def holder():
    with client.lock("a"):
        events.append("held")
        for _ in range(10):
            gevent.sleep(0.01)
        events.append("done")
def waiter():
    with client.lock("a"):
        events.append("granted")
def ticker():
    while "granted" not in events:
        events.append("tick")
        gevent.sleep(0.01)
first = gevent.spawn(holder)
while "held" not in events:
    gevent.sleep(0.001)
others = [gevent.spawn(waiter), gevent.spawn(ticker)]
gevent.joinall([first, *others], raise_error=True, timeout=60)
assert events.index("done") < events.index("granted")
# The ticker has run while the waiter has waited.
assert events[:events.index("granted")].count("tick") >= 2, events
late = gevent.spawn(other.lock("b").acquire)
late.join(60)
cancelled = gevent.spawn(client.lock("b").acquire)
while not client.inspect("b").waiters:
    gevent.sleep(0.001)
cancelled.kill()
late.value.release()
client.lock("b").acquire(wait=60).release()
print("fine")
"""


def test_wait_blocks_one_greenlet(tmp_path: Path) -> None:
    code, out, err = outcome(run(SCRIPT, f"sqlite:{tmp_path}/locks.db"))
    assert (code, out) == (0, "fine\n"), err


BUSY = """
from gevent import monkey
monkey.patch_all()
import sys, time, gevent, leasehold
client = leasehold.connect(sys.argv[1], ttl=3600)
end = time.monotonic() + 5
def work(number):
    while time.monotonic() < end:
        with client.lock(f"a {number}"):
            pass
gevent.joinall([gevent.spawn(work, number) for number in range(6)], raise_error=True, timeout=60)
assert time.monotonic() < end + 30, "a greenlet was not woken"
print("fine")
"""


def test_answer_that_comes_during_a_call_is_not_missed(redis_server: Redis) -> None:
    code, out, err = outcome(run(BUSY, redis_server.url))
    assert (code, out) == (0, "fine\n"), err
