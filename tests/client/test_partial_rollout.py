"""Generate calls that are broken off, and go on: on virtual time, in a whole cluster in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from support.cluster_in_memory import Cluster
from support.virtual_clock import run
from zagent.client.llm_client import FRUITLESS, AsyncLLMServerManager, pack_output
from zagent.engine.server import EngineServer
from zagent.errors import DeadlineExceeded, InvalidRequest, TransientError
from zagent.types import TokenOutput
from zagent.wire.messages import Call

PROMPT = np.arange(10, 110, dtype=np.int32)
PARAMS: dict[str, Any] = {"max_new_tokens": 100, "logprobs": True, "sampling_seed": 5}
SIM: dict[str, Any] = {"decode_tokens_per_s": 10}


def now() -> float:
    return asyncio.get_running_loop().time()


async def manager(cluster: Cluster, **options: Any) -> AsyncLLMServerManager:
    return AsyncLLMServerManager(await cluster.caller(), **options)


async def break_off(servers: list[EngineServer], *at_s: float) -> None:
    """At each of these seconds; the engines take calls again at once."""
    for moment in at_s:
        await asyncio.sleep(moment - now())
        for server in servers:
            await server.engine.pause("abort")
            await server.engine.resume()


def generated(
    *at_s: float, params: dict[str, Any] = PARAMS, ids: Any = PROMPT, images: list[bytes] | None = None, **sim: Any
) -> tuple[TokenOutput, float, EngineServer]:
    """The answer of a call that is broken off at each of these seconds, the (virtual) seconds it took, the engine."""

    async def main() -> tuple[TokenOutput, float, EngineServer]:
        async with Cluster() as cluster:
            server = await cluster.engine(**{**SIM, **sim})
            breaking = asyncio.create_task(break_off([server], *at_s))
            answer = await (await manager(cluster)).generate("s", ids, params, images)
            took = now()
            await breaking
            await asyncio.sleep(0.1)
            assert cluster.quiet()
            return answer, took, server

    return run(main())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ids": PROMPT.tolist()},
        {"params": {**PARAMS, "logprobs": False}},
        {"params": {"sampling_seed": 5, "max_new_tokens": None}, "context_length": 201},
        {"eos_probability": 0.02, "seed": 4},
        {"moe_layers": 3},
        {"checkpoint_tokens": 16},
        {"ids": np.array([5, 900, 6, 900], np.int32), "images": [b"a", b"b"], "image_token_id": 900, "moe_layers": 1},
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
@pytest.mark.parametrize("at_s", [(2.05,), (0.0, 3.05, 3.05, 5.5)])
def test_nobody_notices(at_s: tuple[float, ...], options: dict[str, Any]) -> None:
    """On the same weights the answer is the undisturbed one, of as many tokens; and only what was under way is sampled
    twice."""
    params = dict(options.get("params", PARAMS))
    answer, seconds, server = generated(*at_s, **options)
    quiet, undisturbed, _ = generated(**options)
    assert list(answer.token_ids) == list(quiet.token_ids)
    assert (answer.log_probs is None) == (quiet.log_probs is None)
    assert answer.log_probs is None or list(answer.log_probs) == list(quiet.log_probs)
    assert (answer.stop_reason, answer.versions) == (quiet.stop_reason, quiet.versions)
    assert np.array_equal(answer.routed_experts, quiet.routed_experts)  # type: ignore[arg-type]
    assert all(np.array_equal(value, answer.extra_fields[key]) for key, value in quiet.extra_fields.items())
    assert seconds == pytest.approx(undisturbed, abs=0.1 * len(at_s) + 0.01)
    assert server.counts["response_tokens"] == len(quiet.token_ids) > 60
    assert (options.get("params", PARAMS), type(answer.token_ids)) == (params, type(quiet.token_ids))


def test_it_goes_on_where_its_prefix_is_known() -> None:
    """Same session, same engine, though the other one has less to do: 100 tokens of the prompt are in its cache."""

    async def main() -> tuple[list[int], int]:
        async with Cluster() as cluster:
            servers = [await cluster.engine(i, **SIM) for i in range(2)]
            breaking = asyncio.create_task(break_off(servers, 3.05, 5.05))
            answer = await (await manager(cluster)).generate("s", PROMPT, PARAMS)
            await breaking
            return [server.counts["calls"] for server in servers], answer.cached_tokens

    assert run(main()) == ([3, 0], 100)


@pytest.mark.parametrize("changed", [{"frequency_penalty": 0.5}, {"stop": ["x"]}, {"min_new_tokens": 3}], ids=str)
def test_calls_that_look_back_start_afresh(changed: dict[str, Any]) -> None:
    """All tokens are sampled again."""
    answer, seconds, server = generated(3.05, params={**PARAMS, **changed})
    assert (len(answer.token_ids), answer.stop_reason) == (100, "length")
    assert (seconds, server.counts["response_tokens"]) == (pytest.approx(13.05), 130)


def test_switched_off_it_is_told() -> None:
    """`rollout.partial_rollout=false`: the answer is what there was, and says that it was broken off."""

    async def main() -> TokenOutput:
        async with Cluster() as cluster:
            server = await cluster.engine(**SIM)
            breaking = asyncio.create_task(break_off([server], 3.05))
            answer = await (await manager(cluster, partial_rollout=False)).generate("s", PROMPT, PARAMS)
            await breaking
            return answer

    answer = run(main())
    assert (answer.stop_reason, len(answer.token_ids), len(answer.log_probs)) == ("abort", 30, 30)


def test_it_goes_ahead_of_fresh_calls() -> None:
    """It was first: on an engine that takes one call at a time, those that wait do so a little longer."""

    async def main() -> list[str]:
        async with Cluster() as cluster:
            server = await cluster.engine(credits=1, **SIM)
            llm, ends = await manager(cluster), []

            async def timed(name: str) -> None:
                await llm.generate(name, PROMPT, {"max_new_tokens": 20})
                ends.append(name)

            tasks = []
            for name in "abc":
                tasks.append(asyncio.create_task(timed(name)))
                await asyncio.sleep(0.1)
            await server.engine.pause("abort")
            await server.engine.resume()
            await asyncio.gather(*tasks)
            return ends

    assert run(main())[0] in ("a", "b")


class Scripted:
    """A member that answers `generate` with these numbers of tokens, and breaks them off but for the last."""

    def __init__(self, *sizes: int, seconds: float = 0.0) -> None:
        self.sizes, self.seconds = list(sizes), seconds
        self.asked: list[tuple[int, Any, int]] = []  # tokens of the prompt, limit, attempt

    async def generate(self, argument: Any, call: Call) -> list[Any]:
        await asyncio.sleep(self.seconds)
        self.asked.append((len(argument[0]), argument[1].get("max_new_tokens"), call.attempt))
        size = self.sizes.pop(0) if len(self.sizes) > 1 else self.sizes[0]
        ids = np.arange(size, dtype=np.int32)
        reason: Any = "abort" if len(self.sizes) > 1 or self.seconds or not size else "stop"
        return pack_output(TokenOutput(ids, None, reason, versions=[(3, 0, size)] if size else []))


def scripted(*sizes: int, **options: Any) -> tuple[TokenOutput, Scripted]:
    async def main() -> tuple[TokenOutput, Scripted]:
        async with Cluster() as cluster:
            member = Scripted(*sizes)
            await cluster.member("m", {"generate": member.generate})
            return await (await manager(cluster, **options)).generate("s", [1, 2], {"max_new_tokens": 50}), member

    return run(main())


def test_each_call_is_asked_for_what_is_left() -> None:
    """One limit over all; further calls count as further attempts, which go first."""
    answer, member = scripted(5, 7, 0, 3, 2, 2)
    assert member.asked == [(2, 50, 1), (7, 45, 2), (14, 38, 2), (14, 38, 2), (17, 35, 2)]
    assert (len(answer.token_ids), answer.versions, answer.stop_reason) == (17, [(3, 0, 17)], "stop")


def test_an_engine_that_breaks_everything_off_is_an_error() -> None:
    """An abort never passes for an answer: after many without a token in a row, with waits between them, the call
    fails. What waits longest for that has waited a minute."""

    async def main() -> tuple[int, float]:
        async with Cluster() as cluster:
            member = Scripted(5, 0, 0)
            await cluster.member("m", {"generate": member.generate})
            with pytest.raises(TransientError, match="30 calls in a row were broken off before their first token"):
                await (await manager(cluster)).generate("s", [1, 2], {"max_new_tokens": 50})
            assert cluster.quiet()
            return len(member.asked), now()

    asked, seconds = run(main())
    assert asked == 1 + FRUITLESS == 31
    assert 30 < seconds < 60


def test_a_token_now_and_then_is_enough() -> None:
    """All aborts but one without one, one with, and as many more: it goes on."""
    many = [0] * (FRUITLESS - 1)
    answer, member = scripted(*many, 1, *many, 4, 4)
    assert (answer.stop_reason, len(answer.token_ids), len(member.asked)) == ("stop", 5, 2 * FRUITLESS)


def test_updates_in_quick_succession_do_not_end_what_waits_for_its_turn() -> None:
    """An engine that takes one call at a time, all broken off twenty times, five times a second: each is whole."""

    async def main() -> list[tuple[str, int]]:
        async with Cluster() as cluster:
            server = await cluster.engine(credits=4, max_batch=1, **SIM)
            llm = await manager(cluster)
            calls = [llm.generate(name, PROMPT, {"max_new_tokens": 20, "sampling_seed": 1}) for name in "abcd"]
            breaking = asyncio.create_task(break_off([server], *(0.05 + 0.2 * i for i in range(20))))
            answers = await asyncio.gather(*calls)
            await breaking
            return [(answer.stop_reason, len(answer.token_ids)) for answer in answers]

    assert run(main()) == [("length", 20)] * 4


def test_the_time_limit_also_counts_the_waits_for_another_try() -> None:
    """A call that never begins ends when its time does."""

    async def main() -> float:
        async with Cluster() as cluster:
            member = Scripted(0, 0)
            await cluster.member("m", {"generate": member.generate})
            with pytest.raises(DeadlineExceeded):
                await (await manager(cluster, timeout=4.0)).generate("s", [1], {})
            return now()

    assert run(main()) == pytest.approx(4, abs=0.1)


def test_the_time_limit_is_one_over_all_calls() -> None:
    """`DeadlineExceeded` after it, however often the call was broken off, also just as it ends."""

    async def main(timeout: float) -> float:
        async with Cluster() as cluster:
            member = Scripted(1, seconds=2)
            await cluster.member("m", {"generate": member.generate})
            with pytest.raises(DeadlineExceeded):
                await (await manager(cluster, timeout=timeout)).generate("s", [1], {})
            took = now()
            await asyncio.sleep(5)
            assert cluster.core.dispatch.pending == 0
            return took

    assert run(main(7.0)) == pytest.approx(7)
    assert run(main(6.0)) == pytest.approx(6, abs=0.1)


def test_a_further_call_may_be_refused() -> None:
    """The error is the caller's to see, and nothing of the call is left."""

    async def main() -> None:
        async with Cluster() as cluster:
            answers = [pack_output(TokenOutput(np.array([7], np.int32), None, "abort", versions=[(0, 0, 1)]))]

            async def generate(argument: Any, call: Call) -> list[Any]:
                if not answers:
                    raise InvalidRequest("not like this")
                return answers.pop()

            await cluster.member("m", {"generate": generate})
            with pytest.raises(InvalidRequest, match="not like this"):
                await (await manager(cluster)).generate("s", [1], {})
            assert cluster.quiet()

    run(main())


def test_a_cancelled_call_does_not_go_on() -> None:
    """Between two calls, or in the second one: the engine stops."""

    async def main(at_s: float) -> None:
        async with Cluster(latency=0.1) as cluster:
            server = await cluster.engine(**SIM)
            task = asyncio.create_task((await manager(cluster)).generate("s", PROMPT, PARAMS))
            breaking = asyncio.create_task(break_off([server], 3.0))
            await asyncio.sleep(at_s - now())
            task.cancel()
            await asyncio.sleep(1)
            assert task.cancelled()
            assert cluster.quiet()
            await breaking

    for at_s in (3.05, 3.15, 3.25, 3.35, 4.0):
        run(main(at_s))


def test_a_placeholder_that_was_sampled_is_sampled_again() -> None:
    """As part of a prompt it would ask for an image: the call goes on before it, as often as that takes."""
    ids = generated()[0].token_ids
    first = int(ids[20])
    assert first not in ids[:20]
    answer, seconds, _ = generated(3.05, image_token_id=first)
    assert answer.token_ids.tolist() == ids.tolist()
    assert seconds == pytest.approx(3.05 + 8, abs=0.1)


def test_the_heir_of_a_lost_engine_may_be_broken_off() -> None:
    """Its tokens come after those that the lost one had told of; the call goes on from both."""

    async def main() -> TokenOutput:
        async with Cluster() as cluster:
            options = {**SIM, "checkpoint_tokens": 8}
            doomed, heir = [await cluster.engine(i, **options) for i in range(2)]
            task = asyncio.create_task((await manager(cluster)).generate("s", PROMPT, PARAMS))
            await asyncio.sleep(2.05)
            cluster.die(doomed.link, doomed.member)
            await cluster.exited(doomed.link)
            await break_off([heir], 4.55, 6.55)
            answer = await task
            assert heir.counts["response_tokens"] == 100 - 16
            return answer

    assert run(main()).token_ids.tolist() == generated()[0].token_ids.tolist()


@pytest.mark.parametrize("crashed", [False, True])
def test_an_engine_may_be_lost_as_well(crashed: bool) -> None:
    """Broken off at one engine, told of by it when it went on, lost, and ended by another: the undisturbed answer."""

    async def main() -> TokenOutput:
        async with Cluster() as cluster:
            options = {**SIM, "checkpoint_tokens": 8}
            doomed, other = [await cluster.engine(i, **options) for i in range(2)]
            task = asyncio.create_task((await manager(cluster)).generate("s", PROMPT, PARAMS))
            await break_off([doomed, other], 2.05)
            await asyncio.sleep(2)
            cluster.die(doomed.link, doomed.member)
            await cluster.exited(doomed.link, crashed=crashed)
            answer = await task
            assert other.counts["response_tokens"] == 100 - 20 - 16
            await break_off([other], 100)
            return answer

    assert run(main()).token_ids.tolist() == generated()[0].token_ids.tolist()
