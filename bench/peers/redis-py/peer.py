"""Locks of Python as peers of the benchmark; bench/peers/README.md says what the orders mean.

Without an argument redis-py's Lock, with a thread per task, and a connection for each, as its documentation has it. With an argument the lock of another
library: pottery or python-redis-lock, which are over redis-py, or leasehold.
"""

import importlib.metadata
import json
import os
import platform
import socket
import struct
import sys
import threading
import time


class RedisPy:
    """redis-py's Lock, which polls every 100 ms; tuned, every 5 ms."""

    def __init__(self, client, name, ttl, is_tuned):
        polling = {"sleep": 0.005} if is_tuned else {}
        self.lock = client.lock(name, timeout=ttl, **polling)
        self.release, self.owned = self.lock.release, self.lock.owned

    def acquire(self, _):
        self.lock.acquire()

    def token(self):
        return 0


class Pottery:
    """pottery's Redlock with one master, which polls after up to 200 ms."""

    def __init__(self, client, name, ttl, _):
        import pottery

        self.lock = pottery.Redlock(key=name, masters={client}, auto_release_time=ttl, num_extensions=1_000_000)
        self.error = pottery.PotteryError

    def acquire(self, _):
        self.guarded(self.lock.acquire)

    def release(self):
        self.guarded(self.lock.release)

    def owned(self):
        return self.lock.locked() > 0

    def token(self):
        return 0

    def guarded(self, step):
        try:
            step()
        except self.error as error:
            raise redis.RedisError(repr(error)) from error


class PythonRedisLock:
    """python-redis-lock's Lock, whose waiters wait for an element of a list."""

    def __init__(self, client, name, ttl, _):
        import redis_lock

        self.lock = redis_lock.Lock(client, name, expire=int(ttl))
        self.error = RuntimeError

    acquire, release, token, guarded = Pottery.acquire, Pottery.release, Pottery.token, Pottery.guarded

    def owned(self):
        return self.lock._held


class Leasehold:
    """leasehold's mutex, whose waiters are granted in their order. It is renewed."""

    def __init__(self, client, name, ttl, _):
        self.lock = client.lock(name, ttl=ttl)
        self.lease = None

    def acquire(self, until_ns):
        """A wait ends with the run."""
        self.lease = self.lock.acquire(wait=until_ns and max(0, until_ns - time.monotonic_ns()) / 1e9)

    def release(self):
        self.lease.release()

    def owned(self):
        return not self.lease.is_lost

    def token(self):
        return self.lease.token


LOCKS = {"redis-py": RedisPy, "pottery": Pottery, "python-redis-lock": PythonRedisLock, "leasehold": Leasehold}
LIBRARY = sys.argv[1] if len(sys.argv) > 1 else "redis-py"

if LIBRARY == "leasehold":
    import leasehold

    FAILURE = leasehold.Error
else:
    import redis

    FAILURE = redis.RedisError


class Client:
    """One client of the library. Those over redis-py have a pool of their own, which has as many connections as there are threads."""

    def __init__(self, order):
        if LIBRARY == "leasehold":
            self.client = leasehold.connect(order["urls"][0])
            self.client.list()
        elif len(order["urls"]) > 1:
            raise ValueError(f"{LIBRARY} is measured with one server")
        else:
            # It allows 100 connections unless told otherwise, and fails when a thread more wants one.
            self.client = redis.Redis.from_url(order["urls"][0], max_connections=2_000 if order["clients"] == 1 else 1)
            self.client.ping()
        self.ttl = order["ttl_ms"] / 1000

    def lock(self, order, name):
        if order["lock"] != "mutex":
            raise ValueError(f"{LIBRARY} has only a mutex here")
        return LOCKS[LIBRARY](self.client, name, self.ttl, order["is_tuned"])

    def left(self):
        """Holders and waiters in the store."""
        return sum(len(lock.holders) + len(lock.waiters) for lock in self.client.list())


class Course:
    """What the threads of one run share."""

    def __init__(self, order):
        self.order = order
        self.is_over = False
        self.failures = 0
        self.failure = None
        self.inside = 0
        self.guard = threading.Lock()
        self.acquisitions = []
        self.counter = os.open(order["counter"], os.O_RDWR) if order["counter"] else None

    def failed(self, error):
        with self.guard:
            self.failures += 1
            self.failure = self.failure or str(error)
        time.sleep(0.001)

    def section(self):
        if self.counter is not None:
            (count,) = struct.unpack("<Q", os.pread(self.counter, 8, 0))
        if self.order["hold_us"]:
            time.sleep(self.order["hold_us"] / 1e6)
        if self.counter is not None:
            os.pwrite(self.counter, struct.pack("<Q", count + 1), 0)

    def acquire_until_end(self, lock, task):
        order, now = self.order, time.monotonic_ns
        time.sleep(max(0, order["start_ns"] - now()) / 1e9)
        count = 0
        while now() < order["end_ns"] and (order["max_acquisitions"] == 0 or count < order["max_acquisitions"]):
            asked = now()
            try:
                lock.acquire(order["end_ns"])
            except TimeoutError:
                break
            except FAILURE as error:
                self.failed(error)
                continue
            # The run may be over, and its log written.
            if self.is_over:
                return
            entered = now()
            with self.guard:
                self.inside += 1
            self.section()
            left = now()
            try:
                lock.release()
            except FAILURE as error:
                self.failed(error)
            self.acquisitions.append((task, 0, asked, entered, left, now()))
            with self.guard:
                self.inside -= 1
            count += 1


class Contender:
    """One thread that takes a lock again and again, and reports every section to the resource."""

    def __init__(self, order, lock, task):
        self.order, self.lock, self.task = order, lock, task
        self.stream = socket.socket(socket.AF_UNIX)
        self.stream.connect(order["resource"])
        self.lines = self.stream.makefile("r")
        self.stream.sendall(f"worker {task} {os.getpid()}\n".encode())

    def tell(self, event, moment=None, rest=""):
        moment = time.monotonic_ns() if moment is None else moment
        self.stream.sendall(f"{event} {moment} {rest}".strip().replace("\n", " ").encode() + b"\n")

    def ask(self, event, moment):
        self.tell(event, moment, str(self.lock.token()))
        if not self.lines.readline():
            raise ConnectionError("the resource is gone")

    def run(self):
        order, number = self.order, 0
        while time.monotonic_ns() < order["end_ns"]:
            part = lambda a, b: (number * a + self.task * b + order["seed"]) % 100
            is_long = part(41, 53) < order["long_percent"]
            hold_us = order["long_us"] if is_long else order["hold_us"] * (part(37, 61) + 1) // 100
            self.tell("want")
            self.take()
            self.section(hold_us)
            self.tell("leave")
            try:
                self.lock.release()
                self.tell("done")
            except FAILURE as error:
                self.tell("kept", rest=str(error))
            time.sleep(order["hold_us"] * part(29, 17) / 100 / 1e6)
            number += 1
        self.tell("end")
        self.stream.close()

    def take(self):
        while True:
            try:
                self.lock.acquire(None)
                return
            except FAILURE as error:
                self.tell("fail", rest=str(error))
                time.sleep(0.005)

    def check(self):
        """A time at which the lock was still held; none if it is lost. The libraries over redis-py ask the server."""
        moment = time.monotonic_ns()
        try:
            if self.lock.owned():
                return moment
        except FAILURE:
            pass
        self.tell("lost")
        return None

    def section(self, left):
        moment = self.check()
        if moment is None:
            return
        self.ask("begin", moment)
        while left > 0:
            step = min(left, self.order["step_us"])
            time.sleep(step / 1e6)
            left -= step
            moment = self.check()
            if moment is None:
                return
            self.tell("held", moment)
        # The lock was checked, and the write is on its way.
        time.sleep(self.order["write_us"] / 1e6)
        self.ask("write", moment)


class Peer:
    """Its clients, and what `hold` took."""

    def __init__(self):
        self.clients = []
        self.held = []

    def open(self, order):
        self.close(order)
        self.clients = [Client(order) for _ in range(order["clients"])]
        return {}

    def close(self, _):
        for client in self.clients:
            client.client.close()
        self.clients, self.held = [], []
        return {}

    def lock(self, order, number, name):
        return self.clients[number % len(self.clients)].lock(order, name)

    def run(self, order):
        course = Course(order)
        threads = []
        for number in range(order["tasks"]):
            name = f"{order['name']}:{number}" if order["own_names"] else order["name"]
            work = (self.lock(order, number, name), order["first_task"] + number)
            threads.append(threading.Thread(target=course.acquire_until_end, args=work, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0, order["end_ns"] - time.monotonic_ns()) / 1e9)
        limit = time.monotonic() + 0.5
        while course.inside > 0 and time.monotonic() < limit:
            time.sleep(0.001)
        course.is_over = True
        with open(order["log"], "wb") as log:
            log.write(b"".join(struct.pack("<IIQQQQ", *acquisition) for acquisition in list(course.acquisitions)))
        # There is no way to call back an attempt over redis-py.
        is_spent = any(thread.is_alive() for thread in threads)
        return {"failures": course.failures, "failure": course.failure, "is_spent": is_spent}

    def hold(self, order):
        for number in range(order["count"]):
            name = order["name"] if order["count"] == 1 else f"{order['name']}:{number}"
            lock = self.lock(order, number, name)
            lock.acquire(None)
            self.held.append(lock)
        return {}

    def contend(self, order):
        threads = []
        for number in range(order["tasks"]):
            lock = self.lock({**order, "is_tuned": False}, number, order["name"])
            contender = Contender(order, lock, order["first_task"] + number)
            threads.append(threading.Thread(target=contender.run, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {}

    def left(self, _):
        return {"left": self.clients[0].left()} if LIBRARY == "leasehold" else {}

    def still_held(self, _):
        return {"held": sum(lock.owned() for lock in self.held)}


def main():
    peer = Peer()
    orders = {
        "open": peer.open,
        "run": peer.run,
        "hold": peer.hold,
        "contend": peer.contend,
        "left": peer.left,
        "held": peer.still_held,
        "close": peer.close,
    }
    version = importlib.metadata.version("redis" if LIBRARY == "redis-py" else LIBRARY)
    name = "leasehold (Python)" if LIBRARY == "leasehold" else LIBRARY
    hello = {"library": f"{name} {version}", "runtime": f"CPython {platform.python_version()}"}
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        try:
            order = json.loads(line)
            if order["order"] not in orders:
                raise ValueError(f"no order is called {order['order']!r}")
            answer = orders[order["order"]](order)
        except Exception as error:  # Whatever it is, the driver hears of it, and the next order may do better.
            answer = {"error": str(error) or repr(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
