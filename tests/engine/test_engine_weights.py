"""An engine's orders for its weights, as its pool's members get them: what is refused, and what goes on by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.cluster_in_memory import Cluster
from support.sim_engines import request
from support.trainers import loading
from support.virtual_clock import run
from support.weights import weights_directory
from zagent.client.calls import Calls, Retry
from zagent.engine.server import EngineServer
from zagent.errors import EngineError, InvalidRequest, StateError


async def one(cluster: Cluster, **sim: Any) -> tuple[EngineServer, Calls]:
    return await cluster.engine(**sim), await cluster.caller(Retry(attempts=1))


async def order(calls: Calls, method: str, argument: Any = None, **options: Any) -> Any:
    return await calls.call("engine", method, argument, member="engine-0", **options)


@pytest.mark.parametrize(
    ("method", "argument"),
    [
        *(("pause", wrong) for wrong in ("wait", None, 1, ["abort"])),
        *(
            ("update_weights", wrong)
            for wrong in (None, "/w", ["/w", 1], ["/w", "1", True], ["/w", True, True], [1, 1, True])
        ),
        *(("receive_weights", wrong) for wrong in (None, ["g", [], 1], ["g", [[1]], 1, True])),
        *(("wake_up", wrong) for wrong in ("weights", 1)),
    ],
)
def test_orders_of_another_form_are_refused(method: str, argument: Any) -> None:
    """Any peer may give them; the engine never sees them, and serves on."""

    async def main() -> None:
        async with Cluster() as cluster:
            server, calls = await one(cluster)
            with pytest.raises(InvalidRequest):
                await order(calls, method, argument)
            await server.engine.generate(request([1]))
            assert server.engine.version == 0

    run(main())


def test_the_same_weights_again_are_not_loaded_again(tmp_path: Path) -> None:
    """A call that was sent twice; but other ones of that version, or older ones, are refused."""

    async def main() -> None:
        async with Cluster() as cluster:
            server, calls = await one(cluster)
            first, other = weights_directory(tmp_path / "1"), weights_directory(tmp_path / "2", 8)
            asked = loading(server, 1)
            for _ in range(2):
                await order(calls, "update_weights", [first, 3, True])
            assert asked == [first]
            for directory, version in ((other, 3), (first, 2), (other, 2)):
                with pytest.raises(StateError, match=f"serves version 3 of the weights, from {first}"):
                    await order(calls, "update_weights", [directory, version, True])
            assert (server.engine.version, asked) == (3, [first])

    run(main())


def test_orders_for_weights_follow_each_other(tmp_path: Path) -> None:
    """Two at once: the second begins when the first is done, and a checksum is of what is there then."""

    async def main() -> list[float]:
        async with Cluster() as cluster:
            server, calls = await one(cluster)
            directory = weights_directory(tmp_path / "w")
            loading(server, 4)
            ends = []

            async def timed(after_s: float, method: str, argument: Any = None) -> Any:
                await asyncio.sleep(after_s)
                result = await order(calls, method, argument)
                ends.append(asyncio.get_running_loop().time())
                return result

            sums = await asyncio.gather(
                timed(0, "update_weights", [directory, 1, True]),
                timed(1, "update_weights", [directory, 2, True]),
                timed(2, "checksum"),
            )
            assert sums == [None, None, await server.engine.checksum()]
            assert server.engine.version == 2
            return ends

    assert run(main()) == [4.0, 8.0, 8.0]


def test_a_checksum_may_be_asked_of_a_version(tmp_path: Path) -> None:
    """An engine that serves another one by now does not give its own for it."""

    async def main() -> None:
        async with Cluster() as cluster:
            server, calls = await one(cluster)
            await order(calls, "update_weights", [weights_directory(tmp_path), 3, True])
            for argument in (None, 3):
                assert await order(calls, "checksum", argument) == await server.engine.checksum()
            for argument in (2, "3"):
                with pytest.raises(StateError, match=f"serves version 3 of the weights, not {argument!r}"):
                    await order(calls, "checksum", argument)

    run(main())


def test_weights_that_cannot_be_loaded_are_an_error(tmp_path: Path) -> None:
    """Of the call; what the process does is for whoever gave the order to say."""

    async def main() -> None:
        async with Cluster() as cluster:
            server, calls = await one(cluster)
            with pytest.raises(EngineError, match="no safetensors"):
                await order(calls, "update_weights", [str(tmp_path), 1, True])
            assert not server.failed.done()
            assert cluster.core.pools["engine"].version == 0

    run(main())


@pytest.mark.parametrize("how", ["given up", "out of time"])
def test_an_update_goes_on_without_its_caller(how: str, tmp_path: Path) -> None:
    """To its end, which the broker hears of."""

    async def main() -> None:
        async with Cluster() as cluster:
            server, calls = await one(cluster)
            loading(server, 4)
            argument = [weights_directory(tmp_path / "w"), 1, True]
            task = asyncio.create_task(
                order(calls, "update_weights", argument, timeout=2 if how == "out of time" else None)
            )
            await asyncio.sleep(1)
            if how == "given up":
                task.cancel()
            await asyncio.sleep(2)
            assert (task.done(), server.engine.version) == (True, 0)
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.sleep(2)
            assert (server.engine.version, cluster.core.pools["engine"].version) == (1, 1)
            assert not server.failed.done()

    run(main())


@pytest.mark.parametrize("how", ["given up", "gone"])
def test_what_is_paused_goes_on_without_its_caller(how: str) -> None:
    """`resume_afterwards` runs as long as its caller wants, and lives; then calls are answered."""

    async def main() -> float:
        async with Cluster() as cluster:
            server, calls = await one(cluster)
            beside = asyncio.create_task(order(calls, "resume_afterwards"))
            await order(calls, "pause", "in_place")
            waiting = asyncio.create_task(server.engine.generate(request([1])))
            await asyncio.sleep(5)
            assert not waiting.done()
            if how == "given up":
                beside.cancel()
            else:
                cluster.die(calls.link)
                cluster.forget(calls.link)
            await waiting
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
            return asyncio.get_running_loop().time()

    assert run(main()) == 5.0
