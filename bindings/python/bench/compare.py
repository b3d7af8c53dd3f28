"""Compares leasehold with redis-py, filelock, asyncio.Lock and the library's own blocking API in one run: interleaved rounds, medians, ratios.

Usage: python compare.py [--rounds N] [--seconds N] [--redis PATH of redis-server] [--blocking PATH of the program in blocking.rs]

    cargo build --release -p leasehold-python --example blocking

Rows with a bar say whether it is met; the exit code is 1 if one is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import leasehold
from leasehold import aio

ROOT = Path(__file__).parents[3]
PROCESSES = 8
HOLD = 0.001


def start_redis(program: str, folder: str) -> tuple[subprocess.Popen[bytes], str]:
    path = f"{folder}/redis.sock"
    process = subprocess.Popen([program, "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder], stdout=subprocess.DEVNULL)
    while not Path(path).exists():
        time.sleep(0.01)
    return process, path


def per_pair(work: Callable[[int], None], count: int) -> float:
    """Microseconds of one acquisition with its release."""
    began = time.perf_counter()
    work(count)
    return (time.perf_counter() - began) / count * 1e6


class Pairs:
    """Two ways of doing the same. The ratio is that of the medians over interleaved rounds."""

    def __init__(self, what: str, ours: Callable[[int], None], theirs: Callable[[int], None], count: int, limit: float) -> None:
        self.what, self.ours, self.theirs, self.count, self.limit = what, ours, theirs, count, limit
        self.own_times: list[float] = []
        self.their_times: list[float] = []

    def warm_up(self) -> None:
        self.ours(self.count)
        self.theirs(self.count)

    def round(self) -> None:
        self.own_times.append(per_pair(self.ours, self.count))
        self.their_times.append(per_pair(self.theirs, self.count))

    def report(self) -> bool:
        own, their = statistics.median(self.own_times), statistics.median(self.their_times)
        is_met = own / their <= self.limit
        print(f"{self.what:58} {own:9.1f} µs {their:9.1f} µs  ratio {own / their:6.2f}  <= {self.limit} {verdict(is_met)}")
        return is_met


class Processes:
    """Processes that take one lock again and again, and hold it for 1 ms each time: first those of leasehold, then as many of redis-py."""

    def __init__(self, path: str, seconds: float) -> None:
        self.path, self.seconds = path, seconds
        # Per round: the acquisitions of a second. Of all rounds: the times that acquisitions took, in seconds.
        self.rates: dict[str, list[float]] = {"leasehold": [], "redis-py": []}
        self.waits: dict[str, list[float]] = {"leasehold": [], "redis-py": []}

    def round(self) -> None:
        for library in self.rates:
            command = [sys.executable, __file__, "--worker", library, self.path]
            workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(PROCESSES)]
            for worker in workers:
                assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
            start = time.monotonic() + 0.1
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write(f"{start} {start + self.seconds}\n".encode())
                worker.stdin.flush()
            waits = [wait for worker in workers for wait in json.loads(worker.communicate()[0])]
            self.rates[library].append(len(waits) / self.seconds)
            self.waits[library] += waits

    def report(self) -> bool:
        own, their = (statistics.median(rates) for rates in self.rates.values())
        is_fast = own >= their
        print(f"{'redis: 8 processes on a lock, 1 ms each / redis-py':58} {own:9.0f} /s {their:9.0f} /s  ratio {own / their:6.2f}  >= 1.0 {verdict(is_fast)}")
        own, their = (sorted(waits)[int(0.999 * len(waits))] * 1e3 for waits in self.waits.values())
        limit = PROCESSES * (HOLD * 1e3 + 1.5)
        is_fair = own <= limit
        print(f"{'their longest wait, at the 99.9th percentile':58} {own:9.1f} ms {their:9.1f} ms  ratio {own / their:6.2f}  <= {limit} ms {verdict(is_fair)}")
        longest = [max(waits) * 1e3 for waits in self.waits.values()]
        print(f"{'their longest wait':58} {longest[0]:9.1f} ms {longest[1]:9.1f} ms")
        return is_fast and is_fair


def work_as_process(library: str, path: str) -> None:
    if library == "leasehold":
        lock = leasehold.connect(f"redis+unix://{path}").lock("processes")
    else:
        import redis

        lock = redis.Redis(unix_socket_path=path).lock("processes-of-redis-py", timeout=30)
    with lock:
        pass
    print("ready", flush=True)
    start, end = map(float, input().split())
    time.sleep(max(0.0, start - time.monotonic()))
    waits = []
    while (asked := time.monotonic()) < end:
        with lock:
            if (granted := time.monotonic()) < end:
                waits.append(granted - asked)
                time.sleep(HOLD)
    json.dump(waits, sys.stdout)


def verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def main() -> int:
    import filelock
    import redis
    import redis.asyncio

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round of the processes, which are a third of all rounds")
    parser.add_argument("--redis", default="redis-server")
    parser.add_argument("--blocking", default=str(ROOT / "target/release/examples/blocking"))
    arguments = parser.parse_args()
    if not Path(arguments.blocking).exists():
        parser.error(f"{arguments.blocking} is missing: cargo build --release -p leasehold-python --example blocking")
    with tempfile.TemporaryDirectory() as folder:
        server, path = start_redis(arguments.redis, folder)
        url = f"redis+unix://{path}"
        blocking = subprocess.Popen([arguments.blocking, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            theirs = redis.Redis(unix_socket_path=path)
            ours = leasehold.connect(url)
            ours_on_file = leasehold.connect(f"sqlite:{folder}/locks.db")

            def redis_py(count: int) -> None:
                for _ in range(count):
                    with theirs.lock("theirs", timeout=30):
                        pass

            def library(count: int) -> None:
                assert blocking.stdin is not None and blocking.stdout is not None
                blocking.stdin.write(f"{count}\n".encode())
                blocking.stdin.flush()
                assert blocking.stdout.readline() == b"\n"

            def native(count: int) -> None:
                for _ in range(count):
                    with ours.lock("ours"):
                        pass

            def native_kept(count: int) -> None:
                lock = ours.lock("ours")
                for _ in range(count):
                    with lock:
                        pass

            def file_lock(count: int) -> None:
                for _ in range(count):
                    with filelock.FileLock(f"{folder}/file.lock"):
                        pass

            def sqlite(count: int) -> None:
                for _ in range(count):
                    with ours_on_file.lock("ours"):
                        pass

            loop = asyncio.new_event_loop()
            theirs_async = redis.asyncio.Redis(unix_socket_path=path)
            ours_async = aio.connect(url)

            def redis_asyncio(count: int) -> None:
                async def work() -> None:
                    for _ in range(count):
                        async with theirs_async.lock("theirs-async", timeout=30):
                            pass

                loop.run_until_complete(work())

            def native_asyncio(count: int) -> None:
                async def work() -> None:
                    for _ in range(count):
                        async with ours_async.lock("ours-async"):
                            pass

                loop.run_until_complete(work())

            def tasks(make: Callable[[], object], count: int) -> None:
                async def one() -> None:
                    for _ in range(count // 100):
                        async with make():  # type: ignore[attr-defined]
                            await asyncio.sleep(0)

                async def work() -> None:
                    await asyncio.gather(*(one() for _ in range(100)))

                loop.run_until_complete(work())

            asyncio_lock = asyncio.Lock()
            pairs = [
                Pairs("redis: pair / redis-py", native, redis_py, 300, 1.0),
                Pairs("redis: pair of a kept lock / redis-py", native_kept, redis_py, 300, 1.0),
                Pairs("redis: pair / leasehold::blocking", native, library, 300, 1.25),
                Pairs("redis, asyncio: pair / redis.asyncio", native_asyncio, redis_asyncio, 300, 1.0),
                Pairs("sqlite: pair / filelock", sqlite, file_lock, 200, 3.0),
                Pairs(
                    "redis: 100 tasks of a loop on a lock / asyncio.Lock",
                    lambda count: tasks(lambda: ours_async.lock("many"), count),
                    lambda count: tasks(lambda: asyncio_lock, count),
                    2_000,
                    10.0,
                ),
            ]
            for contest in pairs:
                contest.warm_up()
            processes = Processes(path, arguments.seconds)
            for number in range(arguments.rounds):
                for contest in pairs:
                    contest.round()
                if number % 3 == 0:
                    processes.round()
            results = [contest.report() for contest in [*pairs, processes]]
            loop.run_until_complete(ours_async.close())
            loop.run_until_complete(theirs_async.aclose())
            loop.close()
            ours.close()
            ours_on_file.close()
            theirs.close()
            return 0 if all(results) else 1
        finally:
            blocking.kill()
            blocking.wait()
            server.kill()
            server.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work_as_process(sys.argv[2], sys.argv[3])
    else:
        sys.exit(main())
