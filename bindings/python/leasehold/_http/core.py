"""What a client does, in the runtime's thread: it acquires, renews and releases. `Backend` of this package is how other threads call it."""

import asyncio
import json
import secrets
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from .._errors import ClientClosed, Error, InvalidInput, LeaseLost, Refused, Timeout, Unavailable, Unsupported
from .address import parse, token_of
from .api import Answer, Api
from .clock import now
from .connection import Delivery
from .held import Grant, Held, Renewals, batches, grant_of
from .request import Request, lock_path
from .runtime import Runtime

if TYPE_CHECKING:
    from .. import _backend

T = TypeVar("T")

# A slice of a wait: shorter than the time after which proxies end a silent request.
SLICE = 20.0

# Without an id, each slice is a new place in the queue. So it is as long as servers allow.
MAX_SLICE = 50.0

# Of a request about states.
LOOK_LIMIT = 10.0

# By how much an acquisition may last longer than its wait while no server answers.
GRACE = 2.0

# Requests that were given up, and for whose leases the client waits at the same time.
MAX_GIVEN_UP = 32
MAX_GIVING_UP = 60.0


class Core:
    def __init__(self, url: str, settings: "_backend.Settings", runtime: Runtime) -> None:
        servers = parse(url)
        self.address = ",".join(map(str, servers))
        self.settings = settings
        self.runtime = runtime
        self.is_closed = False
        self._api = Api(servers, token_of(settings.token), settings.connect_timeout, runtime)
        self._renewals = Renewals(self._send_ids, self.begin_release)
        # Over a quorum, requests have no ids.
        self._has_request_ids = True
        self._given_up: set[asyncio.Task[None]] = set()
        self._giving_up = asyncio.Semaphore(MAX_GIVEN_UP)
        # What goes on in the background, and ends with the client.
        self._background: set[asyncio.Task[None]] = set()
        self._closing: list[asyncio.Future[None]] = []
        # What callers wait for.
        self._calls: set[asyncio.Task[Any]] = set()
        runtime.call_soon(runtime.clients.add, self)

    async def called(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs the work of a caller, which ends with `ClientClosed` if the client is closed meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        if self.is_closed:
            raise ClientClosed("the client was closed")
        self._calls.add(task)
        try:
            return await work()
        except asyncio.CancelledError:
            if self.is_closed:
                raise ClientClosed("the client was closed") from None
            raise
        finally:
            self._calls.discard(task)

    # Acquire

    async def acquire(self, request: Request, wait: float | None) -> Held | None:
        deadline = None if wait is None else now() + wait
        if request.is_set or not self._has_request_ids:
            answer = await self._acquire_unnamed(request, deadline)
        else:
            try:
                answer = await self._acquire_named(request, deadline)
            except Unsupported:
                # Either the store can't repeat requests, or it does not have this lock at all.
                answer = await self._acquire_unnamed(request, deadline)
                self._has_request_ids = False
        if answer is None:
            return None
        try:
            grants = answer.content["leases"] if request.is_set else [answer.content]
            given = [grant_of(grant, answer.sent, request.ttl) for grant in grants]
            if sorted(grant.name for grant in given) != sorted(request.names):
                raise ValueError("other names")
            return self._hold(given, request)
        except (KeyError, TypeError, ValueError):
            raise Error(f"{request.what}: the server's answer is not understood: is it of another version?") from None

    def _hold(self, grants: list[Grant], request: Request) -> Held:
        ends_at = None if request.max_hold is None else now() + request.max_hold
        held = Held(grants, request.ttl, is_renewed=request.is_renewed, ends_at=ends_at)
        self._renewals.add(held)
        return held

    async def _acquire_named(self, request: Request, deadline: float | None) -> Answer | None:
        """Acquires by a request that can be repeated at any server: in slices, between which it keeps its place in the queue."""
        fields = {**request.fields, "request_id": secrets.token_hex(16)}
        is_waiting = deadline is None or deadline > now()
        delivery = Delivery()
        try:
            while True:
                answer = await self._slice(request, fields, deadline, SLICE, delivery)
                if answer.code in ("busy", "timed-out"):
                    return None
                if answer.code == "request-ended":  # its place is lost
                    fields["request_id"] = secrets.token_hex(16)
                elif answer.status != 202:
                    return answer
                elif deadline is not None and now() >= deadline:
                    self._leave(request, fields, is_waiting)
                    return None
        except (Refused, InvalidInput, Unsupported):
            raise  # it is in no queue
        except BaseException:
            if delivery.is_possible:
                self._leave(request, fields, is_waiting)
            raise

    async def _acquire_unnamed(self, request: Request, deadline: float | None) -> Answer | None:
        """Acquires by requests without an id, of which a second one may wait for the lease of a first one whose answer was lost."""
        was_lost = False
        while True:
            answer = await self._slice(request, request.fields, deadline, MAX_SLICE)
            was_lost = was_lost or answer.was_lost
            if answer.code is None:
                return answer
            if deadline is not None and now() >= deadline:
                break
        if was_lost:
            raise Unavailable(f"{request.what}: an earlier request was not answered, and its lease may be in the way")
        return None

    async def _slice(
        self,
        request: Request,
        fields: dict[str, Any],
        deadline: float | None,
        slice_limit: float,
        delivery: Delivery | None = None,
    ) -> Answer:
        left = slice_limit if deadline is None else min(max(0.0, deadline - now()), slice_limit)
        wait_ms = round(left * 1000)
        # Without a wait and without an id, a second request would find the lock held by the first one.
        is_repeatable = wait_ms > 0 or "request_id" in fields
        return await self._api.call(
            "POST",
            request.path,
            {**fields, "wait_ms": wait_ms},
            limit=left + _limit(request.ttl),
            latest=None if deadline is None else max(deadline, now()) + GRACE,
            is_repeatable=is_repeatable,
            delivery=delivery,
        )

    def _leave(self, request: Request, fields: dict[str, Any], is_waiting: bool) -> None:
        """Gives up a request that the server may go on with, in the background."""
        _spawn(self._give_up(request, fields, is_waiting), self._given_up)

    async def _give_up(self, request: Request, fields: dict[str, Any], is_waiting: bool) -> None:
        """Repeats a request in order to release its lease at once.

        The server can't take a request out of the queue: it keeps the place, and then the lease, for 2.5 s after the last repeat. A lease that a
        repeat was answered with lasts for its ttl if that answer is lost. So there is at least one repeat, which does not wait.
        """
        deadline = now() + MAX_GIVING_UP if is_waiting else 0.0
        answer: Answer | None = None
        try:
            async with self._giving_up:
                while (answer is None or answer.status == 202) and now() < deadline and not self.is_closed:
                    answer = await self._slice(request, fields, deadline, SLICE)
                if answer is None or answer.status == 202:
                    answer = await self._slice(request, fields, 0.0, SLICE)
        except asyncio.CancelledError:  # the client is closed
            answer = await self._slice(request, fields, 0.0, SLICE)
        if answer.status == 200:
            grant = grant_of(answer.content, answer.sent, request.ttl)
            await self._release_in_background([grant.id], request.ttl, grant.valid_until)

    # Renew and release

    async def _send_ids(self, path: str, ids: list[str], limit: float, latest: float | None) -> Answer:
        return await self._api.call("POST", path, {"leases": ids}, limit=limit, latest=latest)

    async def renew(self, held: Held) -> None:
        await self._renewals.renew([held])
        self.check(held)
        if held.error is not None:
            raise Unavailable(f"{held.what}: the renewal was not confirmed: {held.error}")

    def check(self, held: Held) -> None:
        loss = held.loss()
        if loss is not None:
            reason, message = loss
            raise LeaseLost(message, reason)

    def begin_release(self, held: Held) -> None:
        """The lease was ended by the caller. If it was lost, what the server may have of it is released all the same."""
        self._renewals.discard(held)
        if held.released is None:
            ids = [grant.id for grant in held.grants]
            # Its last renewal may have been carried out, though it was not answered.
            held.released = self._release_in_background(ids, held.ttl, now() + held.ttl)

    async def released(self, held: Held, timeout: float | None) -> None:
        """Waits for the release."""
        self.check(held)
        assert held.released is not None
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(held.released)
        except TimeoutError:
            raise Timeout(f"{held.what}: the release was not confirmed within {timeout} s; it goes on") from None

    def abandon(self, held: Held) -> None:
        """Releases a lease that nobody refers to."""
        if held.end():
            self.begin_release(held)

    def _release_in_background(self, ids: list[str], ttl: float, deadline: float) -> asyncio.Future[None]:
        """Releases leases, and goes on until their time is over, since then they end by themselves. The future has the first result."""
        confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        confirmed.add_done_callback(lambda future: future.cancelled() or future.exception())
        _spawn(self._release(ids, ttl, deadline, confirmed), self._background)
        return confirmed

    async def _release(self, ids: list[str], ttl: float, deadline: float, confirmed: asyncio.Future[None]) -> None:
        def settle(error: Error | None) -> None:
            if confirmed.done():
                return
            if error is None:
                confirmed.set_result(None)
            else:
                confirmed.set_exception(error)

        while now() < deadline:
            try:
                answer = await self._send_ids("/v1/leases/release", ids, _limit(ttl), deadline)
                outcomes = dict(zip(ids, answer.content["leases"], strict=True))
                for outcome in outcomes.values():
                    if outcome["outcome"] in ("not-allowed", "invalid"):
                        settle(Refused(f"the release was refused: {outcome['detail']}"))
                ids = [id for id, outcome in outcomes.items() if outcome["outcome"] == "unknown"]
                if not ids:
                    settle(None)
                    return
                settle(Unavailable(f"the store did not confirm the release: {outcomes[ids[0]]['detail']}"))
            except Unavailable as error:
                settle(error)
                if isinstance(error, Refused):
                    return
            except Error as error:
                settle(error)
                return
            except (KeyError, TypeError, ValueError):
                settle(Error("the server's answer to a release is not understood: is it of another version?"))
                return
            await asyncio.sleep(1.0)
        settle(None)

    async def detach(self, held: Held) -> str:
        """Renews the lease, so that its next holder has the whole ttl, and forgets it. If that fails, the lease is released."""
        try:
            await self.renew(held)
        except BaseException:
            self.abandon(held)
            raise
        self._renewals.discard(held)
        if not held.end():
            self.check(held)
            raise LeaseLost(f"{held.what}: the lease was released meanwhile", "released")
        held.notify()
        return held.grants[0].id

    async def attach(self, text: str) -> Held:
        sent_by = now()
        answer = await self._send_ids("/v1/leases/renew", [text], 5.0, None)
        outcome = answer.content["leases"][0]
        match outcome["outcome"]:
            case "renewed":
                pass
            case "ended":
                raise LeaseLost(f"{outcome['kind']} {outcome['name']!r}: {outcome['detail']}", "gone")
            case "invalid":
                raise InvalidInput(str(outcome["detail"]))
            case "not-allowed":
                raise Refused(str(outcome["detail"]))
            case _:
                raise Unavailable(f"the store did not confirm the lease: {outcome['detail']}")
        ttl = float(outcome["expires_in_ms"]) / 1000 + (answer.sent - sent_by)
        request = Request("", "", (), ttl, is_renewed=True, max_hold=None, is_set=False)
        return self._hold([grant_of({**outcome, "lease": text}, answer.sent, ttl)], request)

    # States

    async def inspect(self, kind: str, name: str) -> str:
        return (await self._api.call("GET", lock_path(kind, name), limit=LOOK_LIMIT)).text

    async def all_states(self) -> str:
        locks: list[Any] = []
        after = ""
        while True:
            answer = await self._api.call("GET", f"/v1/locks{after}", limit=LOOK_LIMIT)
            locks += answer.content["locks"]
            if answer.content["next"] is None:
                return json.dumps(locks)
            after = f"?after={quote(answer.content['next'], safe='')}"

    async def force_release(self, kind: str, name: str, token: int | None) -> str:
        fields = {} if token is None else {"token": token}
        answer = await self._api.call(
            "POST", lock_path(kind, name, "/force-release"), fields, limit=LOOK_LIMIT, is_repeatable=False
        )
        return json.dumps([] if answer.code == "not-held" else answer.content["released"])

    # Close

    def begin_close(self) -> None:
        """Ends the calls, and releases all leases in the background."""
        if self.is_closed:
            return
        self.is_closed = True
        self.runtime.clients.discard(self)
        for task in self._calls | self._given_up:
            task.cancel()
        self._closing.append(asyncio.get_running_loop().create_task(self._end(list(self._calls))))
        ended = [held for held in self._renewals.take_all() if held.lose("closed", f"{held.what}: the client was closed")]
        for batch in batches(ended):
            ids = [grant.id for held in batch for grant in held.grants]
            ttl = max(held.ttl for held in batch)
            released = self._release_in_background(ids, ttl, now() + ttl)
            for held in batch:
                held.released = released
                held.notify()
            self._closing.append(released)
        _spawn(self._disconnect(list(self._closing)), self._background)

    async def closed(self, timeout: float | None) -> None:
        """Waits for what `begin_close` has begun."""
        try:
            async with asyncio.timeout(timeout):
                await asyncio.gather(*map(asyncio.shield, self._closing))
        except TimeoutError:
            raise Timeout(f"{self.address}: not all releases were confirmed within {timeout} s; they go on") from None

    async def _end(self, calls: list[asyncio.Task[Any]]) -> None:
        """Waits until the calls have ended, and their requests are given up."""
        if calls:
            await asyncio.wait(calls)
        if self._given_up:
            await asyncio.wait(self._given_up)

    async def _disconnect(self, closing: list[asyncio.Future[None]]) -> None:
        """Closes the connections once the background's work is done."""
        if closing:
            await asyncio.wait(closing)
        others = self._background - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)
        self._api.close()


def _spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Starts a task, and keeps it among the tasks until it ends. Its errors are of no interest to anyone."""

    def end(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled():
            task.exception()

    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(end)


def _limit(ttl: float) -> float:
    """How long a server may take for an answer, besides the wait: a part of the ttl, so that there is time for another server."""
    return min(max(ttl / 6, 1.0), 5.0)
