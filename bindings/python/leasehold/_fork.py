"""The generation of this process: the number of forks since the interpreter started. Objects of another generation are unusable."""

from __future__ import annotations

import os

from ._errors import ForkedError

generation = 0
"""Increased in each child. An object notes it when it is created, and compares it in each call."""


def _in_child() -> None:
    global generation
    generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def check(created_in: int) -> None:
    """Raises `ForkedError` for an object of an earlier generation."""
    if created_in != generation:
        raise ForkedError("this object belongs to the parent process: call leasehold.connect in the child, after the fork")
