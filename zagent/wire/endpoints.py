"""Where a broker serves: `ipc://PATH`, `tcp://HOST:PORT`, or `tcp://HOST:PORT?keys=FILE`, FILE being the client file
(zagent/wire/keys.py). An endpoint is all that a process needs to connect."""

from __future__ import annotations

from typing import NamedTuple

from zagent.errors import ConfigError

_KEYS = "?keys="


class Endpoint(NamedTuple):
    """``address`` is what ZeroMQ understands; ``keys`` the path of the client file, "" for none."""

    address: str
    keys: str = ""

    def __str__(self) -> str:
        return f"{self.address}{_KEYS}{self.keys}" if self.keys else self.address

    @property
    def path(self) -> str | None:
        """Of the socket's file; None for tcp."""
        return self.address.removeprefix("ipc://") if self.address.startswith("ipc://") else None


def parse(text: str) -> Endpoint:
    """The parts of an endpoint. All behind the first `?keys=` is the path, whatever characters it has; that of an ipc
    endpoint is a path anyway. Raises `ConfigError`."""
    if not text.startswith("tcp://"):
        return Endpoint(text)
    address, _, keys = text.partition(_KEYS)
    if "?" in address:
        raise ConfigError(f"{text!r}: after the port only ?keys=FILE may follow")
    return Endpoint(address, keys)
