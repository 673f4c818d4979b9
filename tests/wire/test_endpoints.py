"""Where the broker may bind, and what it leaves there."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from zagent.errors import ConfigError
from zagent.wire.sockets import RouterSocket


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a short name: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="zt-", dir="/tmp") as place:
        yield Path(place)


def refused(endpoint: str) -> str:
    with pytest.raises(ConfigError) as caught:
        RouterSocket(endpoint)
    return str(caught.value)


def test_nothing_is_left_after_close(short: Path) -> None:
    """libzmq would leave the socket's file behind."""
    router = RouterSocket(f"ipc://{short}/b")
    assert os.listdir(short) == ["b"]
    router.close()
    assert os.listdir(short) == []
    router.close()


def test_a_file_that_is_no_socket_stays(short: Path) -> None:
    """libzmq would delete it."""
    (short / "b").write_text("precious")
    assert f"broker.endpoint 'ipc://{short}/b' cannot be bound: something that is no socket" in refused(
        f"ipc://{short}/b"
    )
    assert (short / "b").read_text() == "precious"


def test_a_socket_that_nobody_serves_is_taken_over(short: Path) -> None:
    """It was left by somebody who was killed."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(short / "b"))
    RouterSocket(f"ipc://{short}/b").close()


@pytest.mark.parametrize("endpoint", ["ipc://", "ipc://here", "ipc:///no/dir/b", "ipc:///tmp", "tcp://nonsense"])
def test_an_endpoint_that_cannot_be_bound_is_named(endpoint: str) -> None:
    """As `ConfigError`; no socket is kept."""
    assert refused(endpoint).startswith(f"broker.endpoint '{endpoint}' cannot be bound: ")


def test_an_endpoint_in_use_is_left_alone(short: Path) -> None:
    """ipc and tcp; the first broker still has it."""
    for endpoint in (f"ipc://{short}/b", "tcp://127.0.0.1:0"):
        first = RouterSocket(endpoint)
        assert "in use" in refused(first.endpoint)
        first.close()
