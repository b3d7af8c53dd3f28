"""Requests to the servers of a store, with repeats: another server, another connection, the problems that servers answer with."""

import asyncio
import json
import ssl
from dataclasses import dataclass
from typing import Any, NoReturn

from .._errors import Error, InvalidInput, Refused, Unavailable, Unsupported
from .address import TOKEN_VARIABLE, Server
from .clock import now
from .connection import Connections, Delivery, ProtocolError, Response
from .runtime import Runtime

# The problems that callers of `Api.call` handle. All others are errors, or reasons to ask again.
OUTCOMES = frozenset({"busy", "timed-out", "request-ended", "not-held"})

# How long an unreachable server is asked again: only briefly if it has never answered, since its address may be wrong.
PATIENCE = 10.0
FIRST_PATIENCE = 2.0

# The pause between repeats: a request that waits loses its place after 2 s.
MIN_PAUSE = 0.05
MAX_PAUSE = 1.0

_ERRORS: dict[str, type[Error]] = {
    "invalid-request": InvalidInput,
    "body-too-large": InvalidInput,
    "head-too-large": InvalidInput,
    "unsupported": Unsupported,
    "unauthorized": Refused,
    "missing-right": Refused,
    "name-not-allowed": Refused,
    "foreign-origin": Refused,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered. `code` is that of a problem of `OUTCOMES`."""

    status: int
    content: Any
    text: str
    # The time at which the request was sent: `expires_in_ms` counts from there.
    sent: float
    code: str | None = None
    # An earlier request may have been carried out, though it was not answered.
    was_lost: bool = False


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a server is asked again."""

    reason: str
    is_lost: bool = True
    was_connected: bool = False
    try_another: bool = True
    pause: float = 0.0


class Api:
    """Its methods run in the runtime's thread."""

    def __init__(
        self,
        servers: tuple[Server, ...],
        token: str | None,
        connect_timeout: float | None,
        runtime: Runtime,
    ) -> None:
        self._servers = servers
        self._authorization = f"Authorization: Bearer {token}\r\n" if token else ""
        self._has_token = token is not None
        self._connect_timeout = connect_timeout
        tls = ssl.create_default_context() if any(server.is_tls for server in servers) else None
        self._connections = [
            Connections(server, tls if server.is_tls else None, runtime.sockets) for server in servers
        ]
        self._current = 0
        self._was_answered = False

    def patience(self) -> float:
        if self._connect_timeout is not None:
            return self._connect_timeout
        return PATIENCE if self._was_answered else FIRST_PATIENCE

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        limit: float,
        latest: float | None = None,
        is_repeatable: bool = True,
        delivery: Delivery | None = None,
    ) -> Answer:
        """Sends the request to one server after another, until one answers it. `limit` is for each of them, in seconds. If none has answered for a
        while, or at the time `latest`, it is not sent again, but `Unavailable` is raised."""
        delivery = Delivery() if delivery is None else delivery
        content = b"" if body is None else json.dumps(body).encode()
        until: float | None = None
        was_lost, pause, round_left = False, MIN_PAUSE, len(self._servers)
        while True:
            index = self._current
            server = self._servers[index]
            sent = now()
            response = await self._send(index, method, path, content, limit, delivery, is_repeatable)
            if isinstance(response, Response):
                self._was_answered = True
                outcome = self._judge(response, server, sent, was_lost)
            else:
                outcome = response
            if isinstance(outcome, Answer):
                return outcome
            if until is None or (outcome.was_connected and now() - sent > self.patience()):
                # A server that ends after a long wait was there until now.
                until = min(now() + self.patience(), latest if latest is not None else float("inf"))
            was_lost = was_lost or outcome.is_lost
            self._connections[index].close()
            if self._current == index:
                self._current = (index + 1) % len(self._servers)
            if outcome.is_lost and not is_repeatable:
                raise Unavailable(f"{outcome.reason}; it may have been done")
            round_left -= 1
            if outcome.try_another and round_left > 0:
                continue
            round_left = len(self._servers)
            rest = min(max(pause, outcome.pause), MAX_PAUSE)
            if now() + rest >= until:
                raise Unavailable(outcome.reason)
            await asyncio.sleep(rest)
            pause = min(pause * 2, MAX_PAUSE)

    async def _send(
        self, index: int, method: str, path: str, content: bytes, limit: float, delivery: Delivery, is_repeatable: bool
    ) -> Response | _Failure:
        server = self._servers[index]
        length = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n" if method == "POST" else ""
        head = (
            f"{method} {server.prefix}{path} HTTP/1.1\r\nHost: {server.authority}\r\nUser-Agent: leasehold-python\r\n"
            f"Accept: application/json\r\n{self._authorization}{length}\r\n"
        )
        try:
            async with asyncio.timeout(limit):
                return await self._connections[index].send(head.encode(), content, delivery, is_repeatable=is_repeatable)
        except ssl.SSLCertVerificationError as error:
            raise Unavailable(f"{server}: its certificate is not valid: {error.verify_message}") from None
        except (ConnectionRefusedError, FileNotFoundError):
            return _Failure(f"{server}: no server listens there", is_lost=False)
        except PermissionError as error:
            return _Failure(f"{server}: {error}", is_lost=False)
        except TimeoutError:
            return _Failure(f"{server} did not answer in time")
        except (OSError, EOFError, ProtocolError) as error:
            what = "the connection ended without an answer" if isinstance(error, EOFError) else error
            return _Failure(f"{server}: {what}", was_connected=True)

    def _judge(self, response: Response, server: Server, sent: float, was_lost: bool) -> Answer | _Failure:
        content: Any
        try:
            text = response.body.decode()
            content = json.loads(text)
        except ValueError:
            text, content = "", None
        status = response.status
        if status in (200, 202) and content is not None:
            return Answer(status, content, text, sent, None, was_lost)
        problem: dict[str, Any] = content if isinstance(content, dict) and isinstance(content.get("code"), str) else {}
        code: str | None = problem.get("code")
        if code in OUTCOMES:
            return Answer(status, content, text, sent, code, was_lost)
        if code in ("stopping", "limit-reached", "too-many-connections"):
            pause = _retry_after(response)
            return _Failure(
                f"{server}: {_words(problem)}",
                is_lost=False,
                was_connected=True,
                try_another=problem.get("try_another") is True,
                pause=pause,
            )
        if status >= 500 or status in (408, 425, 429):
            # Those without a code are a proxy's, whose server may have done what it has not answered.
            reason = _words(problem) if problem else f"it answered with status {status}"
            return _Failure(f"{server}: {reason}", was_connected=True, pause=_retry_after(response))
        self._fail(server, status, code, problem)

    def _fail(self, server: Server, status: int, code: str | None, problem: dict[str, Any]) -> NoReturn:
        if code == "unauthorized" and not self._has_token:
            raise Refused(f"{server} wants a token: pass token=… to connect, or set {TOKEN_VARIABLE}")
        if code is None:
            raise Error(f"{server} answered with status {status}: is it an address of `leasehold serve`?")
        raise _ERRORS.get(code, Error)(f"{server}: {_words(problem)}")

    def close(self) -> None:
        for connections in self._connections:
            connections.close()


def _words(problem: dict[str, Any]) -> str:
    detail, remedy = problem.get("detail") or problem.get("title"), problem.get("remedy")
    return f"{detail}; {remedy}" if remedy else str(detail)


def _retry_after(response: Response) -> float:
    value = response.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() else 0.0
