"""`Services`: pools by name, bound to sessions and deadlines."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest

from support.cluster_in_memory import Cluster
from support.virtual_clock import run
from zagent.client.calls import Calls
from zagent.client.services import EnginePool, ServicePool, Services
from zagent.errors import InvalidRequest, UnknownService, ZagentError
from zagent.wire.messages import Call


class Recorder:
    """Notes each call, answers with its argument."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, Any]] = []

    async def __call__(self, argument: Any, call: Call) -> Any:
        self.calls.append((call, argument))
        return argument


async def recorded(cluster: Cluster, pool: str = "box", *methods: str) -> tuple[Recorder, Calls]:
    recorder = Recorder()
    await cluster.member("m", dict.fromkeys(methods or ("run",), recorder), pool=pool)
    return recorder, await cluster.caller()


POOLS = ("engine", "box", "judge")


def test_a_method_is_called_by_its_name() -> None:
    """Positional and keyword arguments travel apart; session and deadline as bound."""

    async def main() -> None:
        async with Cluster(pools=POOLS) as cluster:
            recorder, calls = await recorded(cluster)
            services = Services(calls, ["box"], session="s", timeout=5)
            assert await services["box"].run(1, "two", limit=3) == [[1, "two"], {"limit": 3}]
            ((call, _),) = recorder.calls
            assert (call.pool, call.method, call.session, call.member) == ("box", "run", "s", "")
            assert 4000 <= call.remaining_ms <= 5000

    run(main())


def test_bind_changes_what_it_is_given_and_nothing_else() -> None:
    """On one service or on all of them; the original stays as it is."""

    async def main() -> None:
        async with Cluster(pools=POOLS) as cluster:
            recorder, calls = await recorded(cluster)
            services = Services(calls, ["box"])
            bound = services.bind(session="a", timeout=9)
            for pool in (
                services["box"],
                services["box"].bind(session="b"),
                services["box"].bind(timeout=3),
                bound["box"],
                bound["box"].bind(session="b"),
                bound["box"].bind(session=""),
                bound.bind(session="c")["box"],
            ):
                await pool.run()
            seen = [(call.session, round(call.remaining_ms / 1000)) for call, _ in recorder.calls]
            assert seen == [("", 0), ("b", 0), ("", 3), ("a", 9), ("b", 9), ("", 9), ("c", 9)]

    run(main())


def test_services_is_a_mapping_by_name() -> None:
    """In the configuration's order; `in` and `get` work as everywhere."""
    services = Services.configured(None, {"box": {"target": "x.Y", "model": None}, "judge": {"model": {"path": "m"}}})  # type: ignore[arg-type]
    assert (list(services), len(services)) == (["box", "judge"], 2)
    assert [type(pool) for pool in services.values()] == [ServicePool, EnginePool]
    assert [type(pool) for pool in services.bind(session="s").values()] == [ServicePool, EnginePool]
    assert "box" in services
    assert services.get("nobody") is None
    assert (repr(services), repr(services["box"])) == ("<services box, judge>", "<service 'box'>")


@pytest.mark.parametrize(("names", "known"), [(["box", "judge"], "there is: box, judge"), ([], "there is: none")])
def test_an_unknown_service_lists_the_known(names: list[str], known: str) -> None:
    """An error of zagent's that is a `KeyError`, too."""
    with pytest.raises(UnknownService, match=known) as caught:
        Services(None, names)["bax"]  # type: ignore[arg-type]
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, ZagentError)
    assert str(caught.value).startswith("no service 'bax' in this cluster")


def test_private_names_are_no_methods() -> None:
    """So that copying, pickling and inspection do not call anybody."""
    pool = Services(None, ["box"])["box"]  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="'_secret' is not public"):
        _ = pool._secret
    assert copy.copy(pool)._name == "box"


def test_a_pending_table_may_come_when_it_is_needed() -> None:
    """As for a trainer, which has one per event loop."""

    async def main() -> None:
        async with Cluster(pools=POOLS) as cluster:
            recorder, calls = await recorded(cluster)

            async def here() -> Calls:
                return calls

            services = Services(here, ["box"], session="s")
            await services["box"].run()
            await services.end_session()
            await asyncio.sleep(1)
            assert len(recorder.calls) == 1
            assert len(cluster.core.dispatch.sessions) == 0

    run(main())


def test_a_pool_of_engines_generates_and_chats() -> None:
    """`generate` as the policy's engines do, with a session of its own; `chat` in text, with the bound one."""

    async def main() -> None:
        async with Cluster(pools=POOLS) as cluster:
            engine = await cluster.engine(pool="judge")
            calls = await cluster.caller()
            judge = Services(calls, ["judge"], session="row", engines=["judge"])["judge"]
            assert isinstance(judge, EnginePool)
            output = await judge.generate("s", [1, 2, 3], {"max_new_tokens": 5})
            assert len(output.token_ids) == 5
            output = await judge.generate("s", np.array([1, 2, 3], np.int32), {"max_new_tokens": 5})
            assert output.token_ids.dtype == np.int32
            assert (await judge.stats())["calls"] == engine.counts["calls"] == 2
            with pytest.raises(InvalidRequest, match="no tokenizer"):
                await judge.chat([{"role": "user", "content": "hi"}])
            sessions = [(a.pool, a.session) for a in cluster.assignments]
            assert sessions == [("judge", "s"), ("judge", "s"), ("judge", "row"), ("judge", "row")]

    run(main())


def test_a_session_is_ended_once_in_each_pool_that_it_used() -> None:
    """Without a session, or in a pool that was not used, there is nothing to end."""

    async def main() -> None:
        async with Cluster(pools=POOLS) as cluster:
            _, calls = await recorded(cluster)
            ended: list[tuple[str, str]] = []
            calls.end_session = lambda pool, session: ended.append((pool, session))  # type: ignore[method-assign]
            services = Services(calls, ["box", "judge"])
            await services["box"].run()
            await services.end_session()
            bound = services.bind(session="s")
            await bound["box"].run()
            await bound["box"].run()
            await bound.end_session()
            await bound.end_session()
            assert ended == [("box", "s")]

    run(main())
