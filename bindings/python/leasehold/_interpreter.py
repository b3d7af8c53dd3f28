"""Whether this is the main interpreter of its process. mod_wsgi and uWSGI run programs in others, which end before it."""

from __future__ import annotations

import functools
import importlib


@functools.cache
def is_main() -> bool:
    """Only there may a thread be a daemon at the end of the interpreter."""
    for name in ("_interpreters", "_xxsubinterpreters"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        return bool(module.get_current() == module.get_main())
    return True
