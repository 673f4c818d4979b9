"""Where the broker may bind, and what it leaves there."""

from __future__ import annotations

import os
import resource
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from launcher import rundir
from support.echo import PATIENCE_S, Echo
from support.processes import eventually
from support.raw_peer import RawPeer, message
from zagent.errors import ConfigError
from zagent.wire import binding
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


def test_a_socket_whose_backlog_is_full_is_in_use(short: Path) -> None:
    """Its process is stopped, say: it is not waited for."""
    with socket.socket(socket.AF_UNIX) as stopped, socket.socket(socket.AF_UNIX) as waiting:
        stopped.bind(str(short / "b"))
        stopped.listen(0)
        waiting.connect(str(short / "b"))
        assert "in use" in refused(f"ipc://{short}/b")


def test_a_sockets_file_is_for_its_owner(short: Path) -> None:
    """Also in a directory that is open to all, whatever the umask, which stays as it was."""
    short.chmod(0o777)
    before = os.umask(0)
    try:
        router = RouterSocket(f"ipc://{short}/b")
        refused(f"ipc://{short}/b")
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((short / "b").stat().st_mode) == 0o700
    router.close()


STRANGER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as stranger:
    try:
        stranger.connect(sys.argv[1])
    except PermissionError:
        print("refused")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_another_user_cannot_connect(short: Path) -> None:
    """Not to a socket in a run directory, and not to one where everybody may look."""
    short.chmod(0o777)
    run = rundir.create("run-1", [short])
    for endpoint in (f"ipc://{run.path}/b", f"ipc://{short}/b"):
        router = RouterSocket(endpoint)
        command = [sys.executable, "-S", "-c", STRANGER, endpoint.removeprefix("ipc://")]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=True)
        router.close()
        assert done.stdout == "refused\n"


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never lowered, and never beyond what the process may."""
    limits = {"now": (0, 0)}
    monkeypatch.setattr(binding.resource, "getrlimit", lambda which: limits["now"])
    monkeypatch.setattr(binding.resource, "setrlimit", lambda which, new: limits.update(now=new))
    endless = binding.resource.RLIM_INFINITY
    for before, after in {
        (1024, 4096): (4096, 4096),
        (1024, 10**6): (binding.FILES, 10**6),
        (1024, endless): (binding.FILES, endless),
        (10**6, endless): (10**6, endless),
        (endless, endless): (endless, endless),
    }.items():
        limits["now"] = before
        binding.allow_files()
        assert limits["now"] == after


def test_nobody_new_is_let_in_while_files_are_short(
    short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever is there is served; it is said once; the door opens when there is some room again, not at the first."""
    left = [1000]
    monkeypatch.setattr(binding, "files_left", lambda: left[0])
    monkeypatch.setattr(binding, "spare_files", lambda: 100)
    with Echo(f"ipc://{short}/b") as echo, RawPeer(echo.endpoint).shake_hands(b"d-1") as first:

        def when(now: int) -> list[str]:
            """The files there are, once the broker has looked."""
            left[0] = now
            for _ in range(2):  # the first look may have begun before
                echo.looks.clear()
                assert echo.looks.wait(PATIENCE_S)
            return os.listdir(short)

        assert when(100) == ["b"]  # nobody has come who would make it count
        RawPeer(echo.endpoint).shake_hands(b"d-2").socket.close()
        assert when(99) == ["b"]
        for _ in range(901):
            RawPeer(echo.endpoint).socket.close()
        eventually(lambda: os.listdir(short) == ["b~"])
        with pytest.raises(FileNotFoundError):
            RawPeer(echo.endpoint)
        first.send(message([b"hello"]))
        assert first.receive() == [b"hello"]
        assert when(124) == ["b~"]
        assert when(125) == ["b"]
        RawPeer(echo.endpoint).shake_hands(b"d-3").socket.close()
    assert capsys.readouterr().err.count("nobody new is let in") == 1
    assert os.listdir(short) == []


def test_a_door_that_is_shut_leaves_nothing_either(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file has another name; a file that is gone already is no trouble."""
    monkeypatch.setattr(binding, "files_left", lambda: 0)
    for stolen in (False, True):
        router = RouterSocket(f"ipc://{short}/b")
        router._door.entered(1)
        assert os.listdir(short) == ["b~"]
        if stolen:
            (short / "b~").unlink()
            monkeypatch.setattr(binding, "files_left", lambda: 10**6)
            router._door.entered(1)
        router.close()
        assert os.listdir(short) == []


def test_a_broker_may_open_as_many_files_as_it_is_allowed_to(short: Path) -> None:
    """Else the 512th peer would not be let in, with the usual limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] // 2, before[1]))
    try:
        RouterSocket(f"ipc://{short}/b").close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > before[0] // 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_fewer_wait_at_the_door_than_may_still_come_in(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are let in even when it is shut; over TCP none is harmed by too many."""
    monkeypatch.setattr(binding, "spare_files", lambda: 100)
    for endpoint, most in ((f"ipc://{short}/b", 50), ("tcp://127.0.0.1:0", binding.ACCEPTS_WAITING)):
        router = RouterSocket(endpoint)
        assert router._socket.getsockopt(zmq.BACKLOG) == most
        router.close()
