"""Updates of whose end the trainer hears late or never: the weights that engines serve stay, on virtual time."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from support.cluster_in_memory import Cluster
from support.trainers import Trainer, loading, trainer, written_in_virtual_time
from support.virtual_clock import run
from support.weights import weights_directory
from zagent.engine.server import EngineServer
from zagent.errors import EncodeError, EngineError, InputError, StateError, WeightUpdateError

__all__ = ["written_in_virtual_time"]
pytestmark = pytest.mark.usefixtures("written_in_virtual_time")

TENSORS = {"w": torch.zeros(3)}
BOTH = ("engine-0", "engine-1")


def states(cluster: Cluster) -> dict[str, tuple[str, int]]:
    return {name: (str(m.state), m.version) for name, m in cluster.core.pools["engine"].members.items()}


def serving(version: int) -> dict[str, tuple[str, int]]:
    return dict.fromkeys(BOTH, ("ready", version))


async def world(cluster: Cluster, place: Path, **config: Any) -> tuple[Trainer, list[EngineServer]]:
    """Two engines, and a trainer."""
    return await trainer(cluster, place, **config), [await cluster.engine(i) for i in range(2)]


async def end(cluster: Cluster, *servers: EngineServer) -> None:
    for server in servers:
        cluster.die(server.link, server.member)
        await cluster.exited(server.link)


async def started_again(cluster: Cluster, epoch: int = 2) -> None:
    """Both engines, which then load what the pool has."""
    for i in range(2):
        await cluster.engine(i, epoch=epoch)
    await asyncio.sleep(1)


async def broken_off(who: Trainer, **options: Any) -> None:
    """An update, while the engines load."""
    updating = asyncio.create_task(who.update(source=TENSORS, **options))
    await asyncio.sleep(1.5)
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating


# ---- broken off -----------------------------------------------------------------------------------------------------


def test_weights_of_a_broken_off_update_outlive_one_that_fails(tmp_path: Path) -> None:
    """Engines took them after all. What does not even reach the engines removes nothing, and engines that start again
    load them; those before them are of no use any more."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, engines = await world(cluster, tmp_path)
            await who.update(source=TENSORS)
            for server in engines:
                loading(server, 4)
            await broken_off(who)
            assert len(who.written()) == 2
            await asyncio.sleep(5)
            with pytest.raises(InputError):
                await who.update(source={"w": "no tensor"})
            assert [name[0] for name in who.written()] == ["2"]
            await end(cluster, *engines)
            await started_again(cluster)
            assert states(cluster) == serving(2)
            assert await who.weights.version() == 2

    run(main())


def test_both_stay_while_nobody_knows(tmp_path: Path) -> None:
    """An update fails before the engines have finished what the one before began: its weights and the former ones are
    there, whichever are served in the end."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, engines = await world(cluster, tmp_path)
            await who.update(source=TENSORS)
            for server in engines:
                loading(server, 40)
            await broken_off(who)
            with pytest.raises(InputError):
                await who.update(source={"w": "no tensor"})
            assert [name[0] for name in who.written()] == ["1", "2"]
            await end(cluster, *engines)
            await started_again(cluster)
            assert states(cluster) == serving(1)
            assert (await who.update(source=TENSORS)).version == 3
            assert [name[0] for name in who.written()] == ["3"]
            await asyncio.sleep(50)  # no process ends here: what it has begun does

    run(main())


def test_the_number_of_a_broken_off_update_is_not_used_again(tmp_path: Path) -> None:
    """Where one engine has its weights and the other would get the next ones under the same number, nothing would tell
    them apart: the next is the version after."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, engines = await world(cluster, tmp_path)
            for server in engines:
                loading(server, 4)
            await broken_off(who)
            with pytest.raises(InputError, match="version 1 does not follow 1"):
                await who.update(source=TENSORS, version=1)
            done = await who.update(source={"w": torch.zeros(5)})
            assert (done.version, set(done.engines.values())) == (2, {"updated"})
            assert states(cluster) == serving(2)
            assert len({await server.engine.checksum() for server in engines}) == 1
            assert len(who.written()) == 1

    run(main())


def test_a_new_broker_hears_of_a_broken_off_update_that_took_effect(tmp_path: Path) -> None:
    """Once the trainer has seen that it did: versions do not fall, though all engines have died with the broker."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, engines = await world(cluster, tmp_path)
            await who.update(source=TENSORS)
            for server in engines:
                loading(server, 4)
            await broken_off(who)
            await asyncio.sleep(5)
            assert await who.weights.version() == 2
            cluster.kill_broker()
            for server in engines:
                cluster.die(server.link, server.member)
            cluster.start_broker([])
            await started_again(cluster)
            assert states(cluster) == serving(2)

    run(main())


def test_it_is_said_that_later_weights_of_others_are_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Broker and engines die together after another trainer has brought newer ones and has gone: this one can only
    bring its own again, and warns. Where engines have them still, there is nothing to warn of."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, engines = await world(cluster, tmp_path / "a")
            other = await trainer(cluster, tmp_path / "b")
            await who.update(source=TENSORS)
            await other.update(source=TENSORS)
            cluster.die(other.calls.link)
            cluster.forget(other.calls.link)
            await cluster.restart_broker()
            await asyncio.sleep(5)
            assert (caplog.records, states(cluster)) == ([], serving(2))
            cluster.kill_broker()
            for server in engines:
                cluster.die(server.link, server.member)
            cluster.start_broker([])
            await asyncio.sleep(1)  # a process takes that to start
            await started_again(cluster)
            assert states(cluster) == serving(1)

    with caplog.at_level(logging.WARNING):
        run(main())
    assert "serve version 1 of the weights" in caplog.text


# ---- loaded, but not heard of ---------------------------------------------------------------------------------------


def slow_checksum(server: EngineServer, seconds: float, error: Exception | None = None) -> None:
    checksum = server.engine.checksum

    async def slowly() -> str:
        await asyncio.sleep(seconds)
        if error is not None:
            raise error
        return await checksum()

    server.engine.checksum = slowly  # type: ignore[method-assign]


@pytest.mark.parametrize("late", BOTH)
def test_a_checksum_that_is_late_is_no_failure_to_load(
    late: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engines serve the weights, and go on; a warning says which one has given none, and the next update is as
    ever."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, engines = await world(cluster, tmp_path, update_timeout_s=2.0)
            slow_checksum(engines[BOTH.index(late)], 4)
            done = await who.update(source=TENSORS)
            assert done.engines == dict.fromkeys(BOTH, "updated")
            assert done.checksum != ""
            assert states(cluster) == serving(1)
            assert (await who.update(source=TENSORS)).engines == done.engines
            assert [server.failed.done() for server in engines] == [False, False]

    run(main())
    assert f"engine {late} gave no checksum of version 1" in caplog.text


def test_where_none_has_a_checksum_there_is_none(tmp_path: Path) -> None:
    """Late, or broken."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, engines = await world(cluster, tmp_path, update_timeout_s=2.0)
            slow_checksum(engines[0], 4)
            slow_checksum(engines[1], 0, EngineError("cannot add up"))
            done = await who.update(source=TENSORS)
            assert (done.engines, done.checksum) == (dict.fromkeys(BOTH, "updated"), "")

    run(main())


def announcing(cluster: Cluster, server: EngineServer, then: str) -> None:
    """It loads new weights and says so, and then its answer does not come: it dies, or is too late."""
    update = server.member._methods["update_weights"]

    async def announce(argument: Any, call: Any) -> Any:
        await update(argument, call)
        if then == "die":
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(end(cluster, server)))
        await asyncio.sleep(1000)

    server.member._methods["update_weights"] = announce


@pytest.mark.parametrize("then", ["die", "hang"])
def test_weights_that_engines_have_told_of_are_the_pools(then: str, tmp_path: Path) -> None:
    """All engines are lost between that and their answer: the update is no failure, since those that start again will
    be told to load the weights, and can."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, engines = await world(cluster, tmp_path, update_timeout_s=5.0)
            await who.update(source=TENSORS)
            for server in engines:
                announcing(cluster, server, then)
            done = await who.update(source={"w": torch.zeros(5)})
            assert (done.version, done.engines, done.checksum) == (2, dict.fromkeys(BOTH, "restarted"), "")
            assert [name[0] for name in who.written()] == ["2"]
            await started_again(cluster)
            assert states(cluster) == serving(2)
            assert await who.weights.version() == 2

    run(main())


def test_what_another_trainer_brought_meanwhile_is_no_success(tmp_path: Path) -> None:
    """Engines that fail have told of its weights under the same number, not of ours."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, engines = await world(cluster, tmp_path / "a")
            foreign = weights_directory(tmp_path / "foreign")
            for server in engines:
                loading(server, 1, EngineError("no room"))
            updating = asyncio.create_task(who.update(source=TENSORS))
            await asyncio.sleep(1.5)
            await who.control.broker("set_version", ["engine", 1, foreign])
            with pytest.raises(WeightUpdateError, match="no engine took version 1"):
                await updating
            assert who.written() == []

    run(main())


# ---- the caller's faults --------------------------------------------------------------------------------------------


def test_versions_are_64_bit_ints(tmp_path: Path) -> None:
    """As `rollout_versions` are: larger ones are refused before anything is sent, and after the last there is none."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, _ = await world(cluster, tmp_path)
            for wrong in (2**63, 2**64 - 1, 2**70):
                with pytest.raises(InputError, match="64-bit"):
                    await who.update(source=TENSORS, version=wrong)
            assert states(cluster) == serving(0)
            assert (await who.update(source=TENSORS, version=2**63 - 1)).version == 2**63 - 1
            with pytest.raises(StateError, match="no version follows"):
                await who.update(source=TENSORS)
            assert states(cluster) == serving(2**63 - 1)

    run(main())


def test_what_cannot_be_sent_is_no_engines_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the caller's to see; all engines stay, and the number may be used again."""

    async def main() -> None:
        async with Cluster() as cluster:
            who, _ = await world(cluster, tmp_path)
            prepare = who.weights._prepare

            async def odd(*arguments: Any) -> Any:
                delivery = await prepare(*arguments)
                delivery.directory += "\udcff"
                return delivery

            with monkeypatch.context() as patched:
                patched.setattr(who.weights, "_prepare", odd)
                with pytest.raises(EncodeError):
                    await who.update(source=TENSORS)
            assert (states(cluster), who.written()) == (serving(0), [])
            assert (await who.update(source=TENSORS)).version == 1
            assert states(cluster) == serving(1)

    run(main())
