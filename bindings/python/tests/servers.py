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
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
LIMIT = 60.0
"""Seconds that nothing in these tests takes on a machine that works, however busy it is."""
TOKEN = "4f1c7a0e9b2d6853a1f04c7e9d2b8365"
READ_TOKEN = "7be2f4906d1c5a38c9e0b7142fd68a05"


def until(condition: Callable[[], Any], otherwise: str = "the condition did not hold in time") -> Any:
    """Looks again and again until the condition holds, and returns its value."""
    end = time.monotonic() + LIMIT
    while not (value := condition()):
        assert time.monotonic() < end, otherwise
        time.sleep(0.005)
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


def postgres_program(name: str) -> str:
    candidates = [shutil.which(name), *map(str, sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True))]
    found = next((program for program in candidates if program), None)
    assert found, f"{name} is missing: apt-get install postgresql"
    return found


class Redis:
    """A server of Redis on a Unix socket, and, if a port is given, on TCP."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        self.socket = folder / "redis.sock"
        self.port = port
        self.log = folder / "redis.log"
        self.start()

    def start(self) -> None:
        command = [redis_program(), "--port", str(self.port), "--unixsocket", str(self.socket), "--save", "", "--dir", str(self.socket.parent)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self._answers, "the server does not answer")

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(LIMIT)
                connection.connect(str(self.socket))
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False

    @property
    def url(self) -> str:
        return f"redis+unix:{self.socket}"

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Postgres:
    """A server of PostgreSQL on a free port. It does not run as root, so `nobody` does."""

    SETTINGS = ("fsync=off", "max_connections=400", "shared_buffers=16MB", "log_min_messages=warning")

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="leasehold-postgres-"))
        self.user = 65_534 if os.geteuid() == 0 else None
        if self.user:
            os.chown(self.folder, self.user, self.user)
        self.port = free_port()
        data = str(self.folder / "data")
        self._start("initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync").wait()
        settings = [*self.SETTINGS, "listen_addresses=127.0.0.1", f"port={self.port}", f"unix_socket_directories={self.folder}"]
        self.process = self._start("postgres", "-D", data, *(word for setting in settings for word in ("-c", setting)))
        until(self._answers, "the server does not answer")

    def _start(self, program: str, *arguments: str) -> "subprocess.Popen[bytes]":
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen([postgres_program(program), *arguments], stdout=log, stderr=log, cwd=self.folder, user=self.user, group=self.user)

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()
        done = subprocess.run([postgres_program("pg_isready"), "-h", "127.0.0.1", "-p", str(self.port)], stdout=subprocess.DEVNULL, check=False)
        return done.returncode == 0

    @property
    def url(self) -> str:
        return f"postgres://postgres@127.0.0.1:{self.port}/postgres"

    def stop(self) -> None:
        # Its own processes end with it.
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait()
        shutil.rmtree(self.folder)


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
