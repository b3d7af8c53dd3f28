"""Tasks of Celery that run one at a time, over all workers.

    client = leasehold.connect("redis://127.0.0.1")

    @app.task(bind=True, acks_late=True)
    @one_at_a_time(client, "report:{user_id}", busy="retry")
    def report(self, user_id):
        leasehold.current().check()     # before each write
        ...

The client connects in the worker's child processes, at its first use. A task at its hard time limit is killed with its process, and a task whose worker loses
power just ends: the lock is free after its ``ttl``. A message that is delivered once more while its task still runs finds the lock held. One that is delivered after
that runs again: let the task refuse it by what it has written, as Celery asks of all tasks with ``acks_late``.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ._errors import Timeout, Unavailable
from ._locked import has_run, namer

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from ._client import Client
    from ._kinds import MutexOptions
    from ._terms import Seconds

T = TypeVar("T")


def one_at_a_time(
    client: Client,
    name: str,
    *,
    busy: Literal["retry", "skip"] = "retry",
    wait: Seconds = 0.0,
    ttl: Seconds | None = None,
    countdown: float = 5.0,
    max_retries: int | None = None,
    **options: Unpack[MutexOptions],
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorates the function of a task with ``bind=True``. ``name`` has the function's arguments in braces.

    If the lock is not granted within ``wait`` seconds, the task is retried after ``countdown`` seconds, at most ``max_retries`` times (None: without a limit), or
    with ``busy="skip"`` it returns None. It is retried as well if the store does not answer.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        name_of = namer(name, function, is_async=False)

        @functools.wraps(function)
        def locked(task: Any, *arguments: Any, **named: Any) -> T:
            lock = client.lock(name_of((task, *arguments), named), wait=wait, ttl=ttl, **options)
            try:
                lease = lock.acquire()
            except (Timeout, Unavailable) as error:
                if busy == "skip" and isinstance(error, Timeout):
                    return None  # type: ignore[return-value]
                # A busy lock is no failure of the task, so its own limit of retries does not count.
                raise task.retry(countdown=countdown, max_retries=_UNLIMITED if max_retries is None else max_retries) from error
            with lease:
                return has_run(function, function(task, *arguments, **named))

        # Celery checks the arguments of calls by it.
        locked.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return locked

    return decorate


# Celery takes None for the task's own limit.
_UNLIMITED = 2**31
