"""Compares leasehold with redis-py, filelock and asyncio.Lock in one run: interleaved rounds, medians, ratios.

Usage: python compare.py [--rounds N] [--redis PATH of redis-server]. Rows with a bar say whether it is met; the exit code is 1 if one is not.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import leasehold
from leasehold import aio


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


class Contest:
    """Two ways of doing the same. The ratio is that of the medians over interleaved rounds."""

    def __init__(self, what: str, ours: Callable[[int], None], theirs: Callable[[int], None], count: int, bar: str, limit: float) -> None:
        self.what, self.ours, self.theirs, self.count, self.bar, self.limit = what, ours, theirs, count, bar, limit
        self.own_times: list[float] = []
        self.their_times: list[float] = []

    def round(self) -> None:
        self.own_times.append(per_pair(self.ours, self.count))
        self.their_times.append(per_pair(self.theirs, self.count))

    def report(self) -> bool:
        own, their = statistics.median(self.own_times), statistics.median(self.their_times)
        is_met = own / their <= self.limit
        print(f"{self.what:58} {own:9.1f} µs {their:9.1f} µs  ratio {own / their:6.2f}  {self.bar} {'met' if is_met else 'MISSED'}")
        return is_met


def main() -> int:
    import filelock
    import redis
    import redis.asyncio

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--redis", default="redis-server")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server, path = start_redis(arguments.redis, folder)
        try:
            contests = []
            theirs = redis.Redis(unix_socket_path=path)
            ours = leasehold.connect(f"redis+unix://{path}")
            ours_on_file = leasehold.connect(f"sqlite:{folder}/locks.db")

            def redis_py(count: int) -> None:
                for _ in range(count):
                    with theirs.lock("theirs", timeout=30):
                        pass

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
            ours_async = aio.connect(f"redis+unix://{path}")

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
            contests = [
                Contest("redis: pair / redis-py", native, redis_py, 300, "<= 1.0", 1.0),
                Contest("redis: pair of a kept lock / redis-py", native_kept, redis_py, 300, "<= 1.0", 1.0),
                Contest("redis, asyncio: pair / redis.asyncio", native_asyncio, redis_asyncio, 300, "<= 1.0", 1.0),
                Contest("sqlite: pair / filelock", sqlite, file_lock, 200, "<= 3", 3.0),
                Contest(
                    "redis: 100 tasks of a loop on a lock / asyncio.Lock",
                    lambda count: tasks(lambda: ours_async.lock("many"), count),
                    lambda count: tasks(lambda: asyncio_lock, count),
                    2_000,
                    "<= 10",
                    10.0,
                ),
            ]
            for contest in contests:
                contest.round()
                contest.own_times.clear()
                contest.their_times.clear()
            for _ in range(arguments.rounds):
                for contest in contests:
                    contest.round()
            results = [contest.report() for contest in contests]
            loop.run_until_complete(ours_async.close())
            loop.run_until_complete(theirs_async.aclose())
            loop.close()
            ours.close()
            ours_on_file.close()
            theirs.close()
            return 0 if all(results) else 1
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    sys.exit(main())
