"""``manage.py with_lock NAME COMMAND …``: runs a command of ``manage.py`` under a lock."""

from __future__ import annotations

import _thread
import argparse
import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError

from leasehold import LeaseLost, Timeout
from leasehold.django import client


@contextlib.contextmanager
def interruptible(losses: list[str]) -> Iterator[None]:
    """Where SIGINT is ignored, as in a shell's background job, a loss interrupts the main thread nevertheless. The signal itself stays ignored."""

    def interrupted(*_: Any) -> None:
        if losses:
            raise KeyboardInterrupt

    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if not is_ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class Command(BaseCommand):  # type: ignore[misc]
    help = "Runs another command while it holds a lock. If the lock is not granted, it ends with status 1; with --skip, with status 0."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", help="the lock")
        parser.add_argument("--wait", type=float, default=0.0, help="how many seconds to wait for the lock (0)")
        parser.add_argument("--ttl", type=float, default=None, help="after how many seconds the lock of a crashed process is free")
        parser.add_argument("--skip", action="store_true", help="a lock that is not granted is no error")
        parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")

    def handle(self, *arguments: Any, **options: Any) -> None:
        if not options["command"]:
            raise CommandError("with_lock NAME COMMAND …: the command is missing")
        name = options["name"]
        try:
            lease = client().lock(name, wait=options["wait"], ttl=options["ttl"]).acquire()
        except Timeout as error:
            if options["skip"]:
                self.stdout.write(f"skipped: {error}")
                return
            raise CommandError(str(error)) from error
        losses: list[str] = []

        def stop(reason: str) -> None:
            losses.append(reason)
            _thread.interrupt_main()

        try:
            with lease, interruptible(losses):
                # The command must not go on without the lock.
                lease.on_lost(stop)
                call_command(*options["command"])
        except (KeyboardInterrupt, LeaseLost) as error:
            if isinstance(error, KeyboardInterrupt) and not losses:
                raise
            raise CommandError(f"the lock {name!r} was lost while the command ran") from error
