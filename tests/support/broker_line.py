"""A broker's line that remembers what the launcher said."""

from __future__ import annotations


class Line:
    """Stands for `zagent.client.launcher_link.LauncherLink` and its class."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, str]] = []
        self.told: list[tuple[str, str, int, str]] = []
        #: (pool, last words) of pools that were given up.
        self.gone: list[tuple[str, str]] = []
        self.closed = False
        self.broken = False

    def __call__(self, endpoint: str, secret: str) -> Line:
        self.opened.append((endpoint, secret))
        return self

    async def exited(self, pool: str, name: str, epoch: int, reason: str) -> None:
        self.told.append((pool, name, epoch, reason))
        self._break()

    async def abandoned(self, pool: str, reason: str) -> None:
        self.gone.append((pool, reason))
        self._break()

    async def close(self) -> None:
        self.closed = True
        self._break()

    def _break(self) -> None:
        if self.broken:
            raise OSError("line dead")
