"""The gate as one manager holds it: reasons, and brokers that are started again. On virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.cluster_in_memory import Cluster
from support.trainers import Trainer, trainer
from support.virtual_clock import run
from zagent.errors import ConnectionLost, StateError


def closed(cluster: Cluster) -> bool:
    return bool(cluster.core.pools["engine"].gates)


async def holder(cluster: Cluster) -> Trainer:
    return await trainer(cluster, Path("/nowhere"))


def test_the_last_reason_opens_it() -> None:
    """In whichever order; closed twice for one reason is closed once, and open it may be opened again."""

    async def main() -> list[bool]:
        async with Cluster() as cluster:
            gate = (await holder(cluster)).gate
            seen = []
            for order in (
                gate.close("update"),
                gate.close("aborted"),
                gate.close("update"),
                gate.open("update"),
                gate.open("aborted"),
            ):
                await order
                seen.append(closed(cluster))
            await gate.open("update")
            return [*seen, closed(cluster)]

    assert run(main()) == [True, True, True, True, False, False]


def test_it_is_closed_within() -> None:
    """And open again however that ends."""

    async def main() -> None:
        async with Cluster() as cluster:
            gate = (await holder(cluster)).gate
            with pytest.raises(KeyError):
                async with gate.closed("update"):
                    assert closed(cluster)
                    raise KeyError
            assert not closed(cluster)

    run(main())


def test_managers_have_gates_of_their_own() -> None:
    """Both must be open."""

    async def main() -> list[bool]:
        async with Cluster() as cluster:
            one, other = (await holder(cluster)).gate, (await holder(cluster)).gate
            await one.close("update")
            await other.close("update")
            await one.open("update")
            seen = [closed(cluster)]
            await other.open("update")
            return [*seen, closed(cluster)]

    assert run(main()) == [True, False]


@pytest.mark.parametrize("reasons", [[], ["update"], ["update", "aborted"]])
def test_a_new_broker_hears_of_it(reasons: list[str]) -> None:
    """If there is a reason still; and again if that one dies, too."""

    async def main() -> None:
        async with Cluster() as cluster:
            gate = (await holder(cluster)).gate
            for reason in ("update", "aborted"):
                await gate.close(reason)
            for reason in {"update", "aborted"} - set(reasons):
                await gate.open(reason)
            for _ in range(3):
                await cluster.restart_broker()
                await asyncio.sleep(3)
                assert closed(cluster) == bool(reasons)
            for reason in reasons:
                await gate.open(reason)
            assert not closed(cluster)
            await cluster.restart_broker()
            await asyncio.sleep(3)
            assert not closed(cluster)

    run(main())


@pytest.mark.parametrize("opening", [True, False])
@pytest.mark.parametrize("after_s", [0.0, 0.0005, 0.0015, 0.0025, 0.5])
@pytest.mark.parametrize("away_s", [0.0, 1.0])
def test_an_order_that_a_broker_takes_with_it_is_carried_out(opening: bool, after_s: float, away_s: float) -> None:
    """Given while it dies, while there is none, and just as the next one hears of the gate."""

    async def main() -> None:
        async with Cluster(latency=0.001, pulses=True) as cluster:
            who = await holder(cluster)
            who.calls.link.keep()
            if opening:
                await who.gate.close("update")
            order = asyncio.create_task(who.gate.open("update") if opening else who.gate.close("update"))
            await asyncio.sleep(after_s)
            await cluster.restart_broker(after_s=away_s)
            await order
            await asyncio.sleep(5)
            assert closed(cluster) != opening

    run(main())


@pytest.mark.parametrize("steps", range(8))
def test_opening_while_a_new_broker_is_told_to_close_opens(steps: int) -> None:
    """Whichever order the loop takes: what is said again about the gate is what holds then."""

    async def main() -> None:
        async with Cluster() as cluster:
            who = await holder(cluster)
            await who.gate.close("update")
            cluster.kill_broker()
            cluster.start_broker([])
            for _ in range(steps):
                await asyncio.sleep(0)
            await who.gate.open("update")
            await asyncio.sleep(5)
            assert not closed(cluster)

    run(main())


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("at_s", [0.0, 0.0005, 0.0015])
def test_a_close_that_is_cancelled_leaves_it_as_it_was(others: bool, at_s: float) -> None:
    """Before and after the broker has heard of it; other reasons stay, also with a new broker."""

    async def main() -> None:
        async with Cluster(latency=0.001) as cluster:
            who = await holder(cluster)
            if others:
                await who.gate.close("aborted")
            closing = asyncio.create_task(who.gate.close("update"))
            await asyncio.sleep(at_s)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            await asyncio.sleep(1)
            assert closed(cluster) == others
            await cluster.restart_broker()
            await asyncio.sleep(3)
            assert closed(cluster) == others
            await who.gate.open("aborted")
            assert not closed(cluster)

    run(main())


def test_a_new_broker_waits_for_who_holds_it() -> None:
    """Its members are back first: a call waits all the same, until the gate opens."""

    async def main() -> None:
        async with Cluster(pulses=True) as cluster:
            await cluster.engine(0)
            who = await holder(cluster)
            await who.gate.close("update")
            call = asyncio.create_task(who.llm.generate("s", [1, 2], {"max_new_tokens": 3}))
            await asyncio.sleep(0.1)
            who.calls.link._greet = lambda: None  # type: ignore[method-assign]
            await cluster.restart_broker()
            await asyncio.sleep(1)
            assert (cluster.core.dispatch.recovering, closed(cluster)) == (True, False)
            del who.calls.link._greet
            who.calls.link._greet()
            await asyncio.sleep(1)
            assert (cluster.core.dispatch.recovering, closed(cluster), call.done()) == (False, True, False)
            await who.gate.open("update")
            await call

    run(main())


def test_a_turn_is_one_trainers_and_its_orders_follow_each_other() -> None:
    """Another one hears that it is taken, and changes nothing by that; a new broker knows whose it is."""

    async def main() -> list[str]:
        async with Cluster(latency=0.001) as cluster:
            one, other = await holder(cluster), await holder(cluster)
            order: list[str] = []

            async def take(name: str) -> None:
                async with one.gate.turn():
                    order.append(name)
                    await asyncio.sleep(1)
                    order.append(name)

            taking = [asyncio.create_task(take(name)) for name in "ab"]
            await asyncio.sleep(0.5)
            for restart in (False, True, True):
                if restart:
                    await cluster.restart_broker()
                with pytest.raises(StateError, match="another trainer is updating"):
                    async with other.gate.turn():
                        order.append("never")
                assert cluster.core.pools["engine"].turn == one.calls.link.nonce
            await asyncio.gather(*taking)
            async with other.gate.turn():
                return order

    assert run(main()) == ["a", "a", "b", "b"]


def test_who_is_gone_holds_nothing() -> None:
    """The broker opens it by itself."""

    async def main() -> None:
        async with Cluster() as cluster:
            who = await holder(cluster)
            await who.gate.close("update")
            with pytest.raises(ConnectionLost):
                async with who.gate.turn():
                    who.calls.link.close("the trainer leaves")
                    await asyncio.sleep(1)
                    assert not closed(cluster)
                    assert cluster.core.pools["engine"].turn is None

    run(main())
