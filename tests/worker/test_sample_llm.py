"""Seeds follow the sample and its turn, whoever runs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.cluster_in_memory import Cluster
from support.virtual_clock import run
from zagent.client.llm_client import pack_output
from zagent.loops.seeds import seed_for
from zagent.types import TokenOutput
from zagent.wire.messages import Call
from zagent.worker.sample_llm import SampleServerManager

KEY = [0, 5, False, "u", 1]


def asked(params: dict[str, Any], calls: int = 2, workers: int = 1) -> list[list[dict[str, Any]]]:
    """The sampling params that the engine saw, per worker."""

    async def main() -> list[list[dict[str, Any]]]:
        async with Cluster() as cluster:
            seen: list[dict[str, Any]] = []

            async def generate(argument: Any, call: Call) -> list[Any]:
                seen.append(argument[1])
                return pack_output(TokenOutput(np.array([1], np.int32)))

            await cluster.member("m", {"generate": generate})
            found = []
            for number in range(workers):
                manager = SampleServerManager(await cluster.caller(), KEY, 99)
                for _ in range(calls):
                    await manager.generate(f"session {number}", [1], params)
                found.append([*seen])
                seen.clear()
            return found

    return run(main())


def test_call_k_is_seeded_with_turn_k() -> None:
    """By the row's key; the caller's dict is not changed."""
    params = {"temperature": 1.0}
    (seen,) = asked(params, calls=3)
    assert [p["sampling_seed"] for p in seen] == [seed_for(0, 5, False, "u", 1, turn) for turn in range(3)]
    assert params == {"temperature": 1.0}


def test_samples_of_one_prompt_are_one_group() -> None:
    """All calls of all samples, whatever the uid is; another prompt, step or validation is another group."""

    async def main() -> None:
        async with Cluster() as cluster:
            groups: list[str] = []

            async def generate(argument: Any, call: Call) -> list[Any]:
                groups.append(call.group)
                return pack_output(TokenOutput(np.array([1], np.int32)))

            await cluster.member("m", {"generate": generate})
            calls = await cluster.caller()
            keys = ([0, 5, False, "u", 0], [0, 5, False, "u", 1])
            others = (
                [0, 6, False, "u", 0],
                [0, 5, True, "u", 0],
                [0, 5, False, "v", 0],
                [0, 5, False, "\ud800" * 9999, 0],
            )
            for key in (*keys, keys[0], *others):
                await SampleServerManager(calls, key, 99).generate("s", [1], {})
            assert groups[0] == groups[1] == groups[2]
            assert len(set(groups)) == 5
            assert max(map(len, groups)) == 16

    run(main())


def test_the_same_row_has_the_same_seeds_on_any_worker() -> None:
    """Nothing of the worker enters (pitfall K43)."""
    first, second = asked({}, workers=2)
    assert first == second


def test_a_loop_may_choose_its_own_seed() -> None:
    """What it says wins."""
    (seen,) = asked({"sampling_seed": 7})
    assert [p["sampling_seed"] for p in seen] == [7, 7]


@pytest.mark.parametrize(
    ("params", "sent"),
    [({}, 99), ({"max_new_tokens": 5}, 5), ({"max_tokens": 7}, 7), ({"max_tokens": 7, "max_new_tokens": 5}, 5)],
)
def test_every_call_has_a_token_limit(params: dict[str, Any], sent: int) -> None:
    """The caller's, under either name, else the response length: an engine alone would go on to the context's end."""
    (seen,) = asked(params)
    assert [(p["max_new_tokens"], "max_tokens" in p) for p in seen] == [(sent, False)] * len(seen)
