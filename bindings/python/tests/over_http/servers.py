"""Servers that the tests start on free ports of the loopback address or on Unix sockets, and end by their process id."""

import http.server
import json
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
TOKEN = "4f1c7a0e9b2d6853a1f04c7e9d2b8365"
READ_TOKEN = "7be2f4906d1c5a38c9e0b7142fd68a05"


def until(condition: Callable[[], Any], limit: float = 30.0) -> Any:
    """Looks again and again until the condition holds, and returns its value."""
    end = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.01)
    return value


def stays(condition: Callable[[], Any], seconds: float) -> None:
    """The condition holds throughout this time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert condition(), "the condition did not hold throughout"
        time.sleep(0.05)


def environment(**more: str) -> dict[str, str]:
    """The environment of a child process that finds the packages that this one has found."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def leasehold_program() -> str:
    program = os.environ.get("LEASEHOLD_PROGRAM") or str(ROOT / "target/debug/leasehold")
    assert Path(program).exists(), f"{program} is missing: cargo build -p leasehold-cli, or set LEASEHOLD_PROGRAM"
    return program


def redis_program() -> str:
    folder = os.environ.get("LEASEHOLD_SERVERS", str(ROOT / "target/servers"))
    candidates = [shutil.which("redis-server"), *map(str, sorted(Path(folder).glob("redis-*/redis-server"), reverse=True))]
    found = next((program for program in candidates if program and Path(program).exists()), None)
    assert found, "redis-server is missing: apt-get install redis-server"
    return found


class Redis:
    def __init__(self, folder: Path, port: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        self.socket = folder / "redis.sock"
        self.log = (folder / "redis.log").open("wb")
        command = [redis_program(), "--port", str(port), "--unixsocket", str(self.socket), "--save", "", "--dir", str(folder)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        until(self.socket.exists)

    @property
    def url(self) -> str:
        return f"redis+unix:{self.socket}"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


class Serve:
    """A server of `leasehold serve` on TCP or, without a port, on a Unix socket."""

    def __init__(self, store: str, folder: Path, *, port: int | None = None, tls: tuple[Path, Path] | None = None) -> None:
        self.store = store
        self.more = ["--tls-cert", str(tls[0]), "--tls-key", str(tls[1])] if tls else []
        self.port = port
        self.folder = folder
        self.path = folder / f"serve-{random.randrange(10**9)}.sock"
        self.listen = f"127.0.0.1:{port}" if port else f"unix:{self.path}"
        self.url = f"http://127.0.0.1:{port}" if port else f"unix:{self.path}"
        self.log = folder / f"{self.path.name}.log"
        self.start()

    def start(self) -> None:
        tokens = self.folder / "tokens"
        if not tokens.exists():
            tokens.write_text(f"tests write,force {TOKEN}\nreader read {READ_TOKEN}\n")
            tokens.chmod(0o600)
        command = [leasehold_program(), "serve", "--store", self.store, "--listen", self.listen, "--tokens", str(tokens)]
        command += self.more
        with self.log.open("ab") as log:
            before = self.log.stat().st_size
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return b"listening on" in self.log.read_bytes()[before:]

        until(is_ready)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.kill()


class Proxy:
    """A TCP balancer in front of several servers. `cuts` decides for each answer whether the connection ends in place of it."""

    def __init__(self, ports: list[int], cuts: Callable[[bytes], bool] = lambda request: False) -> None:
        self.ports = ports
        self.cuts = cuts
        self.count = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = None
        for offset in range(len(self.ports)):
            try:
                server = socket.create_connection(("127.0.0.1", self.ports[(self.count + offset) % len(self.ports)]))
                break
            except OSError:
                continue
        self.count += 1
        if server is None:
            client.close()
            return
        requests: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._forward, args=(client, server, requests), daemon=True).start()
        try:
            while answer := server.recv(65536):
                request = requests.get()
                while not requests.empty():
                    request = requests.get()
                if self.cuts(request):
                    break
                client.sendall(answer)
        except OSError:
            pass
        _close(client)
        _close(server)

    def _forward(self, client: socket.socket, server: socket.socket, requests: "queue.Queue[bytes]") -> None:
        try:
            while request := client.recv(65536):
                requests.put(request)
                server.sendall(request)
        except OSError:
            pass
        _close(server)

    def stop(self) -> None:
        self.listener.close()


def _close(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    sock.close()


Reply = tuple[int, dict[str, str], Any]


class FakeServer:
    """Answers with what `reply(path, body)` returns: a status, headers and a body, or None to close the connection."""

    def __init__(self, reply: Callable[[str, dict[str, Any]], Reply | None]) -> None:
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
                fake.requests.append((self.path, body, dict(self.headers)))
                answer = reply(self.path, body)
                if answer is None:
                    self.close_connection = True
                    return
                status, headers, content = answer
                encoded = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(encoded)))
                self.end_headers()
                self.wfile.write(encoded)
                self.wfile.flush()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def grant(token: int = 7, expires_in_ms: int = 29_000, name: str = "a") -> dict[str, Any]:
    """A grant, as a server answers."""
    return {
        "lease": f"lease1.{name}.{token}",
        "kind": "mutex",
        "name": name,
        "token": token,
        "token_text": str(token),
        "expires_in_ms": expires_in_ms,
    }


def problem(code: str, status: int, *, try_another: bool = False, retry_after: int | None = None) -> Reply:
    headers = {"Content-Type": "application/problem+json"}
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    content = {
        "type": f"https://example.org/{code}",
        "code": code,
        "title": code,
        "status": status,
        "detail": f"the detail of {code}",
        "remedy": f"the remedy of {code}",
        "try_another": try_another,
    }
    return status, headers, content
