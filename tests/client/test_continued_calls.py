"""Generate calls whose engine is lost while they run: on virtual time, in a whole cluster in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from support.cluster_in_memory import Cluster
from support.virtual_clock import run
from zagent.engine.methods import EngineServer
from zagent.types import TokenOutput

PROMPT = np.arange(10, 110, dtype=np.int32)
#: 16 tokens are told of at a time, ten are sampled in a second.
SIM: dict[str, Any] = {"checkpoint_tokens": 16, "decode_tokens_per_s": 10}
PARAMS: dict[str, Any] = {"max_new_tokens": 100, "logprobs": True, "temperature": 1.0, "sampling_seed": 5}


def dying(at_s: float) -> dict[str, Any]:
    return {"faults": [{"do": "exit", "at_s": at_s}]}


def bury(server: EngineServer, crashed: bool) -> None:
    """What an engine's process does once the engine is dead."""
    death, running = server.engine.died.result(), server.member._tasks()
    server.member.leave_at_once(death.reason, crashed)
    for task in running:
        task.cancel()


async def start(cluster: Cluster, *deaths: float, crashed: bool = False, **sim: Any) -> list[EngineServer]:
    """One engine that dies at each of these seconds, and one that does not. From outside: two crashes would be laid to
    the call."""
    doomed = [await cluster.engine(i, **{**SIM, **sim, **dying(at_s)}) for i, at_s in enumerate(deaths)]
    for server in doomed:
        server.engine.died.add_done_callback(lambda _, server=server: bury(server, crashed))
    return [*doomed, await cluster.engine(len(deaths), **{**SIM, **sim})]


def generated(
    *deaths: float, ids: Any = PROMPT, images: list[bytes] | None = None, params: Any = PARAMS, **sim: Any
) -> tuple[TokenOutput, float, list[int]]:
    """The answer, the (virtual) seconds it took, and how many tokens each engine answered with."""

    async def main() -> tuple[TokenOutput, float, list[int]]:
        async with Cluster() as cluster:
            engines = await start(cluster, *deaths, **sim)
            answer = await (await cluster.manager()).generate("s", ids, params, images)
            seconds = asyncio.get_running_loop().time()
            await asyncio.sleep(1)
            assert cluster.core.dispatch.pending == 0
            return answer, seconds, [server.counts["response_tokens"] for server in engines]

    return run(main())


def same(one: TokenOutput, other: TokenOutput) -> bool:
    """All that may not differ: what was cached may."""
    return (
        list(one.token_ids) == list(other.token_ids)
        and (one.log_probs is None) == (other.log_probs is None)
        and (one.log_probs is None or list(one.log_probs) == list(other.log_probs))
        and (one.stop_reason, one.versions) == (other.stop_reason, other.versions)
        and (one.routed_experts is None) == (other.routed_experts is None)
        and (one.routed_experts is None or np.array_equal(one.routed_experts, other.routed_experts))
        and one.extra_fields.keys() == other.extra_fields.keys()
        and all(np.array_equal(value, other.extra_fields[key]) for key, value in one.extra_fields.items())
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ids": PROMPT.tolist()},
        {"params": {**PARAMS, "logprobs": False}},
        {"params": {"sampling_seed": 5, "max_new_tokens": None, "ignore_eos": True}, "context_length": 200},
        {"params": {**PARAMS, "stop_token_ids": [7], "temperature": 0.0}},
        {"eos_probability": 0.02, "seed": 4},
        {"moe_layers": 3},
        {"kv_capacity_tokens": 0, "moe_layers": 1},
        {"ids": np.array([5, 900, 6, 900], np.int32), "images": [b"a", b"b"], "image_token_id": 900, "moe_layers": 1},
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
@pytest.mark.parametrize("deaths", [(5.0,), (3.0, 6.0), (0.5,)])
def test_a_continued_answer_is_the_undisturbed_one(deaths: tuple[float, ...], options: dict[str, Any]) -> None:
    """Token by token, whatever it consists of, and however often its engine is lost; the caller's own dict is not
    changed."""
    params = dict(options.get("params", PARAMS))
    continued, _, _ = generated(*deaths, **options)
    quiet, _, _ = generated(**options)
    assert same(continued, quiet)
    assert len(quiet.token_ids) > 60
    assert options.get("params", PARAMS) == params
    assert type(continued.token_ids) is type(quiet.token_ids)


@pytest.mark.parametrize("crashed", [False, True])
def test_only_the_rest_is_sampled_again(crashed: bool) -> None:
    """After 5 s, 48 of 50 tokens had been told of: the other engine samples 52, and it takes 10.2 s and not 15; also
    where the call is a suspect."""
    answer, seconds, counts = generated(5.0, crashed=crashed)
    assert (len(answer.token_ids), counts) == (100, [0, 52])
    assert seconds == pytest.approx(5 + 5.2, abs=0.2)


@pytest.mark.parametrize(
    "changed", [{"frequency_penalty": 0.5}, {"stop": ["x"]}, {"regex": "a*"}, {"min_new_tokens": 3}], ids=str
)
def test_calls_that_look_back_are_sampled_anew(changed: dict[str, Any]) -> None:
    """The whole answer comes from the other engine."""
    _, seconds, counts = generated(5.0, params={**PARAMS, **changed})
    assert counts == [0, 100]
    assert seconds == pytest.approx(15, abs=0.2)


def test_without_checkpoints_calls_are_sampled_anew() -> None:
    """`engine.checkpoint_tokens=0`, the default."""
    _, _, counts = generated(5.0, checkpoint_tokens=0)
    assert counts == [0, 100]


def test_cached_tokens_are_of_the_prompt_alone() -> None:
    """Both engines have answered this prompt before: the second one finds 128 tokens of what it is sent, and 28 of them
    are the first one's work, no part of the prompt."""

    async def main() -> TokenOutput:
        async with Cluster() as cluster:
            await start(cluster, 500.0)
            manager = await cluster.manager()
            for number in range(4):  # two each
                await manager.generate(f"warm {number}", PROMPT, PARAMS)
            await asyncio.sleep(495 - asyncio.get_running_loop().time())
            return await manager.generate("s", PROMPT, PARAMS)

    assert run(main()).cached_tokens == 100


def test_a_placeholder_that_was_sampled_is_no_image() -> None:
    """As part of a prompt it would ask for one: from there on nothing is told, and the rest is sampled anew."""
    ids = generated()[0].token_ids
    first = int(ids[20])
    assert first not in ids[:20]
    answer, _, counts = generated(9.0, image_token_id=first)
    assert (answer.token_ids.tolist(), counts) == (ids.tolist(), [0, 100 - 16])


def test_an_engine_that_leaves_hands_its_calls_on() -> None:
    """A stop of the engine costs what it has not told of, like its death."""

    async def main() -> tuple[int, list[int]]:
        async with Cluster() as cluster:
            engines = [await cluster.engine(i, **SIM) for i in range(2)]
            task = asyncio.create_task((await cluster.manager()).generate("s", PROMPT, PARAMS))
            await asyncio.sleep(5)
            await engines[0].member.leave("the cluster stops")
            return len((await task).token_ids), [server.counts["response_tokens"] for server in engines]

    assert run(main()) == (100, [0, 52])


@pytest.mark.parametrize("both", [True, False])
def test_a_new_broker_breaks_no_answer(both: bool) -> None:
    """The broker dies while a call runs, and then its engine too: what was lost on the way is sampled anew, and nothing
    is left out or twice."""
    quiet, _, _ = generated()

    async def main() -> TokenOutput:
        async with Cluster() as cluster:
            await start(cluster, 8.0 if both else 1000.0)
            task = asyncio.create_task((await cluster.manager()).generate("s", PROMPT, PARAMS))
            await asyncio.sleep(4)
            await cluster.restart_broker(after_s=0.5)
            return await task

    assert same(run(main()), quiet)


def saved(checkpoint_tokens: int, calls: int = 40) -> tuple[float, float]:
    """40 calls of 1 900 to 2 100 tokens on an engine that is killed when it has sampled 1 800 of each: the share of
    these that the next engine need not sample again, and the seconds from the kill until all are done."""

    async def main() -> tuple[float, float]:
        async with Cluster() as cluster:
            options = {"decode_tokens_per_s": 10, "checkpoint_tokens": checkpoint_tokens, "credits": calls}
            killed = await cluster.engine(0, **options)
            manager = await cluster.manager()
            sizes = [int(size) for size in np.linspace(1900, 2100, calls)]
            tasks = [
                asyncio.create_task(manager.generate(f"s{n}", PROMPT + n, {"max_new_tokens": size}))
                for n, size in enumerate(sizes)
            ]
            await asyncio.sleep(180)
            heir = await cluster.engine(1, **options)
            cluster.die(killed.link, killed.member)
            await cluster.exited(killed.link)
            assert [len(answer.token_ids) for answer in await asyncio.gather(*tasks)] == sizes
            again = heir.counts["response_tokens"] - (sum(sizes) - 1800 * calls)
            return 1 - again / (1800 * calls), asyncio.get_running_loop().time() - 180

    return run(main())


def test_most_of_the_work_is_saved() -> None:
    """An engine is killed when nine tenths are done: with checkpoints every 64 tokens the others need sample less than
    4 % of it again, without them all of it; and the calls are done in a fifth of the time."""
    share, seconds = saved(64)
    nothing, late = saved(0)
    print(
        f"checkpoints every 64 tokens save {share:.1%} of a killed engine's work, {late - seconds:.0f} of {late:.0f} s"
    )
    assert share > 0.96
    assert nothing == 0
    assert seconds < late / 5
