"""The wait of a program that gevent has patched: it must not block the thread of all greenlets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def call(start: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """As the synchronous call: only this greenlet waits."""
    from gevent import socket  # type: ignore[import-untyped,import-not-found,unused-ignore]

    owner: Any = start
    completions = owner.__self__.completions()
    try:
        operation = start(*arguments, completions=completions)
        while not operation.is_done():
            try:
                socket.wait_read(completions.fileno())
            except BaseException:
                operation.cancel()
                raise
            completions.take()
        return operation.result()
    finally:
        completions.close()
