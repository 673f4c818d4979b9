"""New weights while brokers are started again, trainers give up or die, and engines come late: on virtual time."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.cluster_in_memory import Cluster
from support.trainers import Trainer, loading, trainer, written_in_virtual_time
from support.virtual_clock import run
from zagent.engine.server import EngineServer
from zagent.errors import EngineError, WeightUpdateError
from zagent.types import TokenOutput

__all__ = ["written_in_virtual_time"]
pytestmark = pytest.mark.usefixtures("written_in_virtual_time")

MODES = ("wait", "abort", "in_place")
PROMPT = np.arange(10, 110, dtype=np.int32)
SIM: dict[str, Any] = {"decode_tokens_per_s": 10}
TENSORS = {"w": torch.zeros(3)}


def now() -> float:
    return asyncio.get_running_loop().time()


async def until(at_s: float) -> None:
    await asyncio.sleep(at_s - now())


def call(who: Trainer, tokens: int = 100, session: str = "s") -> asyncio.Task[TokenOutput]:
    """Ten tokens a second."""
    return asyncio.create_task(who.llm.generate(session, PROMPT, {"max_new_tokens": tokens}))


def states(cluster: Cluster) -> dict[str, tuple[str, int]]:
    return {name: (str(m.state), m.version) for name, m in cluster.core.pools["engine"].members.items()}


def serving(version: int) -> dict[str, tuple[str, int]]:
    return dict.fromkeys(("engine-0", "engine-1"), ("ready", version))


async def settled(cluster: Cluster, who: Trainer, version: int) -> None:
    """Nothing of an update is left: engines serve that version and take calls, nothing is gated or in flight."""
    calls = [call(who, 10, f"after {i}") for i in range(2)]
    assert [(await one).versions for one in calls] == [[(version, 0, 10)]] * 2
    assert not cluster.core.pools["engine"].gates
    assert await who.weights.version() == version
    assert states(cluster) == serving(version)
    await asyncio.sleep(0.1)
    assert cluster.quiet()
    assert not any(member.directed for member in cluster.core.pools["engine"].members.values())


async def world(cluster: Cluster, place: Path, **config: Any) -> tuple[Trainer, list[EngineServer]]:
    """Two engines that need 4 s for new weights, and a trainer."""
    engines = [await cluster.engine(i, **SIM) for i in range(2)]
    for server in engines:
        loading(server, 4)
    return await trainer(cluster, place, **config), engines


# ---- given up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at_s", [1.5, 1.9015, 1.9035, 1.906, 2.5, 4.0])
def test_an_update_that_is_cancelled_leaves_engines_that_serve(at_s: float, mode: str, tmp_path: Path) -> None:
    """While it writes, at the gate, while a call of 3 s ends, while engines load: the gate is open and nothing is
    paused. What engines have begun to load they finish, and serve then, all of them."""

    async def main() -> None:
        async with Cluster(latency=0.001) as cluster:
            who, engines = await world(cluster, tmp_path)
            asked = [loading(server, 0) for server in engines]
            await until(0.9)
            running = call(who, 20)
            updating = asyncio.create_task(who.update(mode, source=TENSORS))
            await until(at_s)
            updating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await updating
            began = any(asked)
            assert began == (at_s > (2.9 if mode == "wait" else 1.91))
            assert len(who.written()) == began
            assert len((await running).token_ids) == 20
            await until(20)
            await settled(cluster, who, 1 if began else 0)
            again = await who.update(mode, source=TENSORS)
            assert again.version == (2 if began else 1)
            assert len(who.written()) == 1
            await settled(cluster, who, again.version)

    run(main())


def test_engines_finish_what_the_trainer_gave_up(tmp_path: Path) -> None:
    """Half-loaded weights are nobody's: both load to the end, and say what they serve."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, _ = await world(cluster, tmp_path)
            updating = asyncio.create_task(who.update(source=TENSORS))
            await until(3)
            updating.cancel()
            await until(4.5)
            assert states(cluster) == serving(0)
            await until(5.5)
            assert states(cluster) == serving(1)
            await settled(cluster, who, 1)

    run(main())


def test_an_engine_that_fails_with_nobody_to_tell_gives_up(tmp_path: Path) -> None:
    """Nobody knows what it serves: its process ends."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, engines = await world(cluster, tmp_path)
            loading(engines[1], 4, EngineError("no room"))
            updating = asyncio.create_task(who.update(source=TENSORS))
            await until(3)
            updating.cancel()
            await until(8)
            assert [server.failed.done() for server in engines] == [False, True]
            assert "no room" in engines[1].failed.result()
            await until(20)  # no process ends here: what it has begun does

    run(main())


@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_a_trainer_that_dies_leaves_no_engine_paused(mode: str, tmp_path: Path) -> None:
    """The gate opens and what is paused goes on, on whatever weights there are; another trainer brings the next."""

    async def main() -> None:
        async with Cluster() as cluster:
            dying, engines = await world(cluster, tmp_path / "a")
            who = await trainer(cluster, tmp_path / "b")
            running = call(who, 40)
            await until(1)
            updating = asyncio.create_task(dying.update(mode, source=TENSORS))
            await until(3)
            assert [server.engine.in_flight() for server in engines] == ([0, 0] if mode == "abort" else [1, 0])
            cluster.die(dying.calls.link)
            cluster.forget(dying.calls.link)
            answer = await running
            assert now() == pytest.approx(6 if mode == "abort" else 5, abs=1.2)
            assert len(answer.token_ids) == 40
            await until(10)
            await settled(cluster, who, 1)
            assert (await who.update(mode)).version == 2
            await settled(cluster, who, 2)
            updating.cancel()
            await asyncio.gather(updating, return_exceptions=True)

    run(main())


@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_a_trainer_that_dies_with_the_broker_leaves_no_engine_paused(mode: str, tmp_path: Path) -> None:
    """The next broker knows of no caller who could have paused them: after 10 s they go on by themselves."""

    async def main() -> None:
        async with Cluster(pulses=True) as cluster:
            dying, engines = await world(cluster, tmp_path / "a")
            who = await trainer(cluster, tmp_path / "b")
            for link in cluster.links:
                link.keep()
            running = call(who, 40)
            await until(1)
            updating = asyncio.create_task(dying.update(mode, source=TENSORS))
            await until(3)
            assert [server.engine.in_flight() for server in engines] == ([0, 0] if mode == "abort" else [1, 0])
            cluster.die(dying.calls.link)
            await cluster.restart_broker()
            assert len((await running).token_ids) == 40
            assert now() < 20
            await settled(cluster, who, 1)
            assert (await who.update(mode)).version == 2
            await settled(cluster, who, 2)
            updating.cancel()
            await asyncio.gather(updating, return_exceptions=True)

    run(main())


# ---- brokers that are started again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at_s", [2.5, 5.0, 7.9, 8.1])
@pytest.mark.parametrize("away_s", [0.0, 1.0])
def test_a_broker_that_dies_meanwhile_is_waited_for(mode: str, at_s: float, away_s: float, tmp_path: Path) -> None:
    """While a call is waited for, while engines load, when they are done: the update is whole, and every call is
    answered. One that reaches the new broker before it hears of the gate runs on either version, and says which."""

    async def main() -> None:
        async with Cluster(pulses=True) as cluster:
            who, _ = await world(cluster, tmp_path)
            for link in cluster.links:
                link.keep()
            running = call(who, 40)
            updating = asyncio.create_task(who.update(mode, source=TENSORS))
            await until(at_s)
            await cluster.restart_broker(after_s=away_s)
            waiting = call(who, 10, "t")
            done = await updating
            assert (done.version, set(done.engines.values())) == (1, {"updated"})
            assert len((await running).token_ids) == 40
            assert (await waiting).versions in ([(1, 0, 10)], [(int(mode != "wait"), 0, 10)])
            await settled(cluster, who, 1)

    run(main())


def test_a_new_broker_hears_what_is_served(tmp_path: Path) -> None:
    """By the engines and the trainer: the version goes on counting from there, also where all engines have died with
    the broker; the new ones load the weights."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, engines = await world(cluster, tmp_path)
            await who.update(source=TENSORS, version=5)
            await cluster.restart_broker()
            assert await who.weights.version() == 5
            await settled(cluster, who, 5)
            cluster.kill_broker()
            for server in engines:
                cluster.die(server.link, server.member)
            cluster.start_broker([])
            assert await who.weights.version() == 5
            for i in range(2):
                await cluster.engine(i, epoch=2, **SIM)
            assert (await call(who, 10)).versions == [(5, 0, 10)]
            await asyncio.sleep(0.1)
            await settled(cluster, who, 5)
            assert (await who.update()).version == 6

    run(main())


def test_the_next_version_is_not_that_of_a_broker_without_memory(tmp_path: Path) -> None:
    """A trainer that has brought no weights itself asks a broker that has just been started again, before the engines
    are back: it waits until they have said what they serve."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, engines = await world(cluster, tmp_path / "a")
            other = await trainer(cluster, tmp_path / "b")
            await who.update(source=TENSORS, version=3)
            for server in engines:
                greet = server.link._greet
                server.link._greet = partial(asyncio.get_running_loop().call_later, 1.0, greet)  # type: ignore[method-assign]
            cluster.kill_broker()
            cluster.die(who.calls.link)
            await asyncio.sleep(1)
            cluster.start_broker()
            assert (await other.update(source=TENSORS)).version == 4
            await settled(cluster, other, 4)

    run(main())


# ---- latecomers -----------------------------------------------------------------------------------------------------


def test_a_latecomer_loads_the_weights_before_it_serves(tmp_path: Path) -> None:
    """From the directory, which is kept for it; until then it gets nothing, however busy the others are."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, _ = await world(cluster, tmp_path)
            await who.update(source=TENSORS)
            await who.update(source=TENSORS)
            server = await cluster.engine(2, **SIM)
            asked = loading(server, 4)
            running = [call(who, 10, f"s{i}") for i in range(20)]
            await asyncio.sleep(3)
            assert states(cluster)["engine-2"] == ("stale", 0)
            assert server.counts["calls"] == 0
            assert {tuple((await one).versions) for one in running} == {((2, 0, 10),)}
            await asyncio.sleep(2)
            assert states(cluster)["engine-2"] == ("ready", 2)
            assert asked == [str(who.place / who.written()[0])]

    run(main())


def test_a_latecomer_hears_of_newer_weights_while_it_loads(tmp_path: Path) -> None:
    """It loads those as well, and serves the latest alone."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, _ = await world(cluster, tmp_path)
            await who.update(size=1)
            server = await cluster.engine(2, **SIM)
            asked = loading(server, 4)
            await asyncio.sleep(1)
            await who.control.broker("set_version", ["engine", 2, str(tmp_path / "source-2")])
            await who.control.broker("set_version", ["engine", 3, str(tmp_path / "source-1")])
            await asyncio.sleep(20)
            assert [Path(place).name for place in asked] == ["source-1", "source-1"]
            assert states(cluster)["engine-2"] == ("ready", 3)

    run(main())


def test_an_update_comes_while_a_latecomer_loads(tmp_path: Path) -> None:
    """It takes part in it, after what it had begun."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, _ = await world(cluster, tmp_path)
            await who.update(source=TENSORS)
            server = await cluster.engine(2, **SIM)
            asked = loading(server, 4)
            await asyncio.sleep(1)
            done = await who.update(source=TENSORS)
            assert done.engines == dict.fromkeys(("engine-0", "engine-1", "engine-2"), "updated")
            assert len(asked) == 2
            assert states(cluster)["engine-2"] == ("ready", 2)

    run(main())


def test_a_latecomer_whose_weights_cannot_be_loaded_gives_up(tmp_path: Path) -> None:
    """Its process ends, and says why; whatever the reason."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, _ = await world(cluster, tmp_path)
            await who.update()
            for i, error in enumerate((EngineError("no room"), KeyError("no such thing"))):
                server = await cluster.engine(2 + i, **SIM)
                loading(server, 1, error)
                await asyncio.sleep(2)
                assert server.failed.result().startswith("version 1 of the weights cannot be loaded: ")
                assert states(cluster)[f"engine-{2 + i}"] == ("stale", 0)

    run(main())


def test_weights_in_no_file_are_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They came over a process group: the latecomer says so, and gets calls after the next update."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, _ = await world(cluster, tmp_path)
            await who.control.broker("set_version", ["engine", 4, ""])
            await asyncio.sleep(1)
            assert states(cluster) == dict.fromkeys(("engine-0", "engine-1"), ("stale", 0))
            waiting = call(who, 10)
            assert (await who.update()).version == 5
            assert (await waiting).versions == [(5, 0, 10)]
            await settled(cluster, who, 5)

    run(main())
    assert "waiting for weights beyond version 0" in capsys.readouterr().err


# ---- abort_all_requests ---------------------------------------------------------------------------------------------


def test_all_calls_are_broken_off_and_go_on_later(tmp_path: Path) -> None:
    """Nothing is in flight until generation is resumed; then each goes on where it was."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, _ = await world(cluster, tmp_path)
            running = [call(who, 40, f"s{i}") for i in range(6)]
            await until(2.05)
            await who.weights.abort()
            assert now() == pytest.approx(2.05, abs=0.01)
            assert (cluster.in_flight(), cluster.quiet()) == ({"engine-0": 0, "engine-1": 0}, False)
            late = call(who, 10)
            await until(7)
            assert not late.done()
            await who.gate.open("aborted")
            assert [len((await one).token_ids) for one in running] == [40] * 6
            assert now() == pytest.approx(9, abs=0.1)
            await settled(cluster, who, 0)

    run(main())


def test_new_weights_may_come_while_all_is_broken_off(tmp_path: Path) -> None:
    """The gate stays closed after the update, for the other reason."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, _ = await world(cluster, tmp_path)
            running = call(who, 40)
            await until(2.05)
            await who.weights.abort()
            for mode in MODES:
                await who.update(mode)
            await asyncio.sleep(5)
            assert cluster.in_flight() == {"engine-0": 0, "engine-1": 0}
            await who.gate.open("aborted")
            assert (await running).versions == [(0, 0, 20), (3, 20, 40)]
            await settled(cluster, who, 3)

    run(main())


def test_what_cannot_be_broken_off_opens_the_gate_again(tmp_path: Path) -> None:
    """The error says that nothing has changed: calls pass, and no engine is paused."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, engines = await world(cluster, tmp_path, update_timeout_s=3.0)

            async def pause(mode: str) -> None:
                await asyncio.sleep(1000)

            for server in engines:
                server.engine.pause = pause  # type: ignore[method-assign]
            running = call(who, 100)
            await until(1)
            aborting = asyncio.create_task(who.weights.abort())
            await until(2)
            aborting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await aborting
            assert (await call(who, 10, "t")).versions == [(0, 0, 10)]
            await running
            await settled(cluster, who, 0)

    run(main())


def test_all_engines_refuse_while_all_is_broken_off(tmp_path: Path) -> None:
    """Reasons do not mix: the failed update lets its own go, and no other."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, engines = await world(cluster, tmp_path)
            await who.weights.abort()
            for server in engines:
                loading(server, 0, EngineError("no room"))
            with pytest.raises(WeightUpdateError):
                await who.update()
            assert cluster.core.pools["engine"].gates == {(who.calls.link.nonce, "aborted")}
            await who.gate.open("aborted")
            assert cluster.core.pools["engine"].gates == set()

    run(main())
