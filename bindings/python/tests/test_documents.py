"""The examples of the documents, of the docstrings and of `examples/python` run."""

import ast
import doctest
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import leasehold

from servers import ROOT, Redis, environment, free_port, until

PACKAGE = ROOT / "bindings/python"

DOCUMENTS = {
    PACKAGE / "README.md": PACKAGE / "README.zh-CN.md",
    ROOT / "docs/python.md": ROOT / "docs/zh-CN/python.md",
}

# What examples need beside the package.
OPTIONAL = {"celery", "django", "fastapi", "pytest", "redis"}

ENVIRONMENT = environment(PYTHONWARNINGS="default")


def blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.S | re.M)


EXAMPLES = [(document, number) for document in DOCUMENTS for number in range(len(blocks(document)))]


@pytest.mark.parametrize(("document", "number"), EXAMPLES, ids=lambda value: value.name if isinstance(value, Path) else str(value))
def test_example_runs(document: Path, number: int, redis_server: Redis, tmp_path: Path) -> None:
    source = blocks(document)[number].replace("redis://127.0.0.1", redis_server.url)
    done = subprocess.run([sys.executable, "-c", source], env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning:" not in done.stderr
    for expected in re.findall(r"# (stopped: .*)", source):
        assert expected in done.stdout


def test_translations_have_the_same_code() -> None:
    for document, translation in DOCUMENTS.items():
        assert blocks(document)
        assert blocks(document) == blocks(translation)
    for document in (ROOT / "docs/migration.md", ROOT / "docs/zh-CN/migration.md"):
        assert len(blocks(document)) == 2
        for block in blocks(document):
            ast.parse(block)


def test_links_of_the_documents_lead_somewhere() -> None:
    anchors: dict[Path, set[str]] = {}

    def anchors_of(file: Path) -> set[str]:
        if file not in anchors:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            found = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            anchors[file] = found | set(re.findall(r'<a id="([^"]+)"', file.read_text()))
        return anchors[file]

    own = "https://github.com/leasehold/leasehold/"
    checked = 0
    for document in [*DOCUMENTS, *DOCUMENTS.values(), ROOT / "examples/python/README.md"]:
        for link in re.findall(r"\]\(([^)]+)\)", document.read_text()):
            path, _, anchor = link.partition("#")
            if path.startswith(own):
                target = ROOT / re.sub(r"^(blob|tree)/main/?", "", path.removeprefix(own))
            elif path.startswith("https:"):
                continue
            else:
                target = (document.parent / path).resolve() if path else document
            assert target.exists(), (document, link)
            assert not anchor or anchor in anchors_of(target), (document, link)
            checked += 1
    assert checked > 20


def test_service_of_the_readme_answers_as_the_readme_says(tmp_path: Path) -> None:
    service = next(block for block in blocks(PACKAGE / "README.md") if block.startswith("# main.py"))
    (tmp_path / "main.py").write_text(service)
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "main:app", "--workers", "2", "--port", str(port)]
    log = (tmp_path / "log").open("wb")
    server = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=log, stderr=log)
    answers: list[tuple[int, Any]] = []

    def ship(order: int) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/orders/{order}/ship", method="POST")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answers.append((answer.status, json.loads(answer.read())))
        except urllib.error.HTTPError as error:
            answers.append((error.code, json.loads(error.read())))

    def is_ready() -> bool:
        assert server.poll() is None, (tmp_path / "log").read_text()
        return (tmp_path / "log").read_bytes().count(b"Application startup complete") == 2

    try:
        until(is_ready)
        threads = [threading.Thread(target=ship, args=(42,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        server.terminate()
        server.wait()
        log.close()
    assert [status for status, _ in answers] == [409, 200]
    assert answers[0][1] == {"detail": "the resource is in use"}
    assert answers[1][1]["order"] == 42
    assert answers[1][1]["token"] > 0


def modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(leasehold.__path__, "leasehold."):
        parts = set(found.name.split("."))
        if not parts & {"_native", "django", "_gevent"}:
            yield found.name


@pytest.mark.parametrize("name", ["leasehold", *modules()])
def test_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    with leasehold.connect("memory:") as client:
        names = {**vars(module), "client": client, "leasehold": leasehold}
        result = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_public_api_has_docstrings() -> None:
    for module in (leasehold, importlib.import_module("leasehold.aio")):
        for name in module.__all__:
            thing = getattr(module, name)
            assert thing.__doc__, name
            for attribute, value in vars(thing).items() if isinstance(thing, type) else []:
                if not attribute.startswith("_") and callable(value):
                    assert value.__doc__, f"{name}.{attribute}"


def test_examples_have_the_right_types(tmp_path: Path) -> None:
    """As a type checker of a user sees them."""
    files = [str(example) for example in sorted((ROOT / "examples/python").glob("*.py"))]
    for document, number in EXAMPLES:
        file = tmp_path / f"{document.stem}_{number}.py"
        file.write_text(blocks(document)[number])
        files.append(str(file))
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", *files], env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_examples_exclude_each_other(kind: str, redis_server: Redis, tmp_path: Path) -> None:
    store = redis_server.url if kind == "redis" else f"sqlite:{tmp_path}/locks.db"
    examples = ROOT / "examples/python"
    command = [sys.executable, str(examples / "report.py"), store, str(tmp_path / "report.db")]
    reports = [subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    lines = [line for report in reports for line in report.communicate(timeout=60)[0].splitlines()]
    tokens = [int(line.removeprefix("written with token ")) for line in lines]
    assert len(set(tokens)) == 9
    command = [sys.executable, str(examples / "scheduler.py"), store]
    schedulers = [subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [scheduler.communicate(timeout=60)[0] for scheduler in schedulers]
    assert all(output.startswith("leader with token") for output in outputs)
    ticks = [line for output in outputs for line in output.splitlines() if line.startswith("tick")]
    assert 3 <= len(ticks) <= 8
