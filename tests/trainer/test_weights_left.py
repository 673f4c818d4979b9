"""Weights that trainers leave behind: as they go, and after their process has ended. On virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from support.cluster_in_memory import Cluster
from support.trainers import Trainer, loading, trainer, written_in_virtual_time
from support.virtual_clock import run
from support.weights import weights_directory
from zagent.errors import InputError
from zagent.trainer.places import LEFT, host
from zagent.trainer.weights import ASK_S

__all__ = ["written_in_virtual_time"]
pytestmark = pytest.mark.usefixtures("written_in_virtual_time")

TENSORS = {"w": torch.zeros(3)}
#: No process has such a pid.
GONE = f"{host()}-{2**22 + 1}-1-00000000"


async def world(cluster: Cluster, run: Path) -> Trainer:
    """An engine, and a trainer."""
    await cluster.engine(0)
    return await trainer(cluster, run)


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_an_update_removes_what_gone_trainers_have_left(tmp_path: Path) -> None:
    """As soon as it has succeeded: until then engines may be told to load those."""

    async def main() -> None:
        async with Cluster() as cluster:
            who = await world(cluster, tmp_path)
            left, _ = (weights_directory(tmp_path / GONE / name) for name in ("2-00000000", "1-00000000"))
            await who.control.broker("set_version", ["engine", 2, left])
            with pytest.raises(InputError):
                await who.update(source={"w": "no tensor"})
            assert names(tmp_path / GONE) == ["1-00000000", "2-00000000"]
            assert (await who.update(source=TENSORS)).version == 3
            assert names(tmp_path) == ["own"]
            assert len(who.written()) == 1

    run(main())


def test_a_trainer_that_leaves_keeps_what_the_engines_serve(tmp_path: Path) -> None:
    """And what they may serve yet, from an update that was broken off."""

    async def main() -> None:
        async with Cluster() as cluster:
            who = await world(cluster, tmp_path)
            await who.update(source=TENSORS)
            loading(cluster.engines[0], 40)
            updating = asyncio.create_task(who.update(source=TENSORS))
            await asyncio.sleep(1.5)
            updating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await updating
            await who.weights.close(engines_stay=True)
            assert [name[0] for name in who.written()] == ["1", "2", LEFT[0]]
            await asyncio.sleep(50)  # no process ends here: what it has begun does

    run(main())


def test_a_trainer_whose_weights_nobody_serves_leaves_nothing(tmp_path: Path) -> None:
    """Another one has brought newer ones."""

    async def main() -> None:
        async with Cluster() as cluster:
            who = await world(cluster, tmp_path / "a")
            other = await trainer(cluster, tmp_path / "b")
            await who.update(source=TENSORS)
            await other.update(source=TENSORS)
            assert len(who.written()) == 1  # for a broker that has lost the newer ones
            await who.weights.close(engines_stay=True)
            assert (who.place.exists(), len(other.written())) == (False, 1)

    run(main())


def test_without_the_brokers_answer_what_it_may_name_stays(tmp_path: Path) -> None:
    """It is not waited for for long."""

    async def main() -> None:
        async with Cluster() as cluster:
            who = await world(cluster, tmp_path)
            await who.update(source=TENSORS)
            cluster.kill_broker()
            began = asyncio.get_running_loop().time()
            await who.weights.close(engines_stay=True)
            assert asyncio.get_running_loop().time() - began == pytest.approx(ASK_S, abs=0.1)
            assert [name[0] for name in who.written()] == ["1", LEFT[0]]

    run(main())


def test_the_end_of_the_run_leaves_nothing(tmp_path: Path) -> None:
    """Of any trainer, wherever weights lie."""

    async def main() -> None:
        async with Cluster() as cluster:
            who = await world(cluster, tmp_path / "run")
            weights_directory(tmp_path / "run" / GONE / "9-00000000")
            await who.update(source=TENSORS)
            await who.weights.close(engines_stay=False)
            assert not (tmp_path / "run").exists()

    run(main())
