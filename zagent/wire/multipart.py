"""Messages of several frames on a ZeroMQ socket, sent and received without ever waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from zagent.wire.channel import Frames

#: Messages taken in one go before other work gets its turn; at about 10 µs each this bounds the delay to some ms.
BATCH = 512
#: Messages up to this number are taken only after a look whether there is one: it costs a third of the exception that
#: says there is none (3 µs). In larger batches the exception is cheaper than looks.
LOOKS = 4
#: Received frames from this size on (bytes) are handed on without a copy. Smaller ones share libzmq's receive buffer of
#: this size with their neighbours, so that keeping one would keep all.
UNCOPIED_FROM = 8192

# Plain ints, for arithmetic on zmq's enums costs as much as the send itself (1.5 µs a message).
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
# Without the Python wrappers of `zmq.Socket`, which serve other socket types and options and cost as much again.
_send_frame = zmq.backend.Socket.send
_receive_frame = zmq.backend.Socket.recv
_get_option: Callable[[zmq.Socket[bytes], int], Any] = zmq.backend.Socket.get
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)

_Message = TypeVar("_Message")


def send(socket: zmq.Socket[bytes], frames: Frames) -> None:
    """`send_multipart`, never waiting. Raises `zmq.Again` when the queue is full; nothing was sent then."""
    for frame in frames[:-1]:
        _send_frame(socket, frame, _NOBLOCK_MORE)
    _send_frame(socket, frames[-1], _NOBLOCK)


def receive(socket: zmq.Socket[bytes]) -> Frames:
    """`recv_multipart`, never waiting: bytes, and a `zmq.Frame` for each frame from `UNCOPIED_FROM` on (a buffer as
    well, and sent on without a copy). Raises `zmq.Again` when nothing is there."""
    frames: list[Any] = []
    while True:
        frame = _receive_frame(socket, _NOBLOCK, False)
        frames.append(frame.bytes if len(frame) < UNCOPIED_FROM else frame)
        if not frame.more:
            return frames


def receive_from(socket: zmq.Socket[bytes]) -> tuple[bytes, Frames]:
    """Of a ROUTER: the sender's identity, which is never the last frame, and `receive`."""
    sender: bytes = _receive_frame(socket, _NOBLOCK)
    return sender, receive(socket)


def first(socket: zmq.Socket[bytes], receive: Callable[[zmq.Socket[bytes]], _Message]) -> list[_Message]:
    """The message that the descriptor tells of, without a look for it; none where it told of something else. Whoever
    waits for one message alone gets it before anybody looks for more."""
    try:
        return [receive(socket)]
    except zmq.Again:
        return []


def rest(socket: zmq.Socket[bytes], receive: Callable[[zmq.Socket[bytes]], _Message]) -> list[_Message]:
    """All that is there, up to `BATCH` messages. Once there is none, the descriptor tells of the next."""
    batch: list[_Message] = []
    try:
        while len(batch) < BATCH and (len(batch) >= LOOKS or _get_option(socket, _EVENTS) & _POLLIN):
            batch.append(receive(socket))
    except zmq.Again:
        return batch
    return batch
