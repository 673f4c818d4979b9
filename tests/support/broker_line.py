"""What stands around a launcher's cluster: a line to the broker that remembers what was said, and ports."""

from __future__ import annotations

from launcher.ports import EnginePorts, Reservation


class Line:
    """Stands for `zagent.client.launcher_link.LauncherLink` and its class."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, str]] = []
        #: (pool, name, epoch, reason, crashed) of members that are gone.
        self.told: list[tuple[str, str, int, str, bool]] = []
        #: (name, epoch, slow) as it changed.
        self.slow: list[tuple[str, int, bool]] = []
        #: (pool, last words) of pools that were given up.
        self.gone: list[tuple[str, str]] = []
        self.closed = False

    def __call__(self, endpoint: str, secret: str) -> Line:
        self.opened.append((endpoint, secret))
        return self

    def exited(self, pool: str, name: str, epoch: int, reason: str, *, crashed: bool) -> None:
        self.told.append((pool, name, epoch, reason, crashed))

    def health(self, pool: str, name: str, epoch: int, *, slow: bool) -> None:
        self.slow.append((name, epoch, slow))

    def abandoned(self, pool: str, reason: str) -> None:
        self.gone.append((pool, reason))

    async def close(self) -> None:
        self.closed = True


class Ports(Reservation):
    """Ports that nobody binds: 1 and 2, 3 and 4, …"""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[EnginePorts] = []
        self.released: list[EnginePorts] = []

    def take(self) -> EnginePorts:
        first = 2 * len(self.taken) + 1
        self.taken.append(EnginePorts(first, first + 1))
        return self.taken[-1]

    def release(self, ports: EnginePorts) -> None:
        self.released.append(ports)
