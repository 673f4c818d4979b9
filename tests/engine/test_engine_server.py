"""An engine as a member of its pool."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from support.cluster_in_memory import Cluster
from support.virtual_clock import run
from zagent.config import EngineConfig
from zagent.engine.server import EngineServer, _end_dead, _first_end, build, main, read_request
from zagent.errors import ConfigError, EngineError, InvalidRequest, MemberLost
from zagent.wire.messages import Call

CALL = Call(b"\x01" * 16, 3, "engine", "generate")


def test_a_request_is_read_from_its_message() -> None:
    """The prompt as int32, the dict as the engine's own."""
    request = read_request([np.array([1, 2], np.int64), {"top_k": 1}, [np.frombuffer(b"image", np.uint8)], None], CALL)
    assert (request.prompt_ids.dtype, request.prompt_ids.tolist()) == (np.int32, [1, 2])
    assert (request.sampling_params, request.images, request.videos) == ({"top_k": 1}, [b"image"], None)


def test_request_ids_are_unique_per_attempt_and_of_fixed_length() -> None:
    """SGLang aborts by prefix: no id may begin with another."""
    rids = {
        read_request([[1], {}, None, None], CALL._replace(call=call, attempt=attempt)).rid
        for call in (b"\x01" * 16, b"\x02" * 16)
        for attempt in (1, 10, 11)
    }
    assert len(rids) == 6
    assert {len(rid) for rid in rids} == {40}


BAD = [
    None,
    [],
    [[1], {}],
    [[1], {}, None, None, None],
    [None, {}, None, None],
    ["text", {}, None, None],
    [[1.5], {}, None, None],
    [[[1], [2, 3]], {}, None, None],
    [[1], None, None, None],
    [[1], [], None, None],
    {"prompt": [1]},
]


@pytest.mark.parametrize("argument", BAD, ids=repr)
def test_an_argument_of_another_form_is_refused(argument: Any) -> None:
    """`InvalidRequest`: any peer may send it, and the engine never sees it."""
    with pytest.raises(InvalidRequest):
        read_request(argument, CALL)


def test_stats_count_what_was_done() -> None:
    """Calls, tokens and the engine's own in-flight count."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.engine(decode_tokens_per_s=10)
            manager, calls = await cluster.manager(), await cluster.caller()
            await manager.generate("s", [1] * 130, {"max_new_tokens": 10})
            await manager.generate("s", [1] * 130, {"max_new_tokens": 10})
            task = asyncio.create_task(manager.generate("t", [1], {"max_new_tokens": 10}))
            await asyncio.sleep(0.5)
            assert await calls.call("engine", "stats", member="engine-0") == {
                "calls": 2, "prompt_tokens": 260, "cached_tokens": 128, "response_tokens": 20, "in_flight": 1,
            }  # fmt: skip
            await task

    run(main())


def test_a_call_that_fails_is_not_counted() -> None:
    """Tokens are counted when there are some."""

    async def main() -> None:
        async with Cluster() as cluster:
            server = await cluster.engine()
            with pytest.raises(InvalidRequest):
                await (await cluster.manager()).generate("s", [], {})
            assert server.counts["calls"] == 0

    run(main())


def test_the_cache_is_cleared_or_says_why_not() -> None:
    """Through a call past the credits; `EngineError` while calls run."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.engine(decode_tokens_per_s=10, credits=1)
            manager, calls = await cluster.manager(), await cluster.caller()
            await manager.generate("s", [1] * 130, {"max_new_tokens": 1})
            await calls.call("engine", "clear_cache", member="engine-0")
            assert (await manager.generate("s", [1] * 130, {"max_new_tokens": 1})).cached_tokens == 0
            task = asyncio.create_task(manager.generate("s", [1], {"max_new_tokens": 10}))
            await asyncio.sleep(0.5)
            with pytest.raises(EngineError, match="1 calls in flight"):
                await calls.call("engine", "clear_cache", member="engine-0")
            await task

    run(main())


def test_one_process_may_host_several_simulated_engines() -> None:
    """One per member, by its index."""
    engine = EngineConfig(kind="sim").model_dump(mode="json")
    members = [{"name": f"engine-{i}", "index": i, "epoch": 1} for i in (4, 5)]
    model = {"path": "tiny"}
    assert len(build({"engine": engine, "members": members, "model": model})) == 2


def test_a_dying_engine_answers_what_it_had() -> None:
    """`MemberLost` with the reason, never an empty answer (pitfall B4); the wait tells death from a stop."""

    async def main() -> None:
        async with Cluster() as cluster:
            server: EngineServer = await cluster.engine(decode_tokens_per_s=0.001, faults=[{"do": "exit", "at_s": 5}])
            calls = await cluster.caller()
            task = asyncio.create_task(
                calls.call("engine", "generate", [[1], {"max_new_tokens": 5}, None, None], member="engine-0")
            )
            await asyncio.sleep(1)
            running = asyncio.all_tasks() - {asyncio.current_task(), task}
            reason = await _first_end(asyncio.Event(), [server.engine])
            assert asyncio.get_running_loop().time() == pytest.approx(5)
            assert reason is not None
            assert "exit from the fault script" in reason
            server.member.fail_all(reason)
            with pytest.raises(MemberLost, match="exit from the fault script"):
                await task
            for left in running:
                left.cancel()
            await asyncio.sleep(0)

    run(main())


def test_a_stop_is_no_death() -> None:
    """The wait ends with None, and leaves no task behind."""

    async def main() -> None:
        async with Cluster() as cluster:
            server = await cluster.engine()
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(3, stop.set)
            assert await _first_end(stop, [server.engine]) is None

    run(main())


def test_the_end_of_a_dead_engine_is_bounded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose close hangs does not keep the process; the exit code is the agreed one."""

    async def main() -> tuple[int, float]:
        async with Cluster() as cluster:
            server = await cluster.engine()
            closed = server.engine.close
            server.engine.close = lambda: asyncio.sleep(1000)  # type: ignore[method-assign]
            monkeypatch.setattr("zagent.engine.server.terminate", lambda: None)
            start = asyncio.get_running_loop().time()
            code = await _end_dead([server], "it fell over")
            took = asyncio.get_running_loop().time() - start
            server.engine.close = closed  # type: ignore[method-assign]
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)
            return code, took

    code, took = run(main())
    assert (code, took) == (86, pytest.approx(2.0))
    assert "engine died: it fell over" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pool", "start"), [("engine", "engine.sim.eos_token_id"), ("judge", "services.judge: engine.")]
)
def test_a_services_engines_are_named_by_their_service(pool: str, start: str) -> None:
    """The same keys stand in two places of a configuration."""
    settings = {
        "pool": pool,
        "members": [{"name": "x-0", "index": 0, "epoch": 1}],
        "model": {"path": "/nowhere"},
        "engine": {"kind": "sim", "count": 1, "sim": {"vocab_size": 100, "eos_token_id": 100}},
    }
    with pytest.raises(ConfigError) as refused:
        main(settings, lambda _: None)
    assert str(refused.value).startswith(start)
