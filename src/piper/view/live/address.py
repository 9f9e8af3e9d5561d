"""Address: where a user wants to serve in; a socket's address, and which hosts may be asked for, out."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import NamedTuple

from piper.errors import RunError

DEFAULT = "127.0.0.1:0"
_LEGAL = '"127.0.0.1:8080", or "HOST:PORT" of this machine; port 0 is a free one'


class Address(NamedTuple):
    """`host` is as the user gave it."""

    host: str
    port: int
    family: socket.AddressFamily

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    def url(self, port: int) -> str:
        """An address that stands for all of the machine's is seen at its name."""
        anywhere = ipaddress.ip_address(self.host).is_unspecified
        host = socket.gethostname() if anywhere else self.host
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def address_of(text: str) -> Address:
    """Of `HOST:PORT`; a name becomes the number that it has."""
    parts = re.fullmatch(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>\d{1,5})", text)
    if parts is None or int(parts["port"]) > 0xFFFF:
        raise RunError(f"{text!r} is no address to serve at", legal=_LEGAL)
    host = parts["six"] or parts["host"]
    try:
        found = socket.getaddrinfo(host, int(parts["port"]), type=socket.SOCK_STREAM)
    except OSError as error:
        raise RunError(f"{text!r} is no address to serve at: {error}", legal=_LEGAL) from None
    family, _, _, _, numbers = min(found, key=lambda each: each[0] != socket.AF_INET)
    return Address(str(numbers[0]), int(parts["port"]), family)


def may_ask(host: str, address: Address) -> bool:
    """Whether a request's Host is a number of this machine, or a name that no other can have: pages
    elsewhere can have their own name point here. The port is not looked at: a tunnel has another."""
    name = _name_of(host)
    if not name:
        return False
    try:
        number = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or (not address.is_loopback and name == _own_name())
    return number.is_loopback or not address.is_loopback


def _name_of(host: str) -> str:
    parts = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]\s]+))(?::\d{1,5})?", host)
    return (parts[1] or parts[2]).lower() if parts else ""


def _own_name() -> str:
    return socket.gethostname().lower()
