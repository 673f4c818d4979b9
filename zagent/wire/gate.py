"""The gate of a broker over TCP: who has not got the client key does not get in."""

from __future__ import annotations

from contextlib import suppress

import zmq
from zmq.utils import z85

from zagent.wire.keys import BrokerKeys

#: Where libzmq asks whether a peer may come in (ZAP, ZeroMQ's RFC 27); in the broker's own context.
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
#: Name of what is guarded. Without one libzmq would let everybody in who can encrypt, whenever nobody answers it.
ZAP_DOMAIN = b"broker"


class Gate:
    """Answers the questions that `socket` is ready with; all methods on the broker's thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: BrokerKeys) -> None:
        self._keys = keys
        #: As ZAP names it: 32 bytes.
        self._client = z85.decode(keys.client_public)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.bind(ZAP_ENDPOINT)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Let nobody connect to ``socket``, which is not bound yet, but who knows its key and has the client key."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.broker_secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def answer(self) -> None:
        """Whoever asks now."""
        with suppress(zmq.Again):
            while True:
                version, request, *_, mechanism, key = self.socket.recv_multipart(zmq.NOBLOCK)
                known = mechanism == b"CURVE" and key == self._client
                verdict = [b"200", b"OK"] if known else [b"400", b"No access"]
                self.socket.send_multipart([version, request, *verdict, b"", b""], zmq.NOBLOCK)
