"""The names of decorated functions' locks."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable
from typing import Any

from ._errors import InvalidInput


def namer(name: str, function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
    """How a call's arguments make the name of its lock. Fields that the function does not have are an error now, not at the first call."""
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
