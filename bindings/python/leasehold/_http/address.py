"""Addresses of servers: `http://HOST[:PORT][/PREFIX]`, `https://…`, `unix:PATH`; several hosts are separated by commas."""

import os
import urllib.parse
from dataclasses import dataclass

from .._errors import InvalidInput

TOKEN_VARIABLE = "LEASEHOLD_HTTP_TOKEN"

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Server:
    """One address of a server. `socket` is the path of a Unix socket, and then there is no host."""

    host: str
    port: int = 0
    is_tls: bool = False
    prefix: str = ""
    socket: str | None = None

    @property
    def authority(self) -> str:
        """The `Host` header."""
        if self.socket is not None:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.is_tls else "http"] else f"{host}:{self.port}"

    def __str__(self) -> str:
        if self.socket is not None:
            return f"unix:{self.socket}"
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.prefix}"


def parse(address: str) -> tuple[Server, ...]:
    """The servers of an address, all of which have the same store."""
    scheme, colon, rest = address.partition(":")
    if colon and scheme == "unix":
        path = rest[2:] if rest.startswith("//") else rest
        if "?token=" in path:
            raise InvalidInput(f"the address of a server has no parameters; its token is token=… or {TOKEN_VARIABLE}")
        if not path or "\0" in path:
            raise InvalidInput(f"the address {address!r} has no path: unix:/run/leasehold/serve.sock")
        return (Server("", socket=path),)
    if scheme not in _PORTS or not rest.startswith("//"):
        raise InvalidInput("the address of a server begins with http://, https:// or unix:")
    hosts, slash, prefix = rest[2:].partition("/")
    if "@" in hosts:  # it is not repeated here: it may have a password
        raise InvalidInput(f"the address has a user or a password; a server wants a token: token=… or {TOKEN_VARIABLE}")
    if "?" in rest or "#" in rest or not rest.isprintable() or " " in rest:
        raise InvalidInput(f"the address of a server has neither parameters nor spaces; its token is token=… or {TOKEN_VARIABLE}")
    return tuple(_server(address, scheme, host, (slash + prefix).rstrip("/")) for host in hosts.split(","))


def _server(address: str, scheme: str, host: str, prefix: str) -> Server:
    try:
        parts = urllib.parse.urlsplit(f"{scheme}://{host}")
        name, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidInput(f"the address {address!r}: {error}") from None
    if not name:
        raise InvalidInput(f"the address {address!r} has an empty host")
    if not name.isascii():
        try:
            name = name.encode("idna").decode("ascii")
        except UnicodeError:
            raise InvalidInput(f"the address {address!r} has an invalid host") from None
    return Server(name, port or _PORTS[scheme], scheme == "https", prefix)


def token_of(token: str | None) -> str | None:
    """The bearer token that was given, or that of the environment."""
    value = os.environ.get(TOKEN_VARIABLE) if token is None else token
    if not value:
        return None
    value = value.strip()
    if not value.isascii() or not value.isprintable() or " " in value:  # the value itself is never shown
        raise InvalidInput("the token has characters that no token has")
    return value
