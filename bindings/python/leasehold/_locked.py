"""The names of decorated functions' locks."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable
from typing import Any

from ._errors import InvalidInput
from ._terms import text


def check(name: str, busy: str) -> None:
    """Also that the decorator is called, and does not get the function in place of the name."""
    text(name, "the name of a function's lock")
    if busy not in ("raise", "skip"):
        raise InvalidInput(f"busy is 'raise' or 'skip', not {busy!r}")


def namer(name: str, function: Callable[..., Any], is_async: bool) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
    """How a call's arguments make the name of its lock. Fields that the function does not have are an error now, not at the first call. So is a function
    whose call does not run its body, because that would run without the lock."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidInput(f"{function.__qualname__} is a generator, whose body runs later: take the lock in it")
    if inspect.iscoroutinefunction(function) and not is_async:
        raise InvalidInput(f"{function.__qualname__} is a coroutine function: decorate it with a client of leasehold.aio")
    fields = [field for _, field, _, _ in string.Formatter().parse(name) if field is not None]
    if not fields:
        constant = name.format()
        return lambda arguments, named: constant
    signature = inspect.signature(function)
    for field in fields:
        first = field.partition(".")[0].partition("[")[0]
        if first not in signature.parameters:
            raise InvalidInput(f"{name!r}: {function.__qualname__} has no argument {first!r}")

    def name_of(arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        return name.format(**bound.arguments)

    return name_of
