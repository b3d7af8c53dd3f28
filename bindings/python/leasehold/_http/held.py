"""Leases that were granted: what is known of each, and the task that renews all leases of a client."""

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from .. import _interpreter
from .._errors import Error
from .api import Answer
from .clock import now

# The most ids of a request, in number and in bytes.
MAX_IDS = 500
MAX_IDS_SIZE = 200_000

# The pause after a renewal that was not confirmed. A short lease is asked for again sooner.
RETRY_PAUSE = 1.0

# How long a server may take to answer a renewal.
MAX_RENEWAL = 5.0

# The loop's clock may stand still while the host sleeps. So no sleep is longer, and a lease that ended meanwhile is noticed.
MAX_SLEEP = 1.0


class Status(Enum):
    HELD = auto()
    LOST = auto()
    # Released or detached.
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease of one lock."""

    id: str
    kind: str
    name: str
    token: int
    # The time until which it may be trusted.
    valid_until: float


def grant_of(content: dict[str, object], sent: float, ttl: float) -> Grant:
    """Reads a grant, of which the token is a text because others than Python read numbers as floats."""
    return Grant(
        id=str(content["lease"]),
        kind=str(content["kind"]),
        name=str(content["name"]),
        token=int(str(content["token_text"])),
        valid_until=_end_of(content, sent, ttl),
    )


def _end_of(content: dict[str, object], sent: float, ttl: float) -> float:
    """The time until which a lease may be trusted: it counts from when the request was sent, which may have waited. No server makes it last longer than
    was asked for."""
    lifetime = float(str(content["expires_in_ms"])) / 1000
    if not 0 <= lifetime < math.inf:
        raise ValueError("no time")
    return min(sent + lifetime, now() + ttl)


class Held:
    """The state of a lease, or of those of a set of locks. Its methods may be called by any thread."""

    def __init__(self, grants: list[Grant], ttl: float, *, is_renewed: bool, ends_at: float | None) -> None:
        self.grants = grants
        self.ttl = ttl
        self.is_renewed = is_renewed
        # The end of its maximum hold.
        self.ends_at = ends_at
        self.next_renewal = min(grant.valid_until for grant in grants) - ttl * 2 / 3
        # Why the last renewal was not confirmed.
        self.error: str | None = None
        # The result of the release, once that has begun. Only the runtime's thread uses it.
        self.released: asyncio.Future[None] | None = None
        self.valid_until = min(grant.valid_until for grant in grants)
        self._status = Status.HELD
        self._reason: str | None = None
        self._message = ""
        self._lock = threading.Lock()
        self._watchers: list[asyncio.Future[str | None]] = []

    @property
    def what(self) -> str:
        names = ", ".join(repr(grant.name) for grant in self.grants)
        return f"{self.grants[0].kind} {names}"

    @property
    def status(self) -> Status:
        return self._status

    def deadline(self) -> float:
        """The time at which the lease ends unless it is renewed."""
        return self.valid_until if self.ends_at is None else min(self.valid_until, self.ends_at)

    def remaining(self) -> float:
        self.check_time()
        return max(0.0, self.deadline() - now()) if self._status is Status.HELD else 0.0

    def loss(self) -> tuple[str, str] | None:
        """The reason and the message."""
        self.check_time()
        return None if self._reason is None else (self._reason, self._message)

    def check_time(self) -> None:
        """A lease whose time is over is lost, also if the thread that renews it has not run since."""
        time = now()
        if self._status is not Status.HELD or time < self.deadline():
            return
        if self.ends_at is not None and time >= self.ends_at and self.ends_at <= self.valid_until:
            self.lose("max_hold", f"{self.what}: the lease has reached its maximum hold")
        else:
            why = f": {self.error}" if self.error else "" if self.is_renewed else ": it is not renewed automatically"
            self.lose("expired", f"{self.what}: the lease was not renewed in time{why}")

    def lose(self, reason: str, message: str) -> bool:
        """Whether it was held."""
        with self._lock:
            if self._status is not Status.HELD:
                return False
            self._reason, self._message = reason, message
            self._status = Status.LOST
            return True

    def end(self) -> bool:
        """The holder gives it up. Whether it was held."""
        self.check_time()
        with self._lock:
            was_held = self._status is Status.HELD
            if was_held:
                self._status = Status.ENDED
            return was_held

    def extend(self, valid_until: float) -> None:
        """A renewal was confirmed. It does not bring back a lease whose time was over."""
        self.check_time()
        with self._lock:
            if self._status is Status.HELD:
                self.valid_until = max(self.valid_until, valid_until)

    # Those below are called by the runtime's thread.

    async def lost(self) -> str | None:
        """Waits for the end of the lease: the reason of its loss, or None if its holder ended it."""
        self.check_time()
        if self._status is Status.HELD:
            watcher: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
            self._watchers.append(watcher)
            try:
                return await watcher
            finally:
                if watcher in self._watchers:
                    self._watchers.remove(watcher)
        return self._reason

    def notify(self) -> None:
        """Wakes those that wait for the end, if it has ended."""
        if self._status is not Status.HELD:
            watchers, self._watchers = self._watchers, []
            for watcher in watchers:
                if not watcher.done():
                    watcher.set_result(self._reason)


# Sends ids of leases to a path, with the limit of a request, and the time after which it is not repeated.
Send = Callable[[str, list[str], float, float | None], Awaitable[Answer]]


class Renewals:
    """Renews the leases of a client, all that are due by one request. Runs in the runtime's thread while there are leases."""

    def __init__(self, send: Send, release: Callable[[Held], object]) -> None:
        self._send = send
        # Of a lease at its maximum hold, which the server does not know.
        self._release = release
        self._held: set[Held] = set()
        self._in_flight: set[Held] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, held: Held) -> None:
        self._held.add(held)
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def discard(self, held: Held) -> None:
        self._held.discard(held)
        held.notify()
        self._wake.set()

    def take_all(self) -> list[Held]:
        held = list(self._held)
        self._held.clear()
        self._wake.set()
        return held

    async def _run(self) -> None:
        while self._held:
            time = now()
            for held in list(self._held):
                held.check_time()
                if held.status is not Status.HELD:
                    self._end(held)
            idle = [held for held in self._held if held.is_renewed and held not in self._in_flight]
            if any(held.next_renewal <= time for held in idle):
                # All that were not renewed just now go along, so that they stay together.
                due = [held for held in idle if held.next_renewal <= time + held.ttl / 4]
                for batch in batches(due):
                    self._renew_in_background(batch)
                continue
            times = [held.deadline() for held in self._held] + [held.next_renewal for held in idle]
            rest = min([MAX_SLEEP, *(then - time for then in times)])
            self._wake.clear()
            try:
                async with asyncio.timeout(max(rest, 0.001)):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _renew_in_background(self, batch: list[Held]) -> None:
        """Several batches may be in flight: a server that does not answer delays only those that it was asked for."""
        self._in_flight.update(batch)
        task = asyncio.get_running_loop().create_task(self.renew(batch))
        self._tasks.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._in_flight.difference_update(batch)
            self._wake.set()

        task.add_done_callback(end)

    async def renew(self, batch: list[Held]) -> None:
        """Renews the leases, and notes what has become of each. Raises nothing."""
        ids = [grant.id for held in batch for grant in held.grants]
        # Half of the time that is left: the other half is for another server.
        left = min(held.deadline() for held in batch) - now()
        limit = min(max(left / 2, 0.05), MAX_RENEWAL)
        try:
            # Each server is asked once. What to do after that depends on the lease.
            answer = await self._send("/v1/leases/renew", ids, limit, now())
            outcomes = iter(answer.content["leases"])
            results = [[next(outcomes) for _ in held.grants] for held in batch]
            for held, result in zip(batch, results, strict=True):
                _note(held, result, answer.sent)
        except Error as error:
            for held in batch:
                _retry(held, str(error))
        except (KeyError, TypeError, ValueError, StopIteration):
            for held in batch:
                _retry(held, "the server's answer is not understood")
        for held in batch:
            if held.status is not Status.HELD:
                self._end(held)

    def _end(self, held: Held) -> None:
        loss = held.loss()
        if loss is not None:
            reason, message = loss
            if reason == "max_hold":
                self._release(held)
            _log(f"lease lost: {message}")
        self.discard(held)


def _log(message: str) -> None:
    """Logs in the package's thread: a handler may take as long as it likes, and this thread renews."""
    from .. import _reporter

    if _interpreter.is_main():
        _reporter.log(logging.WARNING, message)
    else:
        _reporter.logger.warning("%s", message)


def _note(held: Held, outcomes: list[dict[str, object]], sent: float) -> None:
    if all(outcome["outcome"] == "renewed" for outcome in outcomes):
        held.extend(min(_end_of(outcome, sent, held.ttl) for outcome in outcomes))
        held.error = None
        held.next_renewal = sent + held.ttl / 3
        return
    for outcome in outcomes:
        if outcome["outcome"] == "ended":
            held.lose("gone", f"{held.what}: {outcome.get('detail')}")
            return
    _retry(held, "; ".join(str(outcome["detail"]) for outcome in outcomes if outcome["outcome"] != "renewed"))


def _retry(held: Held, error: str) -> None:
    if held.error is None:
        _log(f"{held.what}: the lease was not renewed, which is tried again: {error}")
    held.error = error
    held.next_renewal = now() + min(RETRY_PAUSE, held.ttl / 12)


def batches(all_held: Iterable[Held]) -> Iterator[list[Held]]:
    """Leases that fit into one request. One that lasts briefly can't wait for as long as one that lasts long: they go in order of their ttl."""
    batch: list[Held] = []
    count = size = 0
    for held in sorted(all_held, key=lambda held: held.ttl):
        more = sum(len(grant.id) + 4 for grant in held.grants)
        if batch and (count + len(held.grants) > MAX_IDS or size + more > MAX_IDS_SIZE or held.ttl > 4 * batch[0].ttl):
            yield batch
            batch, count, size = [], 0, 0
        batch.append(held)
        count, size = count + len(held.grants), size + more
    if batch:
        yield batch
