"""`leasehold.django` in a real project, with its transactions on SQLite."""

import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import django
import pytest
from django.conf import settings

import leasehold
from servers import Redis, environment


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("django")
    (folder / "settings.py").write_text(
        textwrap.dedent(f"""
        SECRET_KEY = "test"
        INSTALLED_APPS = ["django.contrib.contenttypes", "leasehold.django"]
        DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": {str(folder / "app.db")!r}}}}}
        LEASEHOLD = {{"url": {"sqlite:" + str(folder / "locks.db")!r}, "namespace": "shop", "ttl": 5}}
        """)
    )
    sys.path.insert(0, str(folder))
    os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
    django.setup()
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE account (balance INTEGER)")
        cursor.execute("INSERT INTO account VALUES (100)")
    return folder


@pytest.fixture
def other(project: Path) -> Iterator[leasehold.Client]:
    """Another process, as it were."""
    with leasehold.connect(**settings.LEASEHOLD) as client:
        yield client


def balance() -> int:
    """What another connection reads."""
    import sqlite3

    database = sqlite3.connect(settings.DATABASES["default"]["NAME"])
    try:
        return int(database.execute("SELECT balance FROM account").fetchone()[0])
    finally:
        database.close()


def set_balance(value: int) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("UPDATE account SET balance = %s", [value])


def test_transaction_is_committed_before_the_release(other: leasehold.Client) -> None:
    from django.db import transaction

    import leasehold.django as locks

    seen: list[int] = []
    set_balance(1)
    with locks.transaction_lock("account") as lease:
        assert lease.name == "shop:account"
        set_balance(2)
        assert other.lock("account").try_acquire() is None
        # It runs after the commit, and before the release.
        transaction.on_commit(lambda: seen.append(balance()))
        transaction.on_commit(lambda: seen.append(other.lock("account").try_acquire() is None))
        assert balance() == 1
    assert seen == [2, True]
    with other.try_lock("account") as free:
        assert free is not None
    with transaction.atomic(), pytest.raises(RuntimeError):
        with locks.transaction_lock("account"):
            pass


def test_lost_lease_rolls_the_transaction_back(other: leasehold.Client) -> None:
    import leasehold.django as locks

    set_balance(1)
    with pytest.raises(leasehold.LeaseLost), locks.transaction_lock("account", ttl=0.5) as lease:
        set_balance(3)
        other.force_release("account")
        while not lease.is_lost:
            pass
    assert balance() == 1


def test_lock_is_held_until_the_commit_or_the_rollback(other: leasehold.Client) -> None:
    from django.db import transaction

    import leasehold.django as locks

    with transaction.atomic():
        locks.lock_until_commit("account")
        set_balance(4)
        assert other.lock("account").try_acquire() is None
    with other.try_lock("account") as free:
        assert free is not None
        assert balance() == 4
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        locks.lock_until_commit("account")
        set_balance(5)
        raise ZeroDivisionError
    gc.collect()
    with other.lock("account", wait=20):
        assert balance() == 4
    with pytest.raises(RuntimeError, match="transaction"):
        locks.lock_until_commit("account")


def test_lock_outlasts_a_part_of_its_transaction_that_is_rolled_back(other: leasehold.Client) -> None:
    from django.db import transaction

    import leasehold.django as locks

    for is_kept in (True, False):
        with contextlib.suppress(ZeroDivisionError), transaction.atomic():
            with contextlib.suppress(ValueError), transaction.atomic():
                lease = locks.lock_until_commit("account")
                raise ValueError
            gc.collect()
            lease.check()
            assert other.lock("account").try_acquire() is None
            if not is_kept:
                raise ZeroDivisionError
        gc.collect()
        with other.lock("account", wait=20), pytest.raises(leasehold.LeaseLost, match="released"):
            lease.check()


def test_child_process_has_a_client_of_its_own(project: Path, redis_server: Redis) -> None:
    from django.test import override_settings

    import leasehold.django as locks

    try:
        with override_settings(LEASEHOLD={"url": redis_server.url}):
            locks._client_of.cache_clear()
            with locks.client().lock("used in the parent"):
                pass
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    with locks.client().lock("used in the child"):
                        status = 0
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        locks._client_of.cache_clear()


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "django", "with_lock", *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=60)


def test_command_runs_under_a_lock(other: leasehold.Client) -> None:
    done = run("nightly", "check", "--tag", "models")
    assert (done.returncode, "no issues" in done.stdout) == (0, True), done.stderr
    with other.lock("nightly"):
        busy = run("nightly", "check")
        assert (busy.returncode, busy.stdout) == (1, "")
        assert "not granted" in busy.stderr
        skipped = run("--skip", "nightly", "check")
        assert (skipped.returncode, skipped.stdout.split(":")[0]) == (0, "skipped")
    assert run("nightly").returncode == 1


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def test_command_ends_when_its_lock_is_lost(other: leasehold.Client, monkeypatch: pytest.MonkeyPatch, handler: Any) -> None:
    import time

    from django.core.management import CommandError, call_command
    from django.core.management.commands import check

    def lose(self: object, **options: object) -> None:
        other.force_release("nightly")
        for _ in range(3000):
            time.sleep(0.01)
        raise AssertionError

    monkeypatch.setattr(check.Command, "handle", lose)
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(CommandError, match="was lost"):
            call_command("with_lock", "--ttl", "0.5", "nightly", "check", stdout=io.StringIO())
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
