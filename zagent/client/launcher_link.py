"""The launcher's line to the broker: who has exited."""

from __future__ import annotations

from functools import partial

from zagent.client.link import Identity, Link
from zagent.wire.messages import Exited
from zagent.wire.sockets import DealerChannel


class LauncherLink:
    """Reports exits; knows the join secret, since anybody else's word is refused. Opened by the first report."""

    def __init__(self, endpoint: str, secret: str) -> None:
        self._endpoint, self._secret = endpoint, secret
        self._link: Link | None = None

    async def exited(self, pool: str, name: str, epoch: int, reason: str) -> None:
        """That member's process is gone. Raises `ConnectionLost` when the broker does not answer."""
        if self._link is None:
            link = Link(partial(DealerChannel, self._endpoint), Identity(name="launcher", secret=self._secret))
            await link.open()
            self._link = link
        self._link.send(Exited(pool, name, epoch, reason), control=True)

    async def close(self) -> None:
        """Say goodbye."""
        if self._link is not None:
            self._link.close()
