"""Where the broker's socket is bound: what may be in the way, who can reach it, and how many."""

from __future__ import annotations

import os
import resource
import socket
import stat
import sys
from contextlib import suppress

import zmq

from zagent.errors import ConfigError
from zagent.wire.endpoints import Endpoint

#: Longest path of a Unix socket on Linux, in bytes.
IPC_PATH_MAX = 107
#: Files that the process may open, where it is allowed to: a peer takes two, and the usual limit is 1024.
FILES = 65_536
#: Of the files it may open, what is kept free, or a quarter of them: more than are taken between two looks.
SPARE_FILES = 4096
#: Connections that wait to be accepted: all peers come at once when the broker has been started again.
ACCEPTS_WAITING = 2048
#: What the name of a shut door's file ends in.
SHUT = "~"


class Door:
    """Where a socket is bound. An ipc door is shut while files are short, for libzmq ends the process when it cannot
    accept: who is there is served, newcomers try again, and whoever says nothing is cut off after a while.

    Raises:
        ConfigError: the address is taken or malformed; names it.
    """

    def __init__(self, bound: zmq.Socket[bytes], address: str) -> None:
        # Those come in when an ipc door is shut, too.
        most = ACCEPTS_WAITING if Endpoint(address).path is None else spare_files() // 2
        bound.setsockopt(zmq.BACKLOG, min(ACCEPTS_WAITING, most))
        self.address = _bind(bound, address)
        self._path = Endpoint(self.address).path
        self._open = True
        self._left = files_left()

    def entered(self, count: int) -> None:
        """So many connections have come since the last time."""
        self._left -= count
        if self._path is not None and (not self._open or self._left < spare_files()):
            self._left = files_left()
            self._mind(self._path)

    def _mind(self, path: str) -> None:
        """Shut: the file has another name, under which nobody looks for it."""
        if self._open and self._left < spare_files():
            text = f"files are short ({_limit()} by ulimit -n, {self._left} left): nobody new is let in"
            print(text, file=sys.stderr, flush=True)
            self._open = False
            _rename(path, path + SHUT)
        elif not self._open and self._left >= spare_files() * 5 // 4:
            self._open = True
            _rename(path + SHUT, path)

    def remove(self) -> None:
        """Once the socket is closed: libzmq leaves the file behind."""
        if self._path is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._path if self._open else self._path + SHUT)
            self._path = None


def _rename(path: str, to: str) -> None:
    with suppress(FileNotFoundError):  # somebody has deleted it: nobody comes in that way any more
        os.rename(path, to)


def _bind(bound: zmq.Socket[bytes], address: str) -> str:
    """Bind; the address that came of it. A socket's file is for its owner only, wherever it lies."""
    before = os.umask(0o077)
    try:
        _refuse_taken(Endpoint(address).path)
        bound.bind(address)
    except (zmq.ZMQError, OSError) as error:
        raise ConfigError(f"broker.endpoint {address!r} cannot be bound: {error}") from error
    finally:
        os.umask(before)
    return bound.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # type: ignore[union-attr]


def _refuse_taken(path: str | None) -> None:
    """Binding an ipc path silently deletes whatever is there; ask first whether somebody answers."""
    if path is None:
        return
    if not os.path.isabs(path):
        raise OSError("the path must be absolute")
    if len(os.fsencode(path)) > IPC_PATH_MAX:
        raise OSError(f"path is longer than {IPC_PATH_MAX} bytes")
    if os.path.lexists(path) and not stat.S_ISSOCK(os.stat(path).st_mode):
        raise OSError("something that is no socket is there")
    if _answers(path):
        raise OSError("address already in use")


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # it would wait for a stopped process that has not accepted the ones before
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            pass
    return True


def files_left() -> int:
    """How many files this process may still open. Takes milliseconds where ten thousand are open."""
    return _limit() - len(os.listdir("/proc/self/fd"))


def spare_files() -> int:
    """How many must be left."""
    return min(_limit() // 4, SPARE_FILES)


def _limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def allow_files() -> None:
    """Raise this process's limit of open files to `FILES`, or as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
