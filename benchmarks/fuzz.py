"""Messages that no honest peer sends: noise, messages that were changed, and well-formed ones that are not true."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any, get_type_hints

import msgpack
import numpy as np

from zagent import __version__
from zagent.wire.codec import MAX_ARRAYS, MAX_HEADER, encode_body
from zagent.wire.messages import KINDS, WIRE_VERSION, Call, Hello, Message

Frames = list[bytes]

#: What fields of that name hold that are right, or nearly.
PLAUSIBLE: dict[str, list[Any]] = {
    "attempt": [1, 1, 1, 2, 0, -1, 2**31, 2**63],
    "pool": ["engine"] * 6 + ["broker", "worker", "nobody", ""],
    # Not the broker's `drain` and `remove`: whoever is let in may take members out of the cluster.
    "method": ["generate", "chat", "stats", "parse_tool_calls", "status", "about", "__init__", "nothing", ""],
    "session": ["", "s1", "s2", "session-1-1", "s" * 5000],
    "group": ["", "", "g1", "g" * 5000],
    "remaining_ms": [0, 1, 50, 1000, -5, -(2**63)],
    "member": [""] * 6 + ["engine-0", "nobody"],
    "incarnation": [0, 1, 2, -1, 2**63],
    "name": ["engine-0", "engine-1", "worker-0", "launcher", ""],
    "epoch": [0, 1, 2, 99, -1, 2**63],
    "credits": [1, 512, 0, -1, 2**63],
    "secret": ["", "guessed", "s" * 64],
    "package": [__version__, __version__, __version__, "0"],
    "python": ["", "/usr/bin/python3"],
    "number": [0, 1, 7, -1, 2**63],
    "reason": ["", "so it is", "r" * 1000],
    "version": [0, 1, -1, 2**63],
    "weights": ["", "/nowhere", "w" * 5000],
}
#: Values that bodies are made of.
ATOMS: list[Any] = [None, True, 0, -1, 2**64 - 1, 1.5, float("nan"), "", "text", "ü" * 50, b"", b"\xff\xfe"]
#: Heads and bodies that say they are much more than they are, or are deep.
BOMBS = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\x91" * 3000,
    b"\x81\xa1k" * 1000,
    b"\xdc\x0f\xff" + b"\x90" * 4095,
    b"\x9f" + b"\x80" * 15,
    b"\xdc\x00\xff" * 500,
]


class Fuzz:
    """An endless supply, the same for the same ``seed``. ``nonce``: of the peer that sends them, 8 bytes."""

    def __init__(self, seed: int, nonce: bytes = bytes(8)) -> None:
        self._random = random.Random(seed)
        self._nonce = nonce
        self._calls = 0
        self._sent: deque[Frames] = deque(maxlen=100)
        self._makers: tuple[Callable[[], Frames], ...] = (
            self._noise,
            self._truncated,
            self._mutated,
            self._mutated,
            self._invented,
            self._invented,
            self._replayed,
            self._unknown,
            self._forged,
            self._oversized,
            self._bomb,
        )

    def message(self) -> Frames:
        """The next one: at least one frame."""
        made = self._random.choice(self._makers)()
        self._sent.append(made)
        return made

    # ---- well-formed ------------------------------------------------------------------------------------------------

    def _invented(self) -> Frames:
        """Any kind of message, with fields of the right types."""
        kind = self._random.choice(list(KINDS.values()))
        return self._frames(kind(*(self._field(name, hint) for name, hint in get_type_hints(kind).items())))

    def _forged(self) -> Frames:
        """A member's hello without the join secret, or what only members and the launcher may say."""
        kinds = [kind for kind in KINDS.values() if kind is not Call]
        kind = Hello if self._random.random() < 0.5 else self._random.choice(kinds)
        return self._frames(kind(*(self._field(name, hint) for name, hint in get_type_hints(kind).items())))

    def _replayed(self) -> Frames:
        return self._random.choice(self._sent) if self._sent else self._invented()

    def _frames(self, message: Message) -> Frames:
        number = next(number for number, kind in KINDS.items() if type(message) is kind)
        return [msgpack.packb([WIRE_VERSION, number, *message]), *self._body()]

    def _field(self, name: str, hint: type) -> Any:
        if name == "call":
            self._calls += 1
            own = self._nonce + self._calls.to_bytes(8, "big")
            return self._random.choice([own, own, own, own[:-1], self._random.randbytes(16), b""])
        if name == "connection":
            return self._random.choice([0, 0, 0, 1])
        if hint is bool:
            return self._random.random() < 0.5
        return self._random.choice(PLAUSIBLE[name])

    def _body(self) -> Frames:
        choice = self._random.random()
        if choice < 0.3:
            prompt = np.arange(self._random.randrange(1, 50), dtype=np.int32)
            return [
                bytes(f) for f in encode_body([prompt, {"max_new_tokens": self._random.randrange(-1, 9)}, None, None])
            ]
        if choice < 0.7:
            return [bytes(frame) for frame in encode_body(self._value(3))]
        return [self._random.randbytes(self._random.randrange(20)) for _ in range(self._random.randrange(3))]

    def _value(self, depth: int) -> Any:
        choice = self._random.random()
        if not depth or choice < 0.5:
            return self._random.choice(ATOMS)
        size = self._random.randrange(4)
        if choice < 0.8:
            return [self._value(depth - 1) for _ in range(size)]
        return {self._random.choice(["held", "version", "pid", "x"]): self._value(depth - 1) for _ in range(size)}

    # ---- malformed --------------------------------------------------------------------------------------------------

    def _noise(self) -> Frames:
        sizes = (self._random.choice([0, 1, 10, 200]) for _ in range(self._random.randrange(1, 5)))
        return [self._random.randbytes(size) for size in sizes]

    def _truncated(self) -> Frames:
        frames = self._invented()
        number = self._random.randrange(len(frames))
        frames[number] = frames[number][: self._random.randrange(len(frames[number]) + 1)]
        return frames[: number + 1]

    def _mutated(self) -> Frames:
        frames = self._invented()
        for _ in range(self._random.randrange(1, 4)):
            number = self._random.randrange(len(frames))
            frames[number] = self._changed(frames[number])
            if self._random.random() < 0.1:
                frames.insert(self._random.randrange(len(frames) + 1), self._random.choice(frames))
        return frames

    def _changed(self, frame: bytes) -> bytes:
        at = self._random.randrange(len(frame) + 1)
        choice = self._random.randrange(4)
        if choice == 0 and at < len(frame):
            return frame[:at] + bytes([frame[at] ^ (1 << self._random.randrange(8))]) + frame[at + 1 :]
        if choice == 1:
            return frame[:at] + self._random.randbytes(self._random.randrange(1, 5)) + frame[at:]
        if choice == 2:
            return frame[:at] + frame[at + self._random.randrange(1, 5) :]
        return frame[:at] + self._random.choice(BOMBS)[:50] + frame[at:]

    def _unknown(self) -> Frames:
        """A kind or a wire version that there is not."""
        frames = self._invented()
        values = msgpack.unpackb(frames[0])
        values[self._random.randrange(2)] = self._random.choice([0, -1, 99, 2**63, None, "Call", b"", [1], 1.0])
        return [msgpack.packb(values), *frames[1:]]

    def _oversized(self) -> Frames:
        frames = self._invented()
        choice = self._random.randrange(20)
        if choice == 0:
            return [*frames, *[b""] * (MAX_ARRAYS + 1)]
        if choice < 10:
            return [frames[0] + bytes(MAX_HEADER), *frames[1:]]
        return [*frames, *[b""] * self._random.randrange(50)]

    def _bomb(self) -> Frames:
        bomb = self._random.choice(BOMBS)
        frames = self._invented()
        if self._random.random() < 0.3:
            return [bomb, *frames[1:]]
        if self._random.random() < 0.3:
            return [frames[0][:3] + bomb, *frames[1:]]
        return [frames[0], bomb]
