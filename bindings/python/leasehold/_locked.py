"""What decorated functions share: the names of their locks, and that their bodies run under them."""

from __future__ import annotations

import inspect
import string
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, TypeVar

from ._errors import InvalidInput
from ._terms import text

T = TypeVar("T")


def check(name: str, busy: str) -> None:
    """Also that the decorator is called, and does not get the function in place of the name."""
    text(name, "the name of a function's lock")
    if busy not in ("raise", "skip"):
        raise InvalidInput(f"busy is 'raise' or 'skip', not {busy!r}")


def namer(name: str, function: Callable[..., Any], is_async: bool) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
    """How a call's arguments make the name of its lock. Fields that the function does not have are an error now, not at the first call. So is a function
    that is seen to run its body later; `has_run` finds the others."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidInput(f"{_callable_name(function)} is a generator, whose body runs later: take the lock in it")
    if inspect.iscoroutinefunction(function) and not is_async:
        raise InvalidInput(f"{_callable_name(function)} is a coroutine function: decorate it with a client of leasehold.aio")
    fields = [field for _, field, _, _ in string.Formatter().parse(name) if field is not None]
    if not fields:
        constant = name.format()
        return lambda arguments, named: constant
    signature = inspect.signature(function)
    for field in fields:
        first = field.partition(".")[0].partition("[")[0]
        if first not in signature.parameters:
            raise InvalidInput(f"{name!r}: {_callable_name(function)} has no argument {first!r}")

    def name_of(arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        return name.format(**bound.arguments)

    return name_of


def has_run(function: Callable[..., Any], result: T) -> T:
    """The result, unless it is a body that would run after the release: the function may be a wrapper of another one, or an object."""
    # `contextlib.contextmanager` keeps its generator there.
    body = getattr(result, "gen", result)
    if not isinstance(body, Coroutine | Generator | AsyncGenerator):
        return result
    if not isinstance(body, AsyncGenerator):
        body.close()
    raise InvalidInput(f"{_callable_name(function)} returns a {type(result).__name__}, whose body runs after the release: take the lock in it")


def _callable_name(function: Callable[..., Any]) -> str:
    """Objects and partial functions have no name."""
    return getattr(function, "__qualname__", None) or repr(function)
