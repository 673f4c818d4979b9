"""What all our ZeroMQ sockets have in common, and the reasons for the numbers."""

from __future__ import annotations

import zmq

from zagent.wire.codec import MAX_FRAME

#: Messages queued towards one peer before it counts as gone. A peer is owed at most what it asked for
#: (`broker.max_pending` calls), so only a peer that stopped reading reaches it.
HIGH_WATER = 200_000
#: Undelivered messages are dropped this long after close, so that no exit hangs (libzmq's default is for ever).
LINGER_MS = 500
#: A connection is cut on which nothing has come for so long, not even an answer to a ping, in ms. By that a process
#: that is stopped is noticed, a cable that was pulled, and a half-open TCP connection.
SILENCE_MS = 10_000
#: Pause between two pings, in ms.
PING_MS = 2_000
#: A connection is cut that has not said by then who it is, in ms: noise, another protocol.
HANDSHAKE_MS = 10_000
#: Pause before a peer whose broker is gone tries again, in ms, doubled each time up to the maximum. A broker that is
#: started again is back in half a second, and waits two for its members.
RECONNECT_MS, RECONNECT_MAX_MS = 50, 300

_OPTIONS = {
    zmq.LINGER: LINGER_MS,
    zmq.SNDHWM: HIGH_WATER,
    zmq.RCVHWM: HIGH_WATER,
    zmq.MAXMSGSIZE: MAX_FRAME,  # of one frame; who announces more is cut off
    zmq.HEARTBEAT_IVL: PING_MS,
    zmq.HEARTBEAT_TIMEOUT: SILENCE_MS,
    # For the other side to act on: it cannot ping a peer that is stopped and whose queue is full.
    zmq.HEARTBEAT_TTL: SILENCE_MS,
    zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
    zmq.RECONNECT_IVL: RECONNECT_MS,
    zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS,
}


def configure(socket: zmq.Socket[bytes]) -> None:
    """Before it is bound or connected."""
    for option, value in _OPTIONS.items():
        socket.setsockopt(option, value)
