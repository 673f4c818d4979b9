"""The launcher's line to the broker: who has exited, and who will not come back."""

from __future__ import annotations

import asyncio
from functools import partial

from zagent.client.link import Identity, Link
from zagent.errors import PoolLost, to_wire
from zagent.wire.codec import encode_body
from zagent.wire.messages import Abandoned, Exited
from zagent.wire.sockets import DealerChannel


class LauncherLink:
    """Reports exits; knows the join secret, since anybody else's word is refused. Opened by the first report."""

    def __init__(self, endpoint: str, secret: str) -> None:
        self._endpoint, self._secret = endpoint, secret
        self._link: Link | None = None
        self._opening = asyncio.Lock()

    async def exited(self, pool: str, name: str, epoch: int, reason: str) -> None:
        """That member's process is gone. Raises `ConnectionLost` when the broker does not answer."""
        (await self._open()).send(Exited(pool, name, epoch, reason), control=True)

    async def abandoned(self, pool: str, reason: str) -> None:
        """No member of that pool is left or will come back: its calls end in `PoolLost` with that reason."""
        (await self._open()).send(Abandoned(pool), encode_body(to_wire(PoolLost(reason))), control=True)

    async def _open(self) -> Link:
        async with self._opening:  # in order of the calls
            if self._link is None:
                link = Link(partial(DealerChannel, self._endpoint), Identity(name="launcher", secret=self._secret))
                await link.open()
                self._link = link
            return self._link

    async def close(self) -> None:
        """Say goodbye."""
        if self._link is not None:
            self._link.close()
