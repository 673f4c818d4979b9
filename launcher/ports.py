"""TCP ports that SGLang wants to be told: found free, held until the engine is spawned."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass

from zagent.errors import StartupError

#: Below the ephemeral range (32768 and up), where any outgoing connection may take a port; SGLang's own guesses lie
#: within too. A random place in it keeps runs on one host apart.
FIRST, LAST = 20_000, 31_000
#: With attention data parallelism SGLang also binds `port` + 233 and the six after it.
DERIVED = tuple(range(233, 240))
#: A host with half of these ports taken still gives a block of nine within some hundred tries.
TRIES = 2_000


@dataclass(frozen=True, slots=True)
class EnginePorts:
    """``nccl_port`` for torch.distributed, ``port`` as the base of SGLang's derived ports."""

    nccl_port: int
    port: int


class Reservation:
    """Ports held by bound sockets. Not thread-safe; one per run."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._held: dict[int, socket.socket] = {}
        self._given: set[int] = set()

    def take(self) -> EnginePorts:
        """A free set for one more engine, distinct from all given before. Raises `StartupError` if there is none."""
        nccl_port = self._block(())
        return EnginePorts(nccl_port, self._block(DERIVED))

    def release(self, ports: EnginePorts) -> None:
        """Stop holding: call right before the engine is spawned. The numbers are not given again."""
        for number in (ports.nccl_port, ports.port, *(ports.port + step for step in DERIVED)):
            held = self._held.pop(number, None)
            if held is not None:
                held.close()

    def close(self) -> None:
        """Let go of everything."""
        while self._held:
            self._held.popitem()[1].close()

    def _block(self, derived: tuple[int, ...]) -> int:
        for _ in range(TRIES):
            first = self._random.randrange(FIRST, LAST)
            if self._hold([first, *(first + step for step in derived)]):
                return first
        raise StartupError(f"no free TCP ports for an engine between {FIRST} and {LAST}")

    def _hold(self, numbers: list[int]) -> bool:
        if self._given.intersection(numbers):
            return False
        bound: dict[int, socket.socket] = {}
        for number in numbers:
            probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            bound[number] = probe
            try:
                probe.bind(("", number))
            except OSError:  # in use: try elsewhere
                for taken in bound.values():
                    taken.close()
                return False
        self._held.update(bound)
        self._given.update(numbers)
        return True
