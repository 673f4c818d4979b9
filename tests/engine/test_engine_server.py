"""An engine as a member of its pool."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.cluster_in_memory import Cluster
from support.virtual_clock import run
from zagent.client.calls import Retry
from zagent.config import EngineConfig
from zagent.engine.base import Death
from zagent.engine.methods import EngineServer, read_request
from zagent.engine.server import _run, build, main
from zagent.errors import ConfigError, EngineError, InvalidRequest, MemberLost
from zagent.types import TokenOutput
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


def test_log_probabilities_that_are_no_numbers_are_the_weights_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of weights with a NaN: an `EngineError` that says which, rather than a row that is refused for its loop's."""

    async def main() -> None:
        async with Cluster() as cluster:
            server = await cluster.engine()
            generate = server.engine.generate

            async def spoilt(*arguments: Any) -> TokenOutput:
                output = await generate(*arguments)
                return replace(output, log_probs=np.full(len(output.token_ids), np.nan, np.float32))

            monkeypatch.setattr(server.engine, "generate", spoilt)
            with pytest.raises(EngineError, match="no numbers, by weights of version 0"):
                await (await cluster.manager()).generate("s", [1], {"max_new_tokens": 2, "logprobs": True})

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


def cancel_all() -> None:
    """What a process that has been told to end would leave running for the moment."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def ended(
    cluster: Cluster, servers: list[EngineServer], monkeypatch: pytest.MonkeyPatch, stop: asyncio.Event | None = None
) -> int:
    """The exit code of a process with these engines, once it ends."""
    monkeypatch.setattr("zagent.engine.server.terminate", lambda: None)
    return await _run(stop or asyncio.Event(), servers)


@pytest.mark.parametrize(("crashed", "code"), [(True, 86), (False, 87)])
def test_a_dying_engine_says_so_and_its_calls_are_lost(
    crashed: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`MemberLost` with the reason and whether it died by itself, never an empty answer (pitfall B4); the exit code
    says the same."""

    async def main() -> tuple[int, MemberLost]:
        async with Cluster() as cluster:
            server = await cluster.engine(decode_tokens_per_s=0.001)
            calls = await cluster.caller(Retry(attempts=1))
            argument = [[1], {"max_new_tokens": 5}, None, None]
            task = asyncio.create_task(calls.call("engine", "generate", argument))
            death = Death("it fell over", crashed)
            asyncio.get_running_loop().call_later(5, server.engine.died.set_result, death)
            found = await ended(cluster, [server], monkeypatch)
            assert asyncio.get_running_loop().time() == pytest.approx(5)
            with pytest.raises(MemberLost, match="it fell over") as lost:
                await task
            cancel_all()
            await asyncio.sleep(0)
            return found, lost.value

    found, lost = run(main())
    assert (found, lost.crashed) == (code, crashed)
    assert "engine died: it fell over" in capsys.readouterr().err


def test_engines_beside_a_dead_one_are_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end with their process; their calls are no suspects."""

    async def main() -> list[bool]:
        async with Cluster() as cluster:
            servers = [await cluster.engine(i, decode_tokens_per_s=0.001) for i in range(2)]
            calls = await cluster.caller(Retry(attempts=1))
            argument = [[1], {"max_new_tokens": 5}, None, None]
            tasks = [asyncio.create_task(calls.call("engine", "generate", argument)) for _ in range(2)]
            await asyncio.sleep(1)
            assert [server.engine.in_flight() for server in servers] == [1, 1]
            servers[1].engine.died.set_result(Death("it fell over", True))
            await ended(cluster, servers, monkeypatch)
            lost = await asyncio.gather(*tasks, return_exceptions=True)
            cancel_all()
            await asyncio.sleep(0)
            return sorted(error.crashed for error in lost if isinstance(error, MemberLost))

    assert run(main()) == [False, True]


def test_a_stop_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 0, and no task is left behind."""

    async def main() -> tuple[int, int]:
        async with Cluster() as cluster:
            server = await cluster.engine()
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(3, stop.set)
            code = await ended(cluster, [server], monkeypatch, stop)
            await asyncio.sleep(0)
            return code, len(asyncio.all_tasks())

    assert run(main()) == (0, 1)


def test_an_engine_that_the_broker_lets_go_of_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, at once, and why; the engine is closed."""

    async def main() -> int:
        async with Cluster() as cluster:
            server = await cluster.engine()
            asyncio.get_running_loop().call_later(3, server.link.close, "the broker refused the hello: no")
            code = await ended(cluster, [server], monkeypatch)
            assert asyncio.get_running_loop().time() == pytest.approx(3)
            with pytest.raises(EngineError, match="is not running"):
                await server.engine.generate(read_request([[1], {}, None, None], CALL))
            return code

    assert run(main()) == 1
    assert "cut off from the broker: the broker refused the hello: no" in capsys.readouterr().err


def test_the_end_of_a_dead_engine_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose close hangs does not keep the process: it is gone within a second."""

    async def main() -> float:
        async with Cluster() as cluster:
            server = await cluster.engine()
            closed = server.engine.close
            server.engine.close = lambda: asyncio.sleep(1000)  # type: ignore[method-assign]
            server.engine.died.set_result(Death("it fell over", True))
            assert await ended(cluster, [server], monkeypatch) == 86
            took = asyncio.get_running_loop().time()
            server.engine.close = closed  # type: ignore[method-assign]
            cancel_all()
            await asyncio.sleep(0)
            return took

    assert run(main()) == pytest.approx(0.2)


def test_looking_back_calls_and_chats_are_not_told_of() -> None:
    """Nobody could go on from there: the engine need not stream them."""

    async def main() -> list[bool]:
        async with Cluster() as cluster:
            server = await cluster.engine()
            listened = []

            async def generate(request: Any, progress: Any) -> TokenOutput:
                listened.append(progress is not None)
                return TokenOutput(np.array([1], np.int32))

            server.engine.generate = generate  # type: ignore[method-assign]
            manager = await cluster.manager()
            await manager.generate("s", [1], {})
            await manager.generate("s", [1], {"stop": ["x"]})
            return listened

    assert run(main()) == [True, False]


def test_checkpoints_are_the_engines_as_configured() -> None:
    """`engine.checkpoint_tokens` reaches a simulated engine."""
    settings = {
        "engine": EngineConfig(kind="sim", checkpoint_tokens=7).model_dump(mode="json"),
        "members": [{"name": "engine-0", "index": 0, "epoch": 1}],
        "model": {"path": "tiny"},
    }

    async def main() -> list[int]:
        (engine,) = build(settings)
        await engine.start()
        pieces: list[TokenOutput] = []
        await engine.generate(read_request([[1], {"max_new_tokens": 20}, None, None], CALL), pieces.append)
        return [len(piece.token_ids) for piece in pieces]

    assert run(main()) == [7, 7]


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
