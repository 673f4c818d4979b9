"""One sample to one outcome, whatever its loop does; siblings untouched."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from support.cluster_in_memory import Cluster
from support.virtual_clock import run
from zagent.client.llm_client import pack_output
from zagent.config import RolloutConfig
from zagent.errors import (
    CallCancelled,
    DeadlineExceeded,
    EncodeError,
    InvalidRequest,
    LoopError,
    PromptTooLong,
    RemoteError,
    UnknownAgent,
    from_wire,
)
from zagent.loops import registry
from zagent.loops.base import AgentLoopBase, TrainerConfig
from zagent.loops.limited import CANCEL_GRACE_S
from zagent.loops.registry import find_loop, register
from zagent.types import STANDARD_EXTRA_FIELDS, AgentLoopOutput, TokenOutput
from zagent.wire.codec import decode_body, encode_body
from zagent.wire.messages import Call
from zagent.worker.runner import AgentLoopWorker, row_key


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names registered here are forgotten afterwards."""
    find_loop("single_turn_agent")  # registers itself once per process, when it is imported
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def row(index: int = 0, agent: str = "mine", **kwargs: Any) -> dict[str, Any]:
    """A row as it arrives over the wire."""
    made = {
        "index": index,
        "uid": f"u{index}",
        "sample": 0,
        "agent_name": agent,
        "kwargs": {"raw_prompt": [{"role": "user", "content": "hi"}], **kwargs},
        "sampling_params": {"max_new_tokens": 4, "logprobs": True},
        "trajectory": {},
        "seed_key": [0, -1, False, str(index), 0],
    }
    return decode_body(encode_body(made))  # type: ignore[no-any-return]


def output(**fields: Any) -> AgentLoopOutput:
    return AgentLoopOutput(**{"prompt_ids": [1], "response_ids": [2], "response_mask": [1], **fields})


def loop_of(body: Callable[..., Any], name: str = "mine") -> type[AgentLoopBase]:
    """A registered loop whose `run` is ``body(self, **row)``, awaited where it is a coroutine."""

    @register(name)
    class Mine(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            self.sampling_params, self.kwargs = sampling_params, kwargs
            result = body(self)
            return await result if asyncio.iscoroutine(result) else result

    return Mine


async def worker(cluster: Cluster, **rollout: Any) -> AgentLoopWorker:
    return AgentLoopWorker(await cluster.caller(), None, TrainerConfig(RolloutConfig(**rollout), 1000))


def outcome(body: Callable[..., Any], attempt: int = 1, **rollout: Any) -> dict[str, Any]:
    """What becomes of one row under ``body``, with one simulated engine behind it, after a trip over the wire."""

    async def main() -> dict[str, Any]:
        async with Cluster() as cluster:
            await cluster.engine()
            loop_of(body)
            made = await (await worker(cluster, **rollout)).run(row(), attempt)
            await asyncio.sleep(0.1)
            assert cluster.quiet()
            assert len(cluster.core.dispatch.sessions) == 0
            return made

    return decode_body(encode_body(run(main())))  # type: ignore[no-any-return]


def error_of(body: Callable[..., Any], **rollout: Any) -> Exception:
    made = outcome(body, **rollout)
    assert (made["status"], made["output"]) == ("failed", None)
    return from_wire(made["error"])


def raiser(error: BaseException) -> Callable[[Any], Any]:
    def body(self: Any) -> Any:
        raise error

    return body


def test_a_finished_loop_is_ok() -> None:
    """With its output as arrays, without an error, and with the attempt it was."""
    made = outcome(lambda self: output(response_logprobs=[-0.5], reward_score=1.5, num_turns=2), attempt=3)
    assert (made["status"], made["error"], made["attempt"]) == ("ok", None, 3)
    assert made["output"]["response_ids"].dtype == np.int32
    assert made["output"]["response_logprobs"].dtype == np.float32
    assert AgentLoopOutput(**made["output"]).reward_score == 1.5


def test_the_row_and_the_attempt_reach_the_loop() -> None:
    """Its own sampling params, its row's keys, its name for log lines, and what names it in the world outside."""

    def body(self: Any) -> AgentLoopOutput:
        self.sampling_params["max_new_tokens"] = 0  # its own dict
        seen = [self.attempt, self.row_name, self.row_key, sorted(self.kwargs)]
        return output(extra_fields={"seen": seen})

    made = outcome(body, attempt=2)
    assert made["output"]["extra_fields"]["seen"] == [2, "row 0 (uid u0, sample 0)", "-1/0/0", ["raw_prompt"]]


@pytest.mark.parametrize(
    ("seed_key", "key"),
    [([7, 12, False, "u-3", 1], "12/u-3/1"), ([8, 12, True, "u-3", 1], "12/validate/u-3/1")],
)
def test_a_rows_key_is_that_of_all_its_attempts(seed_key: list[Any], key: str) -> None:
    """Step, uid and sample; a validation of the same step is another row, another seed is not."""
    assert row_key({"seed_key": seed_key}) == key


@pytest.mark.parametrize(
    "error", [ValueError("bad"), KeyError("k"), TimeoutError("tool"), InvalidRequest("no"), LoopError("x")], ids=repr
)
def test_a_loop_that_raises_keeps_its_errors_class(error: Exception) -> None:
    """Text and traceback as well (pitfalls B6, K36)."""
    back = error_of(raiser(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert "in body" in str(back.__cause__)


class Panic(BaseException):
    """As a Rust tokenizer raises it."""


@pytest.mark.parametrize(
    "error", [SystemExit(1), KeyboardInterrupt(), Panic("rust"), BaseExceptionGroup("g", [Panic()])], ids=repr
)
def test_not_even_a_base_exception_ends_the_worker(error: BaseException) -> None:
    """`sys.exit()` in a loop fails its row."""
    back = error_of(raiser(error))
    assert isinstance(back, RemoteError)
    assert type(error).__name__ in back.type_name


def test_sys_exit_is_an_error_of_the_row() -> None:
    """Called by the user's code, as such."""
    assert isinstance(error_of(lambda self: sys.exit(3)), RemoteError)


@pytest.mark.parametrize("value", [None, {}, [1], "text", TokenOutput([1])], ids=lambda v: type(v).__name__)
def test_a_loop_that_returns_something_else_is_told(value: Any) -> None:
    """`LoopError` naming loop and type."""
    back = error_of(lambda self: value)
    assert isinstance(back, LoopError)
    assert f"agent loop 'mine' returned a {type(value).__name__}, not an AgentLoopOutput" in str(back)


def test_unequal_lengths_fail_the_row() -> None:
    """Where the output is made; both lengths are named."""
    back = error_of(lambda self: output(response_mask=[1, 1]))
    assert "response_mask has 2 entries, response_ids has 1" in str(back)


def mutated(**fields: Any) -> Callable[[Any], Any]:
    """An output that was valid when made and changed afterwards."""

    def body(self: Any) -> AgentLoopOutput:
        made = output()
        for key, value in fields.items():
            setattr(made, key, value)
        return made

    return body


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            lambda self: output(extra_fields={"rollout_versions": [1, 2]}),
            "rollout_versions has 2 entries, response_ids has 1",
        ),
        (lambda self: output(extra_fields={"reward_extra_info": [1]}), "reward_extra_info must be a dict"),
        (lambda self: output(routed_experts=np.zeros((2, 2))), "routed_experts must be an array [tokens, layers"),
        (mutated(response_mask=[1, 1]), "response_mask has 2 entries, response_ids has 1"),
        (mutated(response_ids=["a"]), "response_ids must hold only 32-bit integers"),
    ],
)
def test_what_a_trainer_could_not_use_fails_here(body: Any, text: str) -> None:
    """In its own row, before it could spoil the batch."""
    assert text in str(error_of(body))


def test_a_prompt_beyond_the_width_fails_the_row() -> None:
    """Both lengths are named."""
    back = error_of(lambda self: output(prompt_ids=[1] * 5), prompt_length=4)
    assert isinstance(back, PromptTooLong)
    assert "a prompt of 5 tokens, beyond rollout.prompt_length=4" in str(back)


def test_an_extra_field_that_cannot_travel_fails_the_row_by_name() -> None:
    """`EncodeError` with the type."""
    back = error_of(lambda self: output(extra_fields={"tool": {1, 2}}))
    assert isinstance(back, EncodeError)
    assert "set" in str(back)


def test_an_unknown_agent_fails_the_row_with_the_known_names() -> None:
    """`UnknownAgent`."""

    async def main() -> Exception:
        async with Cluster() as cluster:
            return from_wire((await (await worker(cluster)).run(row(agent="nobody")))["error"])

    back = run(main())
    assert isinstance(back, UnknownAgent)
    assert "single_turn_agent" in str(back)


def test_a_trajectory_that_takes_too_long_is_stopped() -> None:
    """`DeadlineExceeded` with the limit; its engine call is stopped too."""

    async def body(self: Any) -> AgentLoopOutput:
        await self.server_manager.generate("s", [1], {"max_new_tokens": 4})
        await asyncio.sleep(10_000)
        return output()

    back = error_of(body, trajectory_timeout_s=30)
    assert isinstance(back, DeadlineExceeded)
    assert "longer than 30 s" in str(back)


def test_a_timeout_of_the_loops_own_is_not_the_trajectorys() -> None:
    """It stays a `TimeoutError`."""

    async def body(self: Any) -> AgentLoopOutput:
        async with asyncio.timeout(1):
            await asyncio.sleep(5)
        return output()

    assert type(error_of(body)) is TimeoutError


def test_a_cancellation_out_of_nowhere_is_an_error() -> None:
    """A library that raises CancelledError does not make the row disappear (pitfall B6)."""
    assert isinstance(error_of(raiser(asyncio.CancelledError())), CallCancelled)


def test_a_loop_that_ignores_its_deadline_is_left_behind() -> None:
    """The row ends with DeadlineExceeded, a bounded time after its limit, whatever its loop does."""

    async def main() -> tuple[dict[str, Any], float]:
        async with Cluster() as cluster:
            stubborn = asyncio.Event()

            async def body(self: Any) -> AgentLoopOutput:
                while not stubborn.is_set():
                    with suppress(asyncio.CancelledError):
                        await stubborn.wait()
                return output()

            loop_of(body)
            clock = asyncio.get_running_loop().time
            began = clock()
            made = await (await worker(cluster, trajectory_timeout_s=100)).run(row())
            took = clock() - began
            stubborn.set()
            await asyncio.sleep(0.1)
            return made, took

    made, took = run(main())
    assert isinstance(from_wire(made["error"]), DeadlineExceeded)
    assert took == pytest.approx(100 + CANCEL_GRACE_S)


def test_cancelling_the_row_stops_loop_and_engine() -> None:
    """The loop sees CancelledError, the engine's call ends, the session is forgotten (pitfalls K7, K31)."""

    async def main() -> None:
        async with Cluster() as cluster:
            server = await cluster.engine(decode_tokens_per_s=0.01)
            seen = []

            async def body(self: Any) -> AgentLoopOutput:
                try:
                    await self.server_manager.generate("s", [1], {"max_new_tokens": 4})
                except asyncio.CancelledError:
                    seen.append("cancelled")
                    raise
                return output()

            loop_of(body)
            task = asyncio.create_task((await worker(cluster)).run(row()))
            await asyncio.sleep(1)
            assert server.engine.in_flight() == 1
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await asyncio.sleep(0.1)
            assert seen == ["cancelled"]
            assert cluster.quiet()
            assert len(cluster.core.dispatch.sessions) == 0

    run(main())


def test_siblings_of_a_failed_row_finish() -> None:
    """Two of twenty raise: the others are untouched (pitfalls B6, K22, K23)."""

    async def main() -> list[str]:
        async with Cluster() as cluster:
            await cluster.engine(decode_tokens_per_s=10)

            async def body(self: Any) -> AgentLoopOutput:
                if self.kwargs["number"] in (3, 7):
                    raise ValueError("bad row")
                made = await self.server_manager.generate(f"s{self.kwargs['number']}", [1], self.sampling_params)
                return output(response_ids=made.token_ids, response_mask=[1] * 4, response_logprobs=made.log_probs)

            loop_of(body)
            mine = await worker(cluster)
            outcomes = await asyncio.gather(*(mine.run(row(i, number=i)) for i in range(20)))
            return [o["status"] for o in outcomes]

    assert run(main()) == ["failed" if i in (3, 7) else "ok" for i in range(20)]


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_aborted_answer_makes_the_row_partial_unless_it_goes_on(*, goes_on: bool) -> None:
    """`abort` never passes for a finished turn (pitfalls H5, K29)."""

    async def main() -> dict[str, Any]:
        async with Cluster() as cluster:
            await cluster.engine(faults=[{"do": "abort", "at_call": 1}])

            async def body(self: Any) -> AgentLoopOutput:
                made = await self.server_manager.generate("s", [1], self.sampling_params)
                return output(response_ids=made.token_ids, response_mask=[1] * len(made.token_ids))

            loop_of(body)
            return await (await worker(cluster, partial_rollout=goes_on)).run(row())

    made = run(main())
    assert (made["status"], len(made["output"]["response_ids"])) == (("ok", 4) if goes_on else ("partial", 2))


def test_a_later_answer_makes_it_whole_again() -> None:
    """Only the last call counts: the loop went on."""

    async def main() -> str:
        async with Cluster() as cluster:
            await cluster.engine(faults=[{"do": "abort", "at_call": 1}])

            async def body(self: Any) -> AgentLoopOutput:
                for _ in range(2):
                    await self.server_manager.generate("s", [1], self.sampling_params)
                return output()

            loop_of(body)
            return (await (await worker(cluster)).run(row()))["status"]  # type: ignore[no-any-return]

    assert run(main()) == "ok"


def test_every_row_has_the_standard_extra_fields() -> None:
    """So that rows of different loops concatenate; the loop's own values win (pitfall D23)."""
    plain = outcome(lambda self: output())["output"]["extra_fields"]
    assert {*STANDARD_EXTRA_FIELDS, "cached_tokens", "prompt_tokens", "rollout_versions"} == set(plain)
    own = outcome(lambda self: output(extra_fields={"turn_scores": [1.0], "min_global_steps": 5}))
    assert own["output"]["extra_fields"]["turn_scores"] == [1.0]
    assert own["output"]["extra_fields"]["min_global_steps"] == 5


def test_versions_and_tokens_are_counted_over_all_turns() -> None:
    """min/max of every segment's version, prompt and cached tokens summed (pitfall H11)."""

    async def main() -> dict[str, Any]:
        async with Cluster() as cluster:
            versions = iter([[(4, 0, 1), (6, 1, 2)], [(5, 0, 2)]])

            async def generate(argument: Any, call: Call) -> list[Any]:
                ids = np.array([1, 2], np.int32)
                return pack_output(TokenOutput(ids, versions=next(versions), cached_tokens=3))

            await cluster.member("m", {"generate": generate})

            async def body(self: Any) -> AgentLoopOutput:
                for length in (5, 7):
                    await self.server_manager.generate("s", [1] * length, {})
                return output()

            loop_of(body)
            return (await (await worker(cluster)).run(row()))["output"]["extra_fields"]  # type: ignore[no-any-return]

    fields = run(main())
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (4, 6)
    assert (fields["prompt_tokens"], fields["cached_tokens"]) == (12, 6)


def test_all_sessions_of_a_trajectory_are_ended() -> None:
    """Also when the loop raises."""

    async def main() -> tuple[int, int]:
        async with Cluster() as cluster:
            await cluster.engine()
            during = []

            async def body(self: Any) -> AgentLoopOutput:
                for session in ("a", "b"):
                    await self.server_manager.generate(session, [1], {"max_new_tokens": 1})
                during.append(len(cluster.core.dispatch.sessions))
                raise ValueError("end")

            loop_of(body)
            await (await worker(cluster)).run(row())
            await asyncio.sleep(0.1)
            return during[0], len(cluster.core.dispatch.sessions)

    assert run(main()) == (2, 0)


def test_routed_experts_and_images_survive() -> None:
    """Dtype and bytes as they were."""
    experts = np.ones((2, 3, 4), np.int16)
    made = outcome(lambda self: output(routed_experts=experts, multi_modal_data={"images": [b"\xff\x00"]}))
    assert made["output"]["routed_experts"].dtype == np.int16
    assert made["output"]["multi_modal_data"] == {"images": [b"\xff\x00"]}
