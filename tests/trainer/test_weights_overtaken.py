"""Orders to engines travel on a lane of their own, and overtake calls that are on their way: on virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.cluster_in_memory import Cluster
from support.trainers import loading, trainer, written_in_virtual_time
from support.virtual_clock import run
from zagent.client.link import DATA
from zagent.wire.channel import Frames, MemoryRouter

__all__ = ["written_in_virtual_time"]
pytestmark = pytest.mark.usefixtures("written_in_virtual_time")

PROMPT = np.arange(10, 110, dtype=np.int32)


class SlowData(MemoryRouter):
    """What the broker sends to members' data lanes takes three seconds."""

    slow: frozenset[bytes] = frozenset()

    def send(self, identity: bytes, frames: Frames) -> bool:
        if identity in self.slow:
            asyncio.get_running_loop().call_later(3.0, super().send, identity, [bytes(frame) for frame in frames])
            return True
        return super().send(identity, frames)


@pytest.mark.parametrize("mode", ["abort", "in_place", "all off"])
def test_calls_that_an_order_overtakes_do_not_hold_it_up(mode: Any, tmp_path: Path) -> None:
    """They come to engines that are paused: an abort breaks them off as well, and they go on behind it; or they wait
    for the end of the update, which does not wait for them."""

    async def main() -> None:
        router = SlowData()
        async with Cluster(router=router) as cluster:
            servers = [await cluster.engine(i, decode_tokens_per_s=10) for i in range(2)]
            who = await trainer(cluster, tmp_path)
            for server in servers:
                loading(server, 4)
            router.slow = frozenset(DATA + server.link.nonce for server in servers)
            loop = asyncio.get_running_loop()
            params = {"max_new_tokens": 20, "logprobs": True}
            calls = [asyncio.create_task(who.llm.generate(f"s{i}", PROMPT, params)) for i in range(8)]
            await asyncio.sleep(0.5)
            began = loop.time()
            if mode == "all off":
                await who.weights.abort()
                assert loop.time() - began < 3
                await asyncio.sleep(9)
                assert not any(one.done() for one in calls)
                await who.gate.open("aborted")
            else:
                done = await who.update(mode)
                assert done.seconds["drain"] < 2
            answers = await asyncio.gather(*calls)
            assert [len(answer.token_ids) for answer in answers] == [20] * 8
            assert {answer.versions[0][0] for answer in answers} == {0 if mode == "all off" else 1}
            await asyncio.sleep(9)
            assert cluster.quiet()

    run(main())
