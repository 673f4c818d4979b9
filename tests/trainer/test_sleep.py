"""Engines that sleep, whatever happens meanwhile: a trainer, a broker and simulated engines, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.cluster_in_memory import Cluster
from support.trainers import Trainer, trainer, written_in_virtual_time
from support.virtual_clock import run
from zagent.engine.server import EngineServer
from zagent.errors import EngineError, StateError
from zagent.trainer.sleep import Sleep
from zagent.types import TokenOutput

__all__ = ["written_in_virtual_time"]
pytestmark = pytest.mark.usefixtures("written_in_virtual_time")

PROMPT = np.arange(10, 20, dtype=np.int32)


class World:
    """Two engines and a trainer, for the ``async with`` of a test."""

    def __init__(self, place: Path, mode: str = "hybrid") -> None:
        self._place, self._mode = place, mode

    async def __aenter__(self) -> World:
        self.cluster = await Cluster(latency=0.001, pulses=True).__aenter__()
        self.engines = [await self.cluster.engine(i, mode=self._mode) for i in range(2)]
        self.who, self.sleep = await self.trainer("one")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.cluster.__aexit__(*error)

    async def trainer(self, name: str) -> tuple[Trainer, Sleep]:
        who = await trainer(self.cluster, self._place / name)
        who.calls.link.keep()
        return who, Sleep(who.control, who.gate)

    def rows(self, count: int = 8) -> list[asyncio.Task[TokenOutput]]:
        """Calls of somebody who has no part in all this."""
        return [
            asyncio.create_task(self.who.llm.generate(f"s{i}", PROMPT, {"max_new_tokens": 4})) for i in range(count)
        ]

    def states(self) -> list[str]:
        return [str(member.state) for member in self.cluster.core.pools["engine"].members.values()]

    async def dies(self, index: int) -> None:
        """An engine is killed, and started again."""
        server = self.engines[index]
        self.cluster.die(server.link, server.member)
        await self.cluster.exited(server.link)
        self.engines[index] = await self.cluster.engine(index, epoch=2, mode=self._mode)
        await asyncio.sleep(0.1)

    async def update(self, who: Trainer, sleep: Sleep) -> None:
        """As `EngineControls` does it."""
        await who.update()
        await sleep.updated()


async def all_wait(rows: list[asyncio.Task[TokenOutput]], seconds: float = 20.0) -> None:
    await asyncio.sleep(seconds)
    assert not any(row.done() for row in rows)


async def all_done(rows: list[asyncio.Task[TokenOutput]]) -> None:
    assert [len(row.token_ids) for row in await asyncio.wait_for(asyncio.gather(*rows), 20.0)] == [4] * len(rows)


def releasing(server: EngineServer, seconds: float, error: Exception | None = None) -> None:
    """Memory is released so slowly from now on, or not at all."""

    async def release(tags: Any) -> dict[str, int]:
        await asyncio.sleep(seconds)
        if error is not None:
            raise error
        return dict.fromkeys(tags, 0)

    server.engine.release = release  # type: ignore[method-assign]


@pytest.mark.parametrize("kills", [1, 3])
def test_rows_wait_over_the_death_of_the_broker(kills: int, tmp_path: Path) -> None:
    """As often as it dies: they fail at no time, and are done after the whole cycle."""

    async def main() -> None:
        async with World(tmp_path) as world:
            await world.sleep.sleep(None)
            rows = world.rows()
            for _ in range(kills):
                await world.cluster.restart_broker(after_s=0.5)
                await all_wait(rows)
            assert world.states() == ["asleep", "asleep"]
            await world.sleep.wake_up(["weights"])
            await world.update(world.who, world.sleep)
            await world.cluster.restart_broker()
            await all_wait(rows)
            await world.sleep.wake_up(["kv_cache"])
            await all_done(rows)

    run(main())


@pytest.mark.parametrize("at_s", [0.001, 0.004, 0.006, 0.5])
def test_a_sleep_that_is_interrupted_is_undone(at_s: float, tmp_path: Path) -> None:
    """Whenever that is: engines wake up again, and rows run. One that was about to fall asleep is waited for."""

    async def main() -> None:
        async with World(tmp_path, "standalone") as world:
            for server in world.engines:
                releasing(server, 1.0)
            sleeping = asyncio.create_task(world.sleep.sleep(None))
            await asyncio.sleep(at_s)
            rows = world.rows()
            sleeping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sleeping
            await all_done(rows)
            assert world.states() == ["ready", "ready"]

    run(main())


def test_what_cannot_be_undone_leaves_the_documented_way(tmp_path: Path) -> None:
    """Weights that were released before another engine failed are garbage: no row runs on them before there are others,
    and none fails."""

    async def main() -> None:
        async with World(tmp_path) as world:
            for server in world.engines:
                releasing(server, 0.0, EngineError("it cannot") if server is world.engines[1] else None)
            with pytest.raises(EngineError, match="it cannot"):
                await world.sleep.sleep(None)
            rows = world.rows()
            assert world.states() == ["asleep", "asleep"]
            await all_wait(rows)
            await world.update(world.who, world.sleep)
            await all_done(rows)

    run(main())


@pytest.mark.parametrize("leaves", [True, False])
def test_engines_outsleep_their_trainer(leaves: bool, tmp_path: Path) -> None:
    """Whoever made them sleep closes, or is killed: rows wait until another one has woken them up."""

    async def main() -> None:
        async with World(tmp_path) as world:
            other, sleep = await world.trainer("other")
            await sleep.sleep(None)
            rows = world.rows()
            if leaves:
                other.calls.link.close("the trainer leaves")
            else:
                world.cluster.die(other.calls.link)
                world.cluster.forget(other.calls.link)
            await all_wait(rows)
            assert not world.cluster.core.pools["engine"].gates
            with pytest.raises(StateError, match="sleeps already"):
                await world.sleep.sleep(None)
            assert world.states() == ["asleep", "asleep"]
            await world.sleep.wake_up(["weights"])
            await world.update(world.who, world.sleep)
            await all_wait(rows)
            await world.sleep.wake_up(["kv_cache"])
            await all_done(rows)

    run(main())


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("order", [[["weights"], ["kv_cache"]], [None]])
def test_an_engine_that_dies_asleep_changes_nothing_about_the_order(
    both: bool, order: list[list[str] | None], tmp_path: Path
) -> None:
    """It is awake when it is back; rows wait for the others, and run at the end of the cycle."""

    async def main() -> None:
        async with World(tmp_path) as world:
            await world.sleep.sleep(None)
            rows = world.rows()
            await world.dies(1)
            if both:
                await world.dies(0)
            await all_wait(rows)
            await world.sleep.wake_up(order[0])
            await world.update(world.who, world.sleep)
            for tags in order[1:]:
                await all_wait(rows, 1.0)
                await world.sleep.wake_up(tags)
            await all_done(rows)
            assert world.states() == ["ready", "ready"]

    run(main())


def test_another_trainer_may_wake_them_up(tmp_path: Path) -> None:
    """Rows pass then, though who made them sleep has not heard of it, and says again that they do when the broker is
    another one; and it may make them sleep again."""

    async def main() -> None:
        async with World(tmp_path) as world:
            _, other = await world.trainer("two")
            await world.sleep.sleep(1)
            rows = world.rows()
            await all_wait(rows)
            await other.wake_up(None)
            await all_done(rows)
            await world.cluster.restart_broker()
            await asyncio.sleep(5)
            await all_done(world.rows())
            await world.sleep.sleep(1)
            rows = world.rows()
            await all_wait(rows)
            await world.sleep.wake_up(None)
            await all_done(rows)

    run(main())


def test_an_order_that_failed_on_the_way_may_be_given_again(tmp_path: Path) -> None:
    """An engine that has done it has nothing to do."""

    async def main() -> None:
        async with World(tmp_path, "standalone") as world:
            await world.sleep.sleep(1)
            restore, engine = world.engines[1].engine.restore, world.engines[1].engine

            async def fails(tags: Any) -> None:
                engine.restore = restore  # type: ignore[method-assign]
                raise StateError("not now")

            engine.restore = fails  # type: ignore[method-assign]
            with pytest.raises(StateError, match="not now"):
                await world.sleep.wake_up(None)
            rows = world.rows()
            await all_wait(rows, 1.0)
            await world.sleep.wake_up(None)
            await all_done(rows)
            with pytest.raises(StateError, match="kv_cache is not released: no engine sleeps"):
                await world.sleep.wake_up(["kv_cache"])

    run(main())


ORDERS: dict[str, Callable[[Trainer, Sleep], Any]] = {
    "update": lambda who, sleep: who.update(),
    "sleep": lambda who, sleep: sleep.sleep(1),
    "wake_up": lambda who, sleep: sleep.wake_up(None),
}


@pytest.mark.parametrize("order", ORDERS)
def test_two_trainers_do_not_change_engines_at_once(order: str, tmp_path: Path) -> None:
    """The second one is told so, and changes nothing; afterwards it may, and updates have versions of their own."""

    async def main() -> None:
        async with World(tmp_path) as world:
            other, sleep = await world.trainer("other")
            updating = asyncio.create_task(world.who.update())
            await asyncio.sleep(0.5)
            with pytest.raises(StateError, match="another trainer is updating"):
                await ORDERS[order](other, sleep)
            assert (await updating).version == 1
            assert (await other.update()).version == 2
            await all_done(world.rows())

    run(main())
