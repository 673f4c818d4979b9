"""What becomes of a socket's connections, as libzmq tells it."""

from __future__ import annotations

import struct
from collections import Counter
from contextlib import suppress
from itertools import count

import zmq

_numbers = count()
#: Of a frame that says which event it was; its value follows.
_EVENT = struct.Struct("=H")


class Monitor:
    """Tells of the ``events`` (a mask of zmq's) of a socket. ``socket`` is readable when there are new ones."""

    def __init__(self, watched: zmq.Socket[bytes], events: int) -> None:
        address = f"inproc://monitor-{next(_numbers)}"
        watched.monitor(address, events)
        self._watched = watched
        self.socket: zmq.Socket[bytes] = watched.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.RCVHWM, 0)  # libzmq's only I/O thread would wait here for room
        self.socket.connect(address)

    def take(self) -> Counter[int]:
        """How many of each event there were since the last time."""
        events: Counter[int] = Counter()
        with suppress(zmq.Again):
            while True:
                event, _ = self.socket.recv_multipart(zmq.NOBLOCK)
                events[_EVENT.unpack_from(event)[0]] += 1
        return events

    def close(self) -> None:
        """Before the watched socket is."""
        self._watched.monitor(None, 0)
        self.socket.close(linger=0)
