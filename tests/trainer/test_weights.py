"""New weights into an engine pool: a trainer, a broker and simulated engines in memory, on virtual time."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.cluster_in_memory import Cluster
from support.sim_engines import request, started
from support.trainers import WRITE_S, Trainer, loading, trainer, written_in_virtual_time
from support.virtual_clock import run
from support.weights import weights_directory
from zagent.engine.server import EngineServer
from zagent.engine.sim import SimEngine
from zagent.errors import (
    DeadlineExceeded,
    EngineError,
    InputError,
    PoolLost,
    StateError,
    WeightUpdateError,
    to_wire,
)
from zagent.types import TokenOutput
from zagent.wire.codec import encode_body

__all__ = ["written_in_virtual_time"]
pytestmark = pytest.mark.usefixtures("written_in_virtual_time")

MODES = ("wait", "abort", "in_place")
PROMPT = np.arange(10, 110, dtype=np.int32)
SIM: dict[str, Any] = {"decode_tokens_per_s": 10}
STAGES = ["write", "gate", "drain", "update", "reopen"]


def now() -> float:
    return asyncio.get_running_loop().time()


async def until(at_s: float) -> None:
    await asyncio.sleep(at_s - now())


def call(who: Trainer, tokens: int = 100, session: str = "s") -> asyncio.Task[TokenOutput]:
    """Ten tokens a second."""
    params = {"max_new_tokens": tokens, "logprobs": True}
    return asyncio.create_task(who.llm.generate(session, PROMPT, params))


def states(cluster: Cluster) -> dict[str, tuple[str, int]]:
    return {name: (str(m.state), m.version) for name, m in cluster.core.pools["engine"].members.items()}


def serving(version: int, *names: str) -> dict[str, tuple[str, int]]:
    return dict.fromkeys(names or ("engine-0", "engine-1"), ("ready", version))


async def settled(cluster: Cluster, who: Trainer, version: int) -> None:
    """Nothing of an update is left: engines serve that version and take calls, nothing is gated or in flight."""
    assert (await call(who, 10, "after")).versions == [(version, 0, 10)]
    assert not cluster.core.pools["engine"].gates
    assert await who.weights.version() == version
    await asyncio.sleep(0.1)
    assert cluster.quiet()
    assert not any(member.directed for member in cluster.core.pools["engine"].members.values())


class World:
    """Two engines and a trainer, for the ``async with`` of a test."""

    def __init__(self, place: Path, **options: Any) -> None:
        self._place, self._options = place, options

    async def __aenter__(self) -> tuple[Cluster, Trainer, list[EngineServer]]:
        self._cluster = await Cluster().__aenter__()
        engines = [await self._cluster.engine(i, **SIM) for i in range(2)]
        return self._cluster, await trainer(self._cluster, self._place, **self._options), engines

    async def __aexit__(self, *error: object) -> None:
        await self._cluster.__aexit__(*error)


# ---- an update ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_an_update_of_idle_engines(mode: str, tmp_path: Path) -> None:
    """All serve the new version, and it says what took how long, which engines have the weights, and their checksum."""

    async def main() -> None:
        async with World(tmp_path) as (cluster, who, engines):
            for server, seconds in zip(engines, (2, 3), strict=True):
                loading(server, seconds)
            done = await who.update(mode)
            assert (done.version, done.engines) == (1, {"engine-0": "updated", "engine-1": "updated"})
            assert list(done.seconds) == STAGES
            assert [round(seconds) for seconds in done.seconds.values()] == [1, 0, 0, 3, 0]  # side by side
            assert done.checksum == await engines[0].engine.checksum() != ""
            assert states(cluster) == serving(1)
            await settled(cluster, who, 1)

    run(main())


def test_wait_lets_running_calls_end(tmp_path: Path) -> None:
    """On the former weights, as long as they take; what comes meanwhile waits for the new ones."""

    async def main() -> None:
        async with World(tmp_path) as (cluster, who, _):
            long, short = call(who), call(who, 30, "t")
            await until(2)
            updating = asyncio.create_task(who.update())
            await until(4)
            late = call(who, 10, "u")
            done = await updating
            assert now() == pytest.approx(10, abs=0.2)
            assert done.seconds["drain"] == pytest.approx(7, abs=0.2)
            answers = [await one for one in (long, short, late)]
            assert [answer.versions for answer in answers] == [[(0, 0, 100)], [(0, 0, 30)], [(1, 0, 10)]]
            assert now() == pytest.approx(11, abs=0.3)
            await settled(cluster, who, 1)

    run(main())


@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_running_calls_go_on_with_the_new_weights(mode: str, tmp_path: Path) -> None:
    """Both modes: no token is lost or sampled twice, each says which weights sampled it, and nobody waits for the end
    of a call. The tokens are those that engines with these weights give by hand."""

    async def main() -> None:
        async with World(tmp_path) as (cluster, who, engines):
            running = [call(who, 100, f"s{i}") for i in range(8)]
            await until(2.05)
            for server in engines:
                loading(server, 2)
            done = await who.update(mode)
            assert now() == pytest.approx(5.05, abs=0.2)
            assert done.seconds["drain"] < 0.2
            answers = await asyncio.gather(*running)
            assert now() == pytest.approx(12, abs=0.3)
            for answer in answers:
                (old, first, changed), (new, begin, end) = answer.versions
                assert (old, first, begin, new, end) == (0, 0, changed, 1, 100)
                assert 29 <= changed <= 31
                fresh = await started()
                assert answer.token_ids[:changed].tolist() == (await by_hand(fresh, PROMPT, changed)).tolist()
                await fresh.update_weights(engines[0].link.identity.facts["weights"], 1, flush=True)
                after = await by_hand(fresh, np.concatenate([PROMPT, answer.token_ids[:changed]]), 100 - changed)
                assert answer.token_ids[changed:].tolist() == after.tolist()
                assert len(answer.log_probs) == 100
            await settled(cluster, who, 1)

    run(main())


async def by_hand(engine: SimEngine, prompt: np.ndarray, tokens: int) -> np.ndarray:
    return (await engine.generate(request(prompt, tokens))).token_ids  # type: ignore[return-value]


@pytest.mark.parametrize("mode", MODES)
def test_nothing_passes_while_engines_differ(mode: str, tmp_path: Path) -> None:
    """One takes its time to load: calls wait until both have the weights, and none is of two versions unknowingly."""

    async def main() -> None:
        async with World(tmp_path) as (cluster, who, engines):
            loading(engines[1], 20)
            updating = asyncio.create_task(who.update(mode))
            calls = []
            for second in range(2, 20, 3):
                await until(second)
                calls.append(call(who, 5, f"s{second}"))
                assert cluster.in_flight() == {"engine-0": 0, "engine-1": 0}
            await updating
            assert {tuple((await one).versions) for one in calls} == {((1, 0, 5),)}
            await settled(cluster, who, 1)

    run(main())


def test_updates_at_once_follow_each_other(tmp_path: Path) -> None:
    """Each has its own version, in order of the calls."""

    async def main() -> None:
        async with World(tmp_path) as (cluster, who, _):
            updates = [asyncio.create_task(who.update(mode, size=4 + i)) for i, mode in enumerate(MODES)]
            done = await asyncio.gather(*updates)
            assert [one.version for one in done] == [1, 2, 3]
            assert len({one.checksum for one in done}) == 3
            await settled(cluster, who, 3)

    run(main())


def test_versions_may_be_named(tmp_path: Path) -> None:
    """Any number above the present one; others are refused, and nothing has happened."""

    async def main() -> None:
        async with World(tmp_path) as (cluster, who, _):
            assert (await who.update(version=7)).version == 7
            for wrong in (7, 6, 0, -1, True, 8.0, "8"):
                with pytest.raises(InputError, match=r"does not follow 7|is a whole number"):
                    await who.update(version=wrong)  # type: ignore[arg-type]
            assert (await who.update()).version == 8
            await settled(cluster, who, 8)

    run(main())


def test_a_mode_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    """With those there are."""

    async def main() -> None:
        async with World(tmp_path) as (cluster, who, _):
            with pytest.raises(InputError, match="wait, abort, in_place, got 'now'"):
                await who.update("now")
            await settled(cluster, who, 0)

    run(main())


def test_a_second_trainer_knows_the_version(tmp_path: Path) -> None:
    """One that joined later counts on, and each keeps the directory of its own latest weights."""

    async def main() -> None:
        async with World(tmp_path / "a") as (cluster, who, _):
            other = await trainer(cluster, tmp_path / "b")
            tensors = {"w": torch.zeros(3)}
            await who.update(source=tensors)
            assert await other.weights.version() == 1
            assert (await other.update(source=tensors)).version == 2
            assert (await who.update(source=tensors)).version == 3
            assert [len(one.written()) for one in (who, other)] == [1, 1]
            await settled(cluster, who, 3)

    run(main())


def test_two_trainers_at_once_do_not_pass_for_each_other(tmp_path: Path) -> None:
    """The second hears that it is not its turn, has written nothing, and nothing is restarted; afterwards it may, and
    its weights have a version of their own."""

    async def main() -> None:
        async with World(tmp_path / "a") as (cluster, who, engines):
            other = await trainer(cluster, tmp_path / "b")
            first = asyncio.create_task(who.update(source={"w": torch.zeros(3)}))
            await asyncio.sleep(0)
            second = asyncio.create_task(other.update(source={"w": torch.zeros(5)}))
            assert (await first).version == 1
            with pytest.raises(StateError, match="another trainer is updating"):
                await second
            assert (other.written(), states(cluster)) == ([], serving(1))
            assert [server.link.closed for server in engines] == ["", ""]
            await settled(cluster, who, 1)
            assert (await other.update(source={"w": torch.zeros(5)})).version == 2
            await settled(cluster, who, 2)

    run(main())


# ---- what is written ------------------------------------------------------------------------------------------------


def test_only_the_latest_weights_are_kept(tmp_path: Path) -> None:
    """For engines that come later; a directory of the user's is not touched."""

    async def main() -> None:
        async with World(tmp_path) as (_, who, engines):
            for i in range(3):
                await who.update(source={"w": torch.zeros(i + 1)})
                (name,) = who.written()
                assert name.startswith(f"{i + 1}-")
                assert engines[0].link.identity.facts["weights"] == str(who.place / name)
            await who.update(size=9)
            assert who.written() == []
            assert (tmp_path / "source-9" / "model.safetensors").exists()
            assert engines[0].link.identity.facts["weights"] == str(tmp_path / "source-9")

    run(main())


def test_weights_that_do_not_fit_reach_nobody(tmp_path: Path) -> None:
    """They are refused before the gate closes; nothing is left of them."""
    reference = tmp_path / "reference"
    reference.mkdir()

    async def main() -> None:
        async with Cluster() as cluster:
            (server,) = [await cluster.engine(0, **SIM)]
            weights_directory(reference, 4)
            who = await trainer(cluster, tmp_path, reference)
            asked = loading(server, 0)
            for wrong in ({"w": torch.zeros(5)}, {"v": torch.zeros(4)}, {}, 7, str(tmp_path / "nowhere")):
                with pytest.raises(InputError):
                    await who.update(source=wrong)
            assert (who.written(), asked) == ([], [])
            await settled(cluster, who, 0)
            await who.update(source={"w": torch.zeros(4)})
            await settled(cluster, who, 1)

    run(main())


# ---- engines that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_refuses_is_started_again(mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is taken out; the other one serves the new weights. When it is back, it loads them before it gets a call."""

    async def main() -> None:
        async with World(tmp_path) as (cluster, who, engines):
            running = [call(who, 40, f"s{i}") for i in range(4)]
            await until(1)
            loading(engines[1], 0, EngineError("no room"))
            done = await who.update(mode, source={"w": torch.zeros(3)})
            assert done.engines == {"engine-0": "updated", "engine-1": "restarted"}
            assert states(cluster) == {"engine-0": ("ready", 1), "engine-1": ("dead", 0)}
            assert [len((await one).token_ids) for one in running] == [40] * 4
            back = await cluster.engine(1, epoch=2, **SIM)
            assert states(cluster)["engine-1"] == ("stale", 0)
            await asyncio.sleep(0.1)
            assert states(cluster) == serving(1)
            assert await back.engine.checksum() == done.checksum
            assert "refused the hello" in engines[1].link.closed  # so its process ends
            await settled(cluster, who, 1)

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "engine engine-1 did not take version 1 of the weights: no room" in caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_all_or_nothing(mode: str, tmp_path: Path) -> None:
    """None takes them: an error that says why, the version is what it was, the gate is open, nothing is left of the
    weights, and engines that are started again serve as before."""

    async def main() -> None:
        async with World(tmp_path) as (cluster, who, engines):
            await who.update(source={"w": torch.zeros(3)})
            running = call(who, 40)
            await until(3)
            for server in engines:
                loading(server, 1, EngineError("no room"))
            with pytest.raises(WeightUpdateError, match=r"no engine took version 2 of the weights.*no room"):
                await who.update(mode, source={"w": torch.zeros(5)})
            assert await who.weights.version() == 1
            (name,) = who.written()
            assert name.startswith("1-")
            assert not cluster.core.pools["engine"].gates
            for i in range(2):
                await cluster.engine(i, epoch=2, **SIM)
            assert {version for version, _, _ in (await running).versions} == {1}
            await asyncio.sleep(0.1)
            assert states(cluster) == serving(1)
            await settled(cluster, who, 1)

    run(main())


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_dies_meanwhile_is_no_obstacle(mode: str, tmp_path: Path) -> None:
    """Its life after that is not taken for the one that failed, though it begins before the update ends; it waits for
    the weights."""

    async def main() -> None:
        async with World(tmp_path) as (cluster, who, engines):
            for server in engines:
                loading(server, 10)
            updating = asyncio.create_task(who.update(mode, source={"w": torch.zeros(3)}))
            await until(3)
            cluster.die(engines[1].link, engines[1].member)
            await cluster.exited(engines[1].link)
            await until(5)
            back = await cluster.engine(1, epoch=2, **SIM)
            assert (await updating).engines == {"engine-0": "updated", "engine-1": "restarted"}
            await asyncio.sleep(0.1)
            assert (states(cluster), back.link.closed) == (serving(1), "")
            await settled(cluster, who, 1)

    run(main())


@pytest.mark.parametrize("mode", MODES)
def test_the_only_engine_dies_as_it_loads(mode: str, tmp_path: Path) -> None:
    """It may be for the weights: an error, and the gate is open for the next one, which serves what there was."""

    async def main() -> None:
        async with Cluster() as cluster:
            server, who = await cluster.engine(0, **SIM), await trainer(cluster, tmp_path)
            loading(server, 10)
            updating = asyncio.create_task(who.update(mode, source={"w": torch.zeros(3)}))
            await until(1.5)
            cluster.die(server.link, server.member)
            await cluster.exited(server.link)
            with pytest.raises(WeightUpdateError):
                await updating
            assert who.written() == []
            await cluster.engine(0, epoch=2, **SIM)
            await settled(cluster, who, 0)
            await asyncio.sleep(10)  # no process ends here: what it has begun does

    run(main())


@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_an_engine_that_does_not_pause_is_taken_out(mode: str, tmp_path: Path) -> None:
    """Its calls go on elsewhere, and the others get the weights; the result says that it starts again."""

    async def main() -> None:
        async with World(tmp_path) as (cluster, who, engines):
            running = [call(who, 40, f"s{i}") for i in range(4)]
            await until(1)

            async def pause(mode: str) -> None:
                raise EngineError("stuck")

            engines[0].engine.pause = pause  # type: ignore[method-assign]
            assert (await who.update(mode)).engines == {"engine-0": "restarted", "engine-1": "updated"}
            assert {answer.versions[-1][0] for answer in await asyncio.gather(*running)} == {1}
            assert states(cluster) == {"engine-0": ("dead", 0), "engine-1": ("ready", 1)}
            await settled(cluster, who, 1)

    run(main())


async def without(cluster: Cluster, engines: list[EngineServer]) -> None:
    """All have died."""
    for server in engines:
        cluster.die(server.link, server.member)
        await cluster.exited(server.link)


@pytest.mark.parametrize("mode", MODES)
def test_engines_that_are_started_again_are_waited_for(mode: str, tmp_path: Path) -> None:
    """While none is there: the first that comes gets the weights, and so do calls that wait."""

    async def main() -> None:
        async with World(tmp_path) as (cluster, who, engines):
            await without(cluster, engines)
            updating, waiting = asyncio.create_task(who.update(mode)), call(who, 10)
            await until(30)
            await cluster.engine(0, epoch=2, **SIM)
            assert (await updating).engines == {"engine-0": "updated"}
            assert now() == pytest.approx(30, abs=2)
            assert (await waiting).versions == [(1, 0, 10)]
            await settled(cluster, who, 1)

    run(main())


def test_nobody_waits_for_engines_that_will_not_come(tmp_path: Path) -> None:
    """The pool's last words are raised at once, and the gate is open."""

    async def main() -> None:
        async with World(tmp_path) as (cluster, who, engines):
            await without(cluster, engines)
            updating = asyncio.create_task(who.update())
            await until(30)
            cluster.core.dispatch.abandon(cluster.core.pools["engine"], encode_body(to_wire(PoolLost("no room"))))
            with pytest.raises(PoolLost, match="no room"):
                await updating
            assert now() == pytest.approx(30, abs=2)
            assert (cluster.core.pools["engine"].gates, who.written()) == (set(), [])

    run(main())


@pytest.mark.parametrize("mode", MODES)
def test_without_an_engine_there_is_an_error(mode: str, tmp_path: Path) -> None:
    """After `engine.update_timeout_s`. Calls that wait go to the next one that comes."""

    async def main() -> None:
        async with World(tmp_path, update_timeout_s=5.0) as (cluster, who, engines):
            await without(cluster, engines)
            waiting = call(who, 10)
            with pytest.raises(WeightUpdateError, match="none is there"):
                await who.update(mode)
            assert now() == pytest.approx(5 + WRITE_S, abs=0.5)
            await cluster.engine(0, epoch=2, **SIM)
            assert (await waiting).versions == [(0, 0, 10)]
            await settled(cluster, who, 0)

    run(main())


def test_engines_that_never_become_idle_are_named(tmp_path: Path) -> None:
    """After `engine.update_timeout_s`, with the number of their calls; nothing has changed, and they run on."""

    async def main() -> None:
        async with World(tmp_path, update_timeout_s=5.0) as (cluster, who, _):
            running = [call(who, 100, f"s{i}") for i in range(3)]
            await until(1)
            with pytest.raises(
                DeadlineExceeded, match=r"5 s \(engine.update_timeout_s\).*{'engine-0': 2, 'engine-1': 1}"
            ):
                await who.update(source={"w": torch.zeros(3)})
            assert now() == pytest.approx(1 + WRITE_S + 5 + WRITE_S, abs=0.2)
            assert who.written() == []
            assert {tuple((await one).versions) for one in running} == {((0, 0, 100),)}
            await settled(cluster, who, 0)

    run(main())


def test_an_engine_that_takes_too_long_is_taken_out(tmp_path: Path) -> None:
    """It would come to the new version at some time, or not."""

    async def main() -> None:
        async with World(tmp_path, update_timeout_s=5.0) as (cluster, who, engines):
            loading(engines[1], 50)
            done = await who.update()
            assert done.engines == {"engine-0": "updated", "engine-1": "restarted"}
            assert done.seconds["update"] == pytest.approx(5, abs=0.1)
            await until(100)  # a removed life announces nothing
            assert states(cluster) == {"engine-0": ("ready", 1), "engine-1": ("dead", 0)}
            await settled(cluster, who, 1)

    run(main())


def test_engines_that_differ_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By their checksums: a warning that names them."""

    async def main() -> None:
        async with World(tmp_path) as (_, who, engines):
            await who.update()
            assert not caplog.records

            async def checksum() -> str:
                return "odd"

            engines[1].engine.checksum = checksum  # type: ignore[method-assign]
            await who.update()

    with caplog.at_level(logging.WARNING):
        run(main())
    assert "weights differ at version 2" in caplog.text
    assert "'engine-1': 'odd'" in caplog.text
