"""`AsyncLLMServerManager`: tokens in, tokens out, in the caller's own form."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest

from support.cluster_in_memory import Cluster
from support.virtual_clock import run
from zagent.client.llm_client import AsyncLLMServerManager, pack_output, unpack_output
from zagent.errors import DeadlineExceeded, InvalidRequest, PromptTooLong
from zagent.types import TokenOutput
from zagent.wire.codec import decode_body, encode_body
from zagent.wire.messages import Call

PARAMS = {"max_new_tokens": 5, "logprobs": True, "temperature": 1.0}


def test_lists_in_lists_out() -> None:
    """Ids are Python ints, log-probabilities Python floats."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.engine()
            output = await (await cluster.manager()).generate("s", [1, 2, 3], PARAMS)
            assert type(output.token_ids) is type(output.log_probs) is list
            assert {type(i) for i in output.token_ids} == {int}
            assert {type(p) for p in output.log_probs} == {float}
            assert len(output.token_ids) == len(output.log_probs) == 5

    run(main())


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16"])
def test_arrays_in_arrays_out(dtype: str) -> None:
    """int32 ids and float32 log-probabilities; the same tokens as for a list."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.engine()
            manager = await cluster.manager()
            output = await manager.generate("s", np.array([1, 2, 3], dtype), PARAMS)
            as_list = await manager.generate("s", [1, 2, 3], PARAMS)
            assert (output.token_ids.dtype, output.log_probs.dtype) == (np.int32, np.float32)
            assert output.token_ids.tolist() == as_list.token_ids
            assert output.log_probs.tolist() == as_list.log_probs

    run(main())


def test_without_logprobs_there_are_none() -> None:
    """None, not an empty list."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.engine()
            output = await (await cluster.manager()).generate("s", [1], {"max_new_tokens": 2})
            assert output.log_probs is None

    run(main())


def test_sampling_params_are_not_changed() -> None:
    """Deep equality after three calls, and every call has its log-probabilities (pitfall D4)."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.engine()
            manager = await cluster.manager()
            params: dict[str, Any] = {**PARAMS, "stop_token_ids": [7]}
            before = copy.deepcopy(params)
            outputs = [await manager.generate("s", [1, 2], params) for _ in range(3)]
            assert params == before
            assert all(output.log_probs is not None for output in outputs)

    run(main())


def test_the_engine_sees_the_prompt_of_call_time() -> None:
    """A loop that extends its list while the call runs changes nothing (pitfall C13)."""

    async def main() -> None:
        async with Cluster() as cluster:
            seen = []

            async def generate(argument: Any, call: Call) -> list[Any]:
                await asyncio.sleep(1)
                seen.append(argument[0].tolist())
                return pack_output(TokenOutput(np.array([9], np.int32)))

            await cluster.member("m", {"generate": generate})
            manager, ids = await cluster.manager(), [1, 2]
            task = asyncio.create_task(manager.generate("s", ids, {}))
            await asyncio.sleep(0.5)
            ids += [3, 4, 5]
            await task
            assert seen == [[1, 2]]

    run(main())


BAD_IDS = [
    [1.5],
    ["a"],
    [[1, 2]],
    [[1], [2, 3]],
    [2**31],
    [-(2**31) - 1],
    [2**70],
    [True, False],
    5,
    "text",
    None,
    [None],
]


@pytest.mark.parametrize("ids", BAD_IDS, ids=repr)
def test_what_are_no_ids_is_refused_here(ids: Any) -> None:
    """`InvalidRequest` before anything is sent."""

    async def main() -> None:
        async with Cluster() as cluster:
            with pytest.raises(InvalidRequest, match="prompt_ids"):
                await (await cluster.manager()).generate("s", ids, {})
            assert cluster.core.dispatch.pending == 0

    run(main())


@pytest.mark.parametrize("request_id", [5, None, b"x"])
def test_a_request_id_that_is_no_text_is_refused_here(request_id: Any) -> None:
    """It would be no message for the broker, and the call would wait for ever."""

    async def main() -> None:
        async with Cluster() as cluster:
            with pytest.raises(InvalidRequest, match="request_id must be text"):
                await (await cluster.manager()).generate(request_id, [1], {})

    run(main())


@pytest.mark.parametrize(
    ("ids", "params", "error"),
    [
        ([], {}, InvalidRequest),
        ([999_999], {}, InvalidRequest),
        ([-1], {}, InvalidRequest),
        ([1], {"temprature": 1.0}, InvalidRequest),
        ([1] * 200, {}, PromptTooLong),
    ],
    ids=["empty", "beyond the vocabulary", "negative", "unknown key", "too long"],
)
def test_the_engines_refusal_keeps_its_class(ids: list[int], params: dict[str, Any], error: type[Exception]) -> None:
    """For that call only: the engine serves the next one."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.engine(context_length=100)
            manager = await cluster.manager()
            with pytest.raises(error):
                await manager.generate("s", ids, params)
            assert len((await manager.generate("s", [1], {"max_new_tokens": 3})).token_ids) == 3
            assert cluster.quiet()

    run(main())


def test_a_conversation_stays_on_the_engine_that_knows_its_prefix() -> None:
    """The second turn finds the first one in the cache; a new session elsewhere does not."""

    async def main() -> None:
        async with Cluster() as cluster:
            for i in range(2):
                await cluster.engine(i)
            manager = await cluster.manager()
            prompt = list(range(3, 303))
            first = await manager.generate("s", prompt, {"max_new_tokens": 10})
            second = await manager.generate("s", [*prompt, *first.token_ids, 5], {"max_new_tokens": 10})
            other = await manager.generate("t", prompt, {"max_new_tokens": 10})
            assert (first.cached_tokens, second.cached_tokens, other.cached_tokens) == (0, 256, 0)

    run(main())


def test_ending_a_session_forgets_it() -> None:
    """The broker need not remember its engine."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.engine()
            manager = await cluster.manager()
            await manager.generate("s", [1], {"max_new_tokens": 1})
            assert len(cluster.core.dispatch.sessions) == 1
            await manager.end_session("s")
            await asyncio.sleep(0.1)
            assert len(cluster.core.dispatch.sessions) == 0

    run(main())


def test_a_managers_timeout_bounds_each_generate() -> None:
    """`DeadlineExceeded`, and the engine stops."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.engine(decode_tokens_per_s=1)
            manager = AsyncLLMServerManager(await cluster.caller(), timeout=5)
            with pytest.raises(DeadlineExceeded):
                await manager.generate("s", [1], {"max_new_tokens": 100})
            await asyncio.sleep(0.1)
            assert cluster.quiet()

    run(main())


def test_the_table_may_be_found_per_loop() -> None:
    """An async function instead of the pending table is asked each time."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.engine()
            calls, asked = await cluster.caller(), []

            async def here() -> Any:
                asked.append(1)
                return calls

            manager = AsyncLLMServerManager(here)
            await manager.generate("s", [1], {"max_new_tokens": 1})
            await manager.end_session("s")
            assert len(asked) == 2

    run(main())


def test_every_field_of_an_output_crosses() -> None:
    """Routed experts keep their int16, versions come back as tuples."""
    output = TokenOutput(
        np.array([4, 5], np.int32),
        np.array([-0.5, -np.inf], np.float32),
        "abort",
        np.arange(12, dtype=np.int16).reshape(2, 3, 2),
        3,
        [(7, 0, 1), (8, 1, 2)],
        64,
        {"reason": "x"},
    )
    back = unpack_output(decode_body(encode_body(pack_output(output))))
    assert list(back.token_ids) == [4, 5]
    assert list(back.log_probs) == [-0.5, -np.inf]
    assert (back.routed_experts == output.routed_experts).all()
    assert back.routed_experts.dtype == np.int16
    for name in ("stop_reason", "num_preempted", "versions", "cached_tokens", "extra_fields"):
        assert getattr(back, name) == getattr(output, name), name
