"""The keys of brokers that serve over TCP: CURVE pairs (ZeroMQ's RFC 26) in two files that only their owner can read.

The broker's file never leaves the launcher's host. The client file, `FILE.client`, holds what everybody else needs, on
whatever host: the broker's public key, and the one pair that all its peers share. Both are TOML.
"""

from __future__ import annotations

import os
import stat
import tomllib
from typing import NamedTuple

import zmq

from zagent.errors import ConfigError

#: Behind the path of the broker's file: the client file.
CLIENT_SUFFIX = ".client"


class ClientKeys(NamedTuple):
    """The client file."""

    broker_public: str
    client_public: str
    client_secret: str


class BrokerKeys(NamedTuple):
    """The broker's file."""

    broker_public: str
    client_public: str
    client_secret: str
    broker_secret: str

    @property
    def client(self) -> ClientKeys:
        """What belongs into the client file."""
        return ClientKeys(*self[:3])


def generate() -> BrokerKeys:
    """Keys that nobody else has."""
    (broker_public, broker_secret), (client_public, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    return BrokerKeys(broker_public.decode(), client_public.decode(), client_secret.decode(), broker_secret.decode())


def to_text(keys: BrokerKeys | ClientKeys) -> str:
    """A file's contents."""
    whose = (
        "The broker's: it stays here, mode 0600."
        if isinstance(keys, BrokerKeys)
        else "Lets into the cluster: copy it to hosts that take part, mode 0600."
    )
    return f"# zagent. {whose}\n" + "".join(f'{name} = "{value}"\n' for name, value in keys._asdict().items())


def read_broker(path: str) -> BrokerKeys:
    """The keys in the broker's file. Raises `ConfigError`, which names the file and what is wrong with it."""
    keys = BrokerKeys(*_read(path, BrokerKeys._fields))
    _check_pair(path, keys.broker_public, keys.broker_secret)
    _check_pair(path, keys.client_public, keys.client_secret)
    return keys


def read_client(path: str) -> ClientKeys:
    """The keys in a client file. Raises `ConfigError`, which names the file and what is wrong with it."""
    keys = ClientKeys(*_read(path, ClientKeys._fields))
    _check_pair(path, keys.client_public, keys.client_secret)
    return keys


def _read(path: str, names: tuple[str, ...]) -> list[str]:
    try:
        with open(path, "rb") as file:
            _check_private(path, os.fstat(file.fileno()))
            found = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"key file {path!r} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise ConfigError(f"key file {path!r} is none of ours: {error}") from error
    wrong = [name for name in names if _public_of(found.get(name)) is None]
    if wrong:
        raise ConfigError(f"key file {path!r} has no {', '.join(wrong)}")
    return [found[name] for name in names]


def _check_private(path: str, status: os.stat_result) -> None:
    """Whoever else can read it, or has written it, is not kept out."""
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"key file {path!r} is open to others (mode {stat.S_IMODE(status.st_mode):04o}): chmod 600 it"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"key file {path!r} belongs to another user (uid {status.st_uid})")


def _check_pair(path: str, public: str, secret: str) -> None:
    if _public_of(secret) != public:
        raise ConfigError(f"key file {path!r}: a secret key and its public key do not belong together")


def _public_of(secret: object) -> str | None:
    """The public key of a secret one. None for what is no key: any 32 bytes in Z85 (40 letters) are one."""
    try:
        return zmq.curve_public(secret.encode()).decode() if isinstance(secret, str) else None
    except (ValueError, zmq.ZMQError):
        return None
