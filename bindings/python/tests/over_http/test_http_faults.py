"""Servers that end, freeze, refuse or do not answer; clients that time out, are cancelled or have no right."""

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import leasehold
import leasehold.aio

from over_http.conftest import Start
from servers import READ_TOKEN, TOKEN, Redis, Reply, Serve, environment, free_port, grant, problem, stays, until


# The life of a lease


def test_lease_is_renewed_for_as_long_as_it_is_held(serve: Serve, name: str) -> None:
    with leasehold.connect(serve.url) as client, client.lock(name, ttl=3) as lease:
        stays(lambda: not lease.is_lost and client.lock(name).try_acquire() is None, 7)


def test_all_leases_of_a_client_are_renewed_by_one_request(start: Start) -> None:
    tokens = itertools.count(1)

    def reply(path: str, body: dict[str, Any]) -> Reply | None:
        if "leases" not in path:
            return 200, {}, grant(next(tokens), 9_000)
        outcome = "renewed" if "renew" in path else "released"
        return 200, {}, {"leases": [{**grant(expires_in_ms=9_000), "outcome": outcome} for _ in body["leases"]]}

    server = start.fake(reply)
    with leasehold.connect(server.url, ttl=9) as client:
        leases = [client.lock("a").acquire() for _ in range(20)]
        until(lambda: any("renew" in path for path, _, _ in server.requests))
        renewals = [body for path, body, _ in server.requests if "renew" in path]
        assert [len(body["leases"]) for body in renewals] == [20]
        assert not any(lease.is_lost for lease in leases)


def test_lease_without_renewal_ends_and_says_so(serve: Serve, name: str) -> None:
    client = leasehold.connect(serve.url)
    lease = client.lock(name, ttl=3, auto_renew=False).acquire()
    lease.renew()
    with client.lock(name, wait=30):
        assert lease.loss == "expired"
    with pytest.raises(leasehold.LeaseLost, match="not renewed automatically"):
        lease.check()
    with pytest.raises(leasehold.LeaseLost):
        lease.release()


def test_lease_that_no_server_renews_is_lost_when_its_time_is_over(
    start: Start, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    serve = start.serve()
    client = leasehold.connect(serve.url)
    lease = client.lock(name, ttl=4).acquire()
    acquired = time.monotonic()
    serve.kill()
    until(lambda: lease.is_lost)
    assert time.monotonic() - acquired < 10
    assert lease.loss == "expired"
    with pytest.raises(leasehold.LeaseLost, match="no server listens there"):
        lease.check()
    until(lambda: "lease lost" in caplog.text)
    assert "not renewed, which is tried again" in caplog.text


def test_time_of_a_lease_counts_from_when_the_request_was_sent(start: Start) -> None:
    def reply(path: str, body: dict[str, Any]) -> Reply | None:
        time.sleep(1)
        return 200, {}, grant(expires_in_ms=5_000)

    lease = leasehold.connect(start.fake(reply).url).lock("a", wait=30).acquire()
    assert lease.expires_in < 4.1
    lease._end()


def test_lease_lasts_no_longer_than_was_asked_for(start: Start) -> None:
    def reply(path: str, body: dict[str, Any]) -> Reply | None:
        outcome = {**grant(expires_in_ms=3_600_000), "outcome": "renewed"}
        return 200, {}, {"leases": [outcome]} if path == "/v1/leases/renew" else outcome

    lease = leasehold.connect(start.fake(reply).url).lock("a", ttl=3).acquire()
    assert lease.expires_in <= 3
    lease.renew()
    assert lease.expires_in <= 3
    lease._end()


def test_lease_that_was_waited_for_lasts_its_whole_ttl(start: Start) -> None:
    def reply(path: str, body: dict[str, Any]) -> Reply | None:
        time.sleep(1.5)
        return 200, {}, grant(expires_in_ms=4_400)

    lease = leasehold.connect(start.fake(reply).url).lock("a", ttl=3, wait=30).acquire()
    assert 2 < lease.expires_in <= 3
    lease._end()


@pytest.mark.parametrize("answer", [grant(name="b"), grant(expires_in_ms=-1), {**grant(), "expires_in_ms": "inf"}, {**grant(), "expires_in_ms": "nan"}])
def test_answer_to_another_question_is_no_lease(start: Start, answer: dict[str, Any]) -> None:
    with pytest.raises(leasehold.Error, match="is not understood"):
        leasehold.connect(start.fake(lambda path, body: (200, {}, answer)).url).lock("a").acquire()


@pytest.mark.parametrize("answer", [{}, {"leases": []}, {"leases": [{}]}, {"leases": [{"outcome": "unknown"}]}, []])
def test_answer_to_a_release_that_is_not_understood_is_an_error(start: Start, answer: Any) -> None:
    def reply(path: str, body: dict[str, Any]) -> Reply | None:
        return 200, {}, answer if path == "/v1/leases/release" else grant()

    lease = leasehold.connect(start.fake(reply).url).lock("a").acquire()
    with pytest.raises(leasehold.Error, match="is not understood"):
        lease.release()


LISTENER = """
import os, socket, sys
path, seen, user = sys.argv[1:]
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
file = open(seen, "ab", buffering=0)
os.setuid(int(user))
listener.listen()
print("listening", flush=True)
while True:
    stranger, _ = listener.accept()
    file.write(stranger.recv(100_000))
"""


def ask(client: leasehold.Client) -> None:
    with contextlib.suppress(leasehold.Error):
        client.list()


@pytest.mark.parametrize("where", ["a folder of everybody", "a link of the server's user", "a folder of the stranger where all may make folders", "a folder of the server's user"])
def test_server_of_another_user_is_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    is_of_the_folder_s_owner, is_link = where == "a folder of the server's user", where == "a link of the server's user"
    folder = Path(tempfile.mkdtemp(dir=Path.home() if is_of_the_folder_s_owner or is_link else "/tmp"))
    socket_path, seen = folder / "locks.sock", folder / "seen"
    folder.chmod(0o1777 if where == "a folder of everybody" else 0o755)
    stranger = os.geteuid()
    if os.geteuid() == 0:
        stranger = 65_534
        if where != "a folder of everybody":
            os.chown(folder, stranger, -1)
    else:
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)
    link = Path(f"{tempfile.gettempdir()}/{folder.name}")
    if is_link:
        link.symlink_to(folder)
        os.lchown(link, stranger, -1)
        socket_path = link / socket_path.name
    command = [sys.executable, "-I", "-c", LISTENER, str(socket_path), str(seen), str(stranger)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            client = leasehold.connect(f"unix:{socket_path}", token="a-token-of-the-client")
            if is_of_the_folder_s_owner:
                threading.Thread(target=ask, args=(client,), daemon=True).start()
                until(lambda: seen.exists() and b"a-token" in seen.read_bytes())
            else:
                with pytest.raises(leasehold.Unavailable, match="the server there is of another user"):
                    client.lock("a", wait=1).acquire()
                assert not seen.exists() or seen.read_bytes() == b""
        finally:
            process.kill()
            shutil.rmtree(folder)
            link.unlink(missing_ok=not is_link)


def test_token_beyond_the_numbers_of_floats_is_exact(start: Start) -> None:
    token = 2**60 + 1

    def reply(path: str, body: dict[str, Any]) -> Reply | None:
        return 200, {}, {**grant(token), "token": float(token)}

    lease = leasehold.connect(start.fake(reply).url).lock("a").acquire()
    assert lease.token == token
    lease._end()


def test_lease_survives_the_restart_of_its_server(start: Start, store: str, name: str) -> None:
    serve = start.serve(store)
    client = leasehold.connect(serve.url)
    with client.lock(name, ttl=6) as lease:
        serve.kill()
        time.sleep(0.5)
        serve.start()
        until(lambda: lease.expires_in > 5.5)
        lease.check()
        assert client.lock(name).try_acquire() is None
    with client.lock(name, wait=5) as later:
        assert later.token > lease.token


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_wait_survives_the_restart_of_its_server(start: Start, store: str, name: str, number: int) -> None:
    serve = start.serve(store)
    client = leasehold.connect(serve.url)
    granted = threading.Event()

    def wait() -> None:
        with client.lock(name, wait=60):
            granted.set()

    with client.lock(name, ttl=20):
        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: client.inspect(name).waiters)
        serve.kill(number)
        serve.start()
        assert not granted.is_set()
    thread.join()
    assert granted.is_set()


def test_frozen_server_is_left_for_another_one(start: Start, name: str) -> None:
    first, second = start.serve(is_tcp=True), start.serve(is_tcp=True)
    client = leasehold.connect(f"{first.url},127.0.0.1:{second.port}", token=TOKEN)
    with client.lock(name, ttl=6) as lease:
        first.freeze()
        try:
            stays(lambda: not lease.is_lost, 7)
            assert client.lock(name).try_acquire() is None
        finally:
            first.thaw()


def test_renewal_without_an_answer_delays_no_other_lease(start: Start) -> None:
    tokens = itertools.count(1)

    def reply(path: str, body: dict[str, Any]) -> Reply | None:
        if "renew" in path:
            if any(lease.endswith("long") for lease in body["leases"]):
                time.sleep(4.5)
            return 200, {}, {"leases": [{**grant(expires_in_ms=4_000), "outcome": "renewed"} for _ in body["leases"]]}
        if "release" in path:
            return 200, {}, {"leases": [{**grant(), "outcome": "released"} for _ in body["leases"]]}
        # The longer one is due soon, and its renewals take longer than the shorter one lasts without any.
        name, expires_in_ms = ("long", 14_000) if body["ttl_ms"] > 5_000 else ("short", 4_000)
        return 200, {}, {**grant(next(tokens), expires_in_ms, name), "lease": f"lease1.{name}"}

    with leasehold.connect(start.fake(reply).url) as client:
        with client.lock("long", ttl=20), client.lock("short", ttl=4) as short:
            stays(lambda: not short.is_lost, 9)


def test_several_servers_are_asked_in_turn(start: Start, name: str) -> None:
    serve = start.serve(is_tcp=True)
    client = leasehold.connect(f"http://127.0.0.1:{free_port()},127.0.0.1:{serve.port}", token=TOKEN)
    with client.lock(name):
        pass


# Answers that are lost


def test_lost_answer_of_an_acquisition_is_the_same_lease(start: Start, store: str, name: str) -> None:
    serve = Serve(store, start.folder, port=free_port())
    start.started.append(serve)
    cut: list[bytes] = []

    def cuts(request: bytes) -> bool:
        if b"/acquire" not in request or len(cut) >= 2:
            return False
        cut.append(request)
        return True

    client = leasehold.connect(start.proxy([serve.port or 0], cuts).url, token=TOKEN)
    lease = client.lock(name).try_acquire()
    assert lease is not None
    assert len(cut) == 2
    assert [holder.token for holder in client.inspect(name).holders] == [lease.token]
    lease.release()
    with client.try_lock(name) as again:
        assert again is not None


def test_lost_answer_of_a_release_is_asked_for_again(start: Start, name: str) -> None:
    serve = start.serve(is_tcp=True)
    cut: list[bytes] = []

    def cuts(request: bytes) -> bool:
        if b"/release" not in request or cut:
            return False
        cut.append(request)
        return True

    client = leasehold.connect(start.proxy([serve.port or 0], cuts).url, token=TOKEN)
    client.lock(name).acquire().release()
    assert len(cut) == 1
    assert not client.inspect(name).holders


def test_acquisition_without_any_answer_is_neither_busy_nor_granted(start: Start) -> None:
    server = start.fake(lambda path, body: None)
    client = leasehold.connect(server.url)
    with pytest.raises(leasehold.Unavailable):
        client.lock("a").try_acquire()
    first = [body["request_id"] for path, body, _ in server.requests if path.endswith("/acquire")]
    assert len(first) > 1
    assert len(set(first)) == 1
    assert len(first[0]) >= 32
    with pytest.raises(leasehold.Unavailable):
        client.lock("a", wait=0.5).acquire()
    # Locks together have no ids, so that a second request would meet the lease of the first one.
    server.requests.clear()
    with pytest.raises(leasehold.Unavailable, match="may have been done"):
        client.lock_all(["a", "b"]).try_acquire()
    assert len([path for path, _, _ in server.requests if path == "/v1/locks/acquire"]) == 1


def test_unconfirmed_release_is_an_error_and_goes_on(start: Start) -> None:
    refusals = [1]

    def reply(path: str, body: dict[str, Any]) -> Reply | None:
        if "release" not in path:
            return 200, {}, grant()
        if refusals:
            refusals.pop()
            unknown = {**grant(), "outcome": "unknown", "detail": "the store did not answer"}
            return 200, {}, {"leases": [unknown]}
        return 200, {}, {"leases": [{**grant(), "outcome": "already-ended"}]}

    server = start.fake(reply)
    lease = leasehold.connect(server.url).lock("a").acquire()
    with pytest.raises(leasehold.Unavailable, match="the store did not answer"):
        lease.release()
    until(lambda: sum("release" in path for path, _, _ in server.requests) == 2)


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_counter_is_exact_behind_a_balancer_that_cuts_connections(
    start: Start, request: pytest.FixtureRequest, kind: str, name: str
) -> None:
    store = f"sqlite:{start.folder}/locks.db" if kind == "sqlite" else request.getfixturevalue("redis_server").url
    servers = [Serve(store, start.folder, port=free_port()) for _ in range(2)]
    start.started += servers
    dice = random.Random(7)
    proxy = start.proxy([server.port or 0 for server in servers], lambda request: dice.random() < 0.05)
    counter = start.folder / "counter"
    counter.write_text("0 0")
    errors: list[BaseException] = []
    end = time.monotonic() + 8

    def work() -> None:
        client = leasehold.connect(proxy.url, token=TOKEN)
        try:
            while time.monotonic() < end:
                with client.lock(name, wait=60, ttl=10) as lease:
                    value, token = map(int, counter.read_text().split())
                    assert lease.token > token
                    time.sleep(0.005)
                    counter.write_text(f"{value + 1} {lease.token}")
                with turns_lock:
                    turns.append(1)
        except BaseException as error:
            errors.append(error)

    turns: list[int] = []
    turns_lock = threading.Lock()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    until(lambda: len(turns) >= 20)
    servers[0].kill()
    servers[0].start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert int(counter.read_text().split()[0]) == len(turns) > 8


# Refusals


def test_chunked_answers_of_a_proxy_are_read() -> None:
    content = json.dumps(grant()).encode()
    answer = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    for at in range(0, len(content), 7):
        part = content[at : at + 7]
        answer += f"{len(part):x};x=y\r\n".encode() + part + b"\r\n"
    answer += b"0\r\nTrailer: x\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            # Two answers on one connection, byte by byte.
            for _ in range(2):
                connection.recv(65536)
                for byte in answer:
                    connection.sendall(bytes([byte]))
            connection.close()

        threading.Thread(target=serve, daemon=True).start()
        client = leasehold.connect(f"http://127.0.0.1:{listener.getsockname()[1]}")
        for _ in range(2):
            lease = client.lock("a").acquire()
            assert lease.token == 7
            lease._end()


def test_tls_is_checked(start: Start, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = start.folder
    for file, subject, more in [
        ("ca", "/CN=test CA", ["-x509", "-addext", "basicConstraints=critical,CA:TRUE"]),
        ("server", "/CN=localhost", ["-x509", "-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=DNS:localhost"]),
    ]:
        command = ["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{file}.key", "-out", f"{file}.pem", "-days", "2"]
        subprocess.run([*command, "-subj", subject, *more], cwd=folder, check=True, capture_output=True)
    serve = start.serve(is_tcp=True, tls=(folder / "server.pem", folder / "server.key"))
    url = f"https://localhost:{serve.port}"
    with pytest.raises(leasehold.Unavailable, match="certificate"):
        leasehold.connect(url, token=TOKEN).lock(name).acquire()
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "ca.pem"))
    with leasehold.connect(url, token=TOKEN) as client, client.lock(name, wait=5):
        assert client.lock(name, wait=0.1)._acquire(0.1) is None
    with pytest.raises(leasehold.Unavailable, match="certificate"):
        leasehold.connect(f"https://127.0.0.1:{serve.port}", token=TOKEN).lock(name).acquire()


def test_token_is_checked_and_shown_nowhere(start: Start, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    serve = start.serve(is_tcp=True)
    wrong = "d41d8cd98f00b204e9800998ecf8427e"
    client = leasehold.connect(serve.url, token=wrong)
    with pytest.raises(leasehold.Refused) as caught:
        client.lock(name).acquire()
    texts = [repr(caught.value), repr(client), repr(client.lock(name)), caplog.text]
    assert not any(wrong in text for text in texts)
    with pytest.raises(leasehold.Refused, match="LEASEHOLD_HTTP_TOKEN"):
        leasehold.connect(serve.url).lock(name).acquire()
    with pytest.raises(leasehold.Refused, match="write"):
        leasehold.connect(serve.url, token=READ_TOKEN).lock(name).acquire()


def test_token_of_the_environment_is_used(start: Start, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEASEHOLD_HTTP_TOKEN", TOKEN)
    with leasehold.connect(start.serve(is_tcp=True).url) as client, client.lock(name) as lease:
        lease.check()


def test_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(leasehold.InvalidInput) as caught:
        leasehold.connect("http://me:hunter2@127.0.0.1").lock("a").acquire()
    assert "hunter2" not in str(caught.value)


def test_address_without_a_server_is_said_so_within_seconds(name: str) -> None:
    began = time.monotonic()
    with pytest.raises(leasehold.Unavailable, match="no server listens there"):
        leasehold.connect(f"http://127.0.0.1:{free_port()}").lock(name).acquire()
    assert time.monotonic() - began < 10
    with pytest.raises(leasehold.Unavailable, match="no server listens there"):
        leasehold.connect("unix:/nonexistent/serve.sock").lock(name).acquire()


def test_what_is_no_leasehold_server_is_named(start: Start) -> None:
    def client(reply: Reply) -> leasehold.Client:
        return leasehold.connect(start.fake(lambda path, body: reply).url)

    with pytest.raises(leasehold.Error, match="status 404: is it an address of `leasehold serve`"):
        client((404, {}, b"<html>")).lock("a").acquire()
    with pytest.raises(leasehold.Error, match="status 302"):
        client((302, {"Location": "http://elsewhere"}, b"")).lock("a").acquire()
    with pytest.raises(leasehold.Unavailable, match="status 502"):
        client((502, {}, b"bad gateway")).lock("a").try_acquire()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.sendall(b"220 mail.example.org ESMTP\r\n\r\n")
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(leasehold.Unavailable, match="no HTTP"):
            leasehold.connect(f"http://127.0.0.1:{listener.getsockname()[1]}").lock("a").try_acquire()


def test_problems_are_the_errors_of_the_package(start: Start) -> None:
    for code, status, error in [
        ("invalid-request", 400, leasehold.InvalidInput),
        ("missing-right", 403, leasehold.Refused),
        ("name-not-allowed", 403, leasehold.Refused),
        ("unsupported", 422, leasehold.Unsupported),
        ("store-unavailable", 503, leasehold.Unavailable),
        ("limit-reached", 429, leasehold.Unavailable),
    ]:
        reply = problem(code, status)
        server = start.fake(lambda path, body, reply=reply: reply)  # type: ignore[misc]
        with pytest.raises(error, match=f"the detail of {code}; the remedy of {code}"):
            leasehold.connect(server.url).lock("a").try_acquire()


def test_server_that_stops_is_left_at_once_and_a_full_one_is_asked_later(start: Start) -> None:
    asked: list[tuple[str, float]] = []

    def stopping(path: str, body: dict[str, Any]) -> Reply | None:
        asked.append(("stopping", time.monotonic()))
        return problem("stopping", 503, try_another=True, retry_after=1)

    def full(path: str, body: dict[str, Any]) -> Reply | None:
        asked.append(("full", time.monotonic()))
        if len(asked) < 4:
            return problem("limit-reached", 429, retry_after=1)
        return 200, {}, grant()

    first, second = start.fake(stopping), start.fake(full)
    client = leasehold.connect(f"{first.url},{second.url.removeprefix('http://')}")
    lease = client.lock("a", wait=30).acquire()
    assert [who for who, _ in asked] == ["stopping", "full", "stopping", "full"]
    assert asked[1][1] - asked[0][1] < asked[2][1] - asked[1][1]
    assert asked[2][1] - asked[1][1] >= 1
    lease._end()


def test_request_whose_place_is_lost_goes_on_with_a_new_id(start: Start) -> None:
    ids: list[str] = []

    def reply(path: str, body: dict[str, Any]) -> Reply | None:
        if not path.endswith("/acquire"):
            return 200, {}, {"leases": [{**grant(), "outcome": "released"}]}
        ids.append(body["request_id"])
        if len(ids) == 1:
            return 202, {}, {"status": "waiting", "repeat_within_ms": 2000}
        return problem("request-ended", 410) if len(ids) == 2 else (200, {}, grant())

    with leasehold.connect(start.fake(reply).url) as client, client.lock("a", wait=30):
        pass
    assert ids[0] == ids[1] != ids[2]


def test_quorum_is_used_without_names_of_requests(start: Start, name: str) -> None:
    ports = [free_port() for _ in range(3)]
    redis = [Redis(start.folder / str(port), port) for port in ports]
    try:
        serve = start.serve("redlock://" + ",".join(f"127.0.0.1:{port}" for port in ports))
        with leasehold.connect(serve.url) as client:
            with client.lock(name, ttl=6, wait=60) as first:
                assert client.lock(name).try_acquire() is None
                with pytest.raises(leasehold.Timeout):
                    client.lock(name, wait=0.3).acquire()
                first.renew()
            with client.lock(name, wait=60) as second:
                assert second.token > first.token
            with pytest.raises(leasehold.Unsupported):
                client.semaphore(name, permits=2).acquire()
        serve.stop()
    finally:
        for server in redis:
            server.stop()


def test_store_without_named_requests_is_used_without(start: Start) -> None:
    bodies: list[dict[str, Any]] = []

    def reply(path: str, body: dict[str, Any]) -> Reply | None:
        bodies.append(body)
        if "request_id" in body:
            status, headers, content = problem("unsupported", 422)
            return status, headers, {**content, "detail": "a request can be repeated neither over a quorum nor with a bridged lock"}
        if path.endswith("/acquire"):
            return problem("busy", 409) if body["wait_ms"] == 0 else problem("timed-out", 409)
        return 200, {}, {}

    client = leasehold.connect(start.fake(reply).url)
    assert client.lock("a").try_acquire() is None
    with pytest.raises(leasehold.Timeout):
        client.lock("a", wait=0.1).acquire()
    assert ["request_id" in body for body in bodies][:2] == [True, False]


# Ends


def test_wait_that_is_given_up_leaves_the_queue(serve: Serve, name: str) -> None:
    client = leasehold.connect(serve.url)
    with client.lock(name):
        for _ in range(20):
            assert client.lock(name, wait=0.05)._acquire(0.05) is None
    began = time.monotonic()
    with client.lock(name, wait=30):
        # Those that were given up do not hold the lock one after the other until the server forgets each of them.
        assert time.monotonic() - began < 10


def test_cancelled_acquisitions_leave_nothing_behind(serve: Serve, name: str) -> None:
    def threads_and_files() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    async def main() -> tuple[tuple[int, int], tuple[int, int]]:
        async with leasehold.aio.connect(serve.url) as client, client.lock(name):
            before = threads_and_files()
            for _ in range(20):
                tasks = [asyncio.create_task(client.lock(name).acquire()) for _ in range(25)]
                await asyncio.sleep(random.random() * 0.05)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            return before, threads_and_files()

    (threads_before, files_before), (threads, files) = asyncio.run(main())
    assert threads <= threads_before + 1
    # Not one for each of the 500: a busy machine is some behind with closing them.
    assert files <= files_before + 200
    with leasehold.connect(serve.url) as client:
        with client.lock(name, wait=60):
            pass
        client.close()
        until(lambda: len(os.listdir("/proc/self/fd")) <= files_before + 5)


def test_clients_and_locks_leave_no_memory_no_file_and_no_thread(serve: Serve, name: str) -> None:
    clients, pairs = 100, 1_000

    def state() -> tuple[int, int, int]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return threading.active_count(), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")

    def use(count: int) -> None:
        for number in range(count):
            client = leasehold.connect(serve.url)
            with client.lock(f"{name}-{number % 7}"):
                pass
            if number % 2:
                client.close()

    def lock(count: int) -> None:
        with leasehold.connect(serve.url) as client:
            for _ in range(count):
                with client.lock(name):
                    pass

    use(clients // 10)
    lock(pairs // 10)
    threads, files, memory = state()
    use(clients)
    lock(pairs)
    until(lambda: state()[1] <= files)
    assert state()[0] == threads
    assert state()[2] < memory + 8_000_000


def test_lease_that_nothing_refers_to_is_released(serve: Serve, name: str) -> None:
    client = leasehold.connect(serve.url)
    client.lock(name).acquire
    lease = client.lock(name).acquire()
    with pytest.warns(ResourceWarning, match="was not released"):
        del lease
        gc.collect()
    with client.lock(name, wait=20):
        pass


def test_closed_client_releases_and_ends_its_waits(serve: Serve, name: str) -> None:
    client, other = leasehold.connect(serve.url), leasehold.connect(serve.url)
    lease = client.lock(name).acquire()
    ends: list[BaseException] = []

    def wait() -> None:
        try:
            client.lock(name).acquire()
        except leasehold.Error as error:
            ends.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: other.inspect(name).waiters)
    client.close()
    thread.join()
    assert [type(error) for error in ends] == [leasehold.ClientClosed]
    assert lease.loss == "closed"
    with pytest.raises(leasehold.LeaseLost):
        lease.release()
    with pytest.raises(leasehold.ClientClosed):
        client.lock(name).acquire()
    with other.lock(name, wait=20):
        pass


def test_interrupt_ends_a_wait(serve: Serve, name: str) -> None:
    client = leasehold.connect(serve.url)
    script = """if True:
        import leasehold, sys, time
        client = leasehold.connect(sys.argv[1])
        print("ready", flush=True)
        try:
            client.lock(sys.argv[2]).acquire()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    with client.lock(name):
        child = subprocess.Popen([sys.executable, "-c", script, serve.url, name], stdout=subprocess.PIPE, text=True)
        until(lambda: client.inspect(name).waiters)
        child.send_signal(signal.SIGINT)
        output, _ = child.communicate(timeout=30)
    assert output.split() == ["ready", "interrupted"]
    assert child.returncode == 0


def test_interpreter_ends_with_waits_and_leases_that_are_open(serve: Serve, name: str) -> None:
    client = leasehold.connect(serve.url)
    script = """if True:
        import leasehold, sys, threading, time
        client = leasehold.connect(sys.argv[1])
        kept = client.lock(sys.argv[2]).acquire()
        for _ in range(3):
            threading.Thread(target=client.lock(sys.argv[2]).acquire, daemon=True).start()
        while len(client.inspect(sys.argv[2]).waiters) < 3:
            time.sleep(0.01)
        print("ready", flush=True)
    """
    child = subprocess.Popen([sys.executable, "-c", script, serve.url, name], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    began = time.monotonic()
    assert child.wait(timeout=30) == 0
    assert time.monotonic() - began < 10
    began = time.monotonic()
    with client.lock(name, wait=20):
        print(time.monotonic() - began)


def test_interpreter_ends_within_seconds_without_a_server(start: Start, name: str) -> None:
    serve = start.serve()
    script = """if True:
        import leasehold, sys, threading
        client = leasehold.connect(sys.argv[1])
        kept = client.lock(sys.argv[2]).acquire()
        threading.Thread(target=client.lock(sys.argv[2]).acquire, daemon=True).start()
        print("ready", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", script, serve.url, name]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    serve.kill()
    child.stdin.close()
    began = time.monotonic()
    assert child.wait(timeout=60) == 0
    # 2 s for the releases, and the time in which a busy machine ends a process.
    assert time.monotonic() - began < 8


def test_wait_outlasts_several_restarts(start: Start, name: str) -> None:
    serve = start.serve(is_tcp=True)
    client = leasehold.connect(serve.url, token=TOKEN)
    granted = threading.Event()

    def wait() -> None:
        with client.lock(name):
            granted.set()

    with leasehold.connect(serve.url, token=TOKEN).lock(name, ttl=60):
        thread = threading.Thread(target=wait)
        thread.start()
        for _ in range(3):
            until(lambda: client.inspect(name).waiters)
            # For longer than the server keeps the place of a request that is not repeated.
            stays(lambda: client.inspect(name).waiters, 4)
            serve.kill()
            serve.start()
        until(lambda: client.inspect(name).waiters)
        assert not granted.is_set()
    thread.join()
    assert granted.is_set()


def test_import_loads_no_event_loop_no_tls_and_no_http() -> None:
    script = "import leasehold, sys; print([m for m in ('asyncio', 'ssl', 'http.client', 'socket', 'json') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"


# The asyncio API


def test_loop_that_is_blocked_loses_nothing(start: Start, name: str) -> None:
    async def main() -> None:
        async with leasehold.aio.connect(start.serve().url) as client, client.lock(name, ttl=3) as lease:
            time.sleep(9)
            lease.check()
            assert await client.lock(name).try_acquire() is None

    asyncio.run(main())


def test_loss_cancels_the_body(start: Start, name: str) -> None:
    async def main() -> str:
        serve = start.serve()
        async with leasehold.aio.connect(serve.url) as client:
            try:
                async with client.lock(name, ttl=1):
                    serve.kill()
                    await asyncio.sleep(30)
            except leasehold.LeaseLost as lost:
                return str(lost.reason)
        return "not lost"

    assert asyncio.run(main()) == "expired"


def test_tasks_of_a_loop_take_turns(serve: Serve, name: str) -> None:
    inside: list[int] = []
    turns: list[int] = []

    async def work(client: leasehold.aio.Client, number: int) -> None:
        async with client.lock(name, wait=60):
            inside.append(number)
            assert inside == [number]
            await asyncio.sleep(0.001)
            inside.clear()
            turns.append(number)

    async def main() -> None:
        async with leasehold.aio.connect(serve.url) as client:
            await asyncio.gather(*(work(client, number) for number in range(50)))

    asyncio.run(main())
    assert sorted(turns) == list(range(50))


def test_only_the_calling_greenlet_waits_under_gevent(start: Start, name: str) -> None:
    script = """if True:
        from gevent import monkey
        monkey.patch_all()
        import gevent, leasehold, sys
        client, name = leasehold.connect(sys.argv[1]), sys.argv[2]
        ticks, turns = [], []
        def tick():
            while True:
                ticks.append(1)
                gevent.sleep(0.01)
        gevent.spawn(tick)
        def work():
            for _ in range(10):
                with client.lock("turns"):
                    turns.append(1)
        with client.lock(name, ttl=4) as lease:
            before = len(ticks)
            try:
                client.lock(name, wait=0.5).acquire()
            except leasehold.Timeout:
                assert len(ticks) > before + 5, (before, len(ticks))
            gevent.joinall([gevent.spawn(work) for _ in range(10)], raise_error=True)
            gevent.sleep(6)
            lease.check()
        client.close()
        print(len(turns))
    """
    command = [sys.executable, "-c", script, start.serve().url, name]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["100"]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_children_of_multiprocessing_lock_for_themselves(start: Start, name: str, method: str) -> None:
    serve = start.serve()
    script = """if True:
        import leasehold, multiprocessing, sys
        method, url, name = sys.argv[1:]
        if method == "fork":
            used = leasehold.connect(url)
            used.lock("before").acquire().release()
        context = multiprocessing.get_context(method)
        from over_http.turns import take_turns
        children = [context.Process(target=take_turns, args=(url, name)) for _ in range(3)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        print([child.exitcode for child in children])
    """
    command = [sys.executable, "-c", script, method, serve.url, name]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout.strip() == "[0, 0, 0]", done.stderr
    # The last child has left its lock, and no lease that it had not released.
    with leasehold.connect(serve.url) as client, client.lock(name, wait=20):
        pass


# Fork


def in_child(work: Any) -> Any:
    """What `work` returns in a forked child, as JSON."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        result: Any = "nothing"
        try:
            result = work()
        except BaseException as error:
            result = type(error).__name__
        finally:
            os.write(writer, json.dumps(result).encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def test_child_has_no_lease_of_its_parent_and_connects_anew(serve: Serve, name: str) -> None:
    client = leasehold.connect(serve.url)
    unopened = leasehold.connect(serve.url)
    with client.lock(name, ttl=4) as lease:

        def work() -> list[str | None]:
            outcomes: list[str | None] = []
            for call in (lease.check, lease.release, client.lock(name).acquire):
                try:
                    call()
                    outcomes.append(None)
                except leasehold.ForkedError:
                    outcomes.append("forked")
            with leasehold.connect(serve.url) as mine:
                outcomes.append("busy" if mine.lock(name).try_acquire() is None else "granted")
                with mine.lock("other"), unopened.lock("third"):
                    outcomes.append("locked")
            return outcomes

        for _ in range(3):
            assert in_child(work) == ["forked", "forked", "forked", "busy", "locked"]
        stays(lambda: not lease.is_lost, 5)
        assert client.lock(name).try_acquire() is None
    with client.try_lock(name) as free:
        assert free is not None


def test_fork_while_another_thread_waits(serve: Serve, name: str) -> None:
    client = leasehold.connect(serve.url)
    granted = threading.Event()

    def wait() -> None:
        with client.lock(name):
            granted.set()

    with client.lock(name):
        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: client.inspect(name).waiters)

        def work() -> str:
            with leasehold.connect(serve.url) as mine, mine.lock("other"):
                return f"{len(mine.inspect(name).waiters)} waiter"

        assert in_child(work) == "1 waiter"
        assert not granted.is_set()
    thread.join()
    assert granted.is_set()


def test_sub_interpreter(start: Start, name: str) -> None:
    serve = start.serve()
    script = f"""if True:
        import sys
        sys.path.insert(0, {str(Path(leasehold.__file__).parents[1])!r})
        import leasehold
        with leasehold.connect({serve.url!r}) as client, client.lock({name!r}) as lease:
            lease.on_lost(print)
            lease.renew()
    """
    runner = f"""if True:
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        for isolated in (True, False):
            for _ in range(2):
                try:
                    child = interpreters.create("isolated" if isolated else "legacy")
                except (TypeError, ValueError):
                    child = interpreters.create(isolated=isolated)
                failure = interpreters.run_string(child, {script!r})
                assert failure is None, failure
                interpreters.destroy(child)
                print(isolated, flush=True)
    """
    programs = [f"python3.{minor}" for minor in (14, 13)]
    programs += map(str, Path.home().glob(".pyenv/versions/3.1[34].*/bin/python3"))
    found = [program for program in programs if works(program)]
    if not found:
        pytest.skip("sub-interpreters need Python 3.13 or later: python3.13 on the PATH")
    for program in found:
        done = subprocess.run([program, "-c", runner], capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.split() == ["True", "True", "False", "False"], done.stderr
        assert done.returncode == 0, done.stderr


def works(program: str) -> bool:
    try:
        return subprocess.run([program, "-c", ""], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def test_package_has_no_unused_import_of_the_native_engine(tmp_path: Path) -> None:
    """The HTTP back end works where no native module loads."""
    script = "import leasehold, leasehold._http, sys; assert 'leasehold._native' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
