"""A client in workers of gunicorn that are forked from a master with --preload, and recycled after a few requests."""

import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from servers import Serve, environment, free_port, until


@pytest.mark.parametrize("kind", ["native", "http"])
def test_workers_are_forked_and_recycled(tmp_path: Path, kind: str) -> None:
    store = f"sqlite:{tmp_path}/locks.db"
    serve = Serve(store, tmp_path) if kind == "http" else None
    counter = tmp_path / "counter"
    counter.write_text("0")
    port = free_port()
    variables = environment(TEST_STORE=serve.url if serve else store, TEST_COUNTER=str(counter))
    command = [sys.executable, "-m", "gunicorn", "recipes.wsgi:app", "--preload", "--workers", "3", "--max-requests", "5"]
    log = (tmp_path / "log").open("wb")
    server = subprocess.Popen([*command, "--bind", f"127.0.0.1:{port}"], env=variables, stdout=log, stderr=log, cwd=tmp_path)
    answers: list[tuple[int, int]] = []

    def get() -> tuple[int, int]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
            value, pid = answer.read().split()
            return int(value), int(pid)

    def is_ready() -> bool:
        assert server.poll() is None, (tmp_path / "log").read_text()
        return b"Booting worker" in (tmp_path / "log").read_bytes()

    def work() -> None:
        for _ in range(10):
            answers.append(get())

    try:
        until(is_ready)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        server.terminate()
        server.wait()
        log.close()
        if serve is not None:
            serve.stop()
    # Nothing was counted twice, and more workers than three have counted.
    assert sorted(value for value, _ in answers) == list(range(1, 41))
    assert len({pid for _, pid in answers}) > 3
