"""The launcher's line to the broker: who has exited, who is slow, and which pool nobody will serve any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from zagent.client.link import Identity, Link
from zagent.errors import PoolLost, ZagentError, to_wire
from zagent.wire.codec import Buffer, encode_body
from zagent.wire.messages import Abandoned, Exited, Health, Message
from zagent.wire.sockets import DealerChannel

logger = logging.getLogger(__name__)

#: Pause before the next try, where no broker has answered.
AGAIN_S = 1.0


class LauncherLink:
    """Reports that nobody waits for: they reach the broker that is there, or the next one, and what still holds is said
    again to one that knows nothing of it. Knows the join secret, since anybody else's word is refused.

    Made within a running loop, on which it connects by itself.
    """

    def __init__(self, endpoint: str, secret: str) -> None:
        self._endpoint, self._secret = endpoint, secret
        self._link: Link | None = None
        #: What was last said about each: ("exited", pool, name) and the like.
        self._said: dict[tuple[str, ...], tuple[Message, Sequence[Buffer]]] = {}
        self._connecting = asyncio.get_running_loop().create_task(self._stay_connected())

    def exited(self, pool: str, name: str, epoch: int, reason: str, *, crashed: bool) -> None:
        """That member's process is gone; ``crashed``: by itself."""
        self._say(("exited", pool, name), Exited(pool, name, epoch, reason, crashed))

    def health(self, pool: str, name: str, epoch: int, *, slow: bool) -> None:
        """That member is slow, or no longer."""
        self._say(("health", pool, name), Health(pool, name, epoch, slow))

    def abandoned(self, pool: str, reason: str) -> None:
        """No member of that pool is left or will come back: its calls end in `PoolLost` with that reason."""
        self._say(("abandoned", pool), Abandoned(pool), encode_body(to_wire(PoolLost(reason))))

    async def close(self) -> None:
        """Hang up."""
        self._connecting.cancel()
        await asyncio.wait([self._connecting])
        if self._link is not None:
            self._link.close()

    def _say(self, about: tuple[str, ...], message: Message, body: Sequence[Buffer] = ()) -> None:
        self._said[about] = (message, body)
        if self._link is not None and not self._link.closed:
            self._link.send(message, body, control=True)

    def _say_all(self) -> None:
        assert self._link is not None
        for message, body in self._said.values():
            self._link.send(message, body, control=True)

    async def _stay_connected(self) -> None:
        while True:
            link = Link(partial(DealerChannel, self._endpoint), Identity(name="launcher", secret=self._secret))
            try:
                await link.open()
            except ZagentError as error:
                logger.warning("no line to the broker: %s", error)
                await asyncio.sleep(AGAIN_S)
                continue
            link.keep()
            link.on_rejoin(lambda _same: self._say_all())
            self._link = link
            self._say_all()
            logger.warning("the line to the broker is closed: %s", await link.wait_closed())
