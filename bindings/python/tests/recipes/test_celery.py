"""`leasehold.celery` in real workers of Celery, with Redis as the broker and the store."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers import Redis, environment, until


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("celery")
    redis = Redis(folder)
    os.environ |= {
        "TEST_BROKER": f"redis+socket://{redis.socket}",
        "TEST_STORE": redis.url,
        "TEST_NOTES": str(folder / "notes"),
    }
    (folder / "notes").touch()
    command = [sys.executable, "-m", "celery", "-A", "recipes.jobs", "worker", "--concurrency", "3", "--max-tasks-per-child", "4"]
    with (folder / "worker.log").open("wb") as log:
        worker = subprocess.Popen([*command, "-l", "INFO"], env=environment(), stdout=log, stderr=log, cwd=folder)
    from . import jobs

    def is_ready() -> bool:
        assert worker.poll() is None, (folder / "worker.log").read_text()
        return b" ready." in (folder / "worker.log").read_bytes()

    until(is_ready)
    yield jobs
    worker.terminate()
    worker.wait()
    redis.stop()


def notes() -> list[str]:
    return [line.rsplit(" ", 1)[0] for line in Path(os.environ["TEST_NOTES"]).read_text().splitlines()]


def test_tasks_of_one_name_run_one_at_a_time_also_a_message_that_is_delivered_twice(jobs: Any) -> None:
    results = [jobs.report.apply_async((1,), task_id=f"same-{number // 2}") for number in range(8)]
    results.append(jobs.report.delay(2))
    tokens = [result.get(timeout=60) for result in results]
    until(lambda: notes().count("end 1") == 8)
    words = [word for word in notes() if word.endswith(" 1")]
    assert words == 8 * ["begin 1", "end 1"]
    assert len(set(tokens)) >= 5
    # Children that have done their tasks were replaced, and connect anew.
    pids = {line.rsplit(" ", 1)[1] for line in Path(os.environ["TEST_NOTES"]).read_text().splitlines()}
    assert len(pids) > 1


def test_busy_task_can_be_skipped(jobs: Any) -> None:
    running = jobs.report.delay(3, seconds=3)
    until(lambda: "begin 3" in notes())
    assert jobs.skipping.delay(3).get(timeout=30) is None
    assert running.get(timeout=30) > 0
    assert jobs.skipping.delay(3).get(timeout=30) == "done"


def test_task_at_its_hard_time_limit_frees_its_lock_after_the_ttl(jobs: Any) -> None:
    result = jobs.endless.delay()
    until(lambda: "begin endless" in notes())
    with pytest.raises(Exception, match="TimeLimitExceeded"):
        result.get(timeout=60)
    began = time.monotonic()
    with jobs.client.lock("endless", wait=30):
        assert time.monotonic() - began < 20


def test_arguments_are_checked_when_the_task_is_called(jobs: Any) -> None:
    with pytest.raises(TypeError):
        jobs.report.delay()
