"""Rows with a reward, a tracer, tools and services around their loops."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from support.cluster_in_memory import Cluster
from support.virtual_clock import run
from zagent.client.services import Services
from zagent.config import RewardConfig, RolloutConfig
from zagent.errors import InputError, LoopError, RewardError, from_wire
from zagent.jsonl import to_json
from zagent.loops import registry
from zagent.loops.base import AgentLoopBase, TrainerConfig
from zagent.loops.registry import register
from zagent.loops.tools import BaseTool, Toolbox
from zagent.types import AgentLoopOutput
from zagent.wire.codec import decode_body, encode_body
from zagent.wire.messages import Call
from zagent.worker import runner
from zagent.worker.reward import Reward
from zagent.worker.runner import AgentLoopWorker
from zagent.worker.trace import Tracing

INFO = {"step": 5, "sample_index": 7, "rollout_n": 1, "validate": False}


@pytest.fixture(autouse=True)
def own_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names registered here are forgotten afterwards; the tokenizer's thread, which a virtual clock does not know, is
    this one."""

    async def here(function: Callable[[], Any]) -> Any:
        return function()

    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(runner, "in_tokenizer_thread", here)
    monkeypatch.setattr("zagent.worker.trace.in_tokenizer_thread", here)


class Letters:
    """Token n is the letter n."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(97 + token % 26) for token in ids) + ("" if skip_special_tokens else "$")


class Recorder:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


def output(**fields: Any) -> AgentLoopOutput:
    return AgentLoopOutput(**{"prompt_ids": [1], "response_ids": [0, 1, 2], "response_mask": [1] * 3, **fields})


def row(index: int = 0, agent: str = "mine", **kwargs: Any) -> dict[str, Any]:
    """A row as it arrives over the wire."""
    made = {
        "index": index,
        "uid": f"u{index}",
        "sample": 3,
        "agent_name": agent,
        "kwargs": {"raw_prompt": [{"role": "user", "content": "hi"}], **kwargs},
        "sampling_params": {"max_new_tokens": 4, "logprobs": True},
        "trajectory": INFO,
        "seed_key": [0, -1, False, str(index), 3],
    }
    return decode_body(encode_body(made))  # type: ignore[no-any-return]


def loop_of(body: Callable[..., Any]) -> None:
    @register("mine")
    class Mine(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            self.sampling_params, self.kwargs = sampling_params, kwargs
            result = body(self)
            return await result if asyncio.iscoroutine(result) else result  # type: ignore[no-any-return]


def scoring(function: Callable[..., Awaitable[Any]], **config: Any) -> Reward:
    return Reward(RewardConfig(function="mine.score", **config), function)


def outcome(body: Callable[..., Any], attempt: int = 1, given: Any = None, **world: Any) -> dict[str, Any]:
    """What becomes of one row under ``body``, with one simulated engine behind it, after a trip over the wire."""

    async def main() -> dict[str, Any]:
        async with Cluster() as cluster:
            await cluster.engine()
            loop_of(body)
            made = await (await worker(cluster, **world)).run(given or row(), attempt)
            await asyncio.sleep(0.1)
            assert cluster.quiet()
            return made

    return decode_body(encode_body(run(main())))  # type: ignore[no-any-return]


async def worker(
    cluster: Cluster, rollout: dict[str, Any] | None = None, tracer: Any = None, **world: Any
) -> AgentLoopWorker:
    tracing = None if tracer is None else Tracing(tracer, "worker-0", Letters(), token2text=True)
    config = TrainerConfig(RolloutConfig(**(rollout or {})), 1000)
    return AgentLoopWorker(await cluster.caller(), Letters(), config, tracing=tracing, **world)


async def of_length(solution_str: str) -> dict[str, Any]:
    await asyncio.sleep(7)
    return {"score": len(solution_str), "text": solution_str}


# ---- rewards --------------------------------------------------------------------------------------------------------


def test_a_row_is_scored_when_its_loop_has_ended() -> None:
    """Score, infos beside the loop's own, and the time it took."""
    fields = {"reward_extra_info": {"plan": "b"}, "tool_rewards": [0.5], "turn_scores": [1.0, 2.0]}
    made = outcome(lambda self: output(extra_fields=fields), reward=scoring(of_length))["output"]
    assert made["reward_score"] == 3.0
    assert made["extra_fields"]["reward_extra_info"] == {"plan": "b", "text": "abc"}
    assert made["metrics"]["compute_score"] == 7.0
    assert (made["extra_fields"]["tool_rewards"], made["extra_fields"]["turn_scores"]) == ([0.5], [1.0, 2.0])


def test_a_reward_knows_the_attempt() -> None:
    """As the row's loop does."""

    async def function(attempt: int) -> float:
        return attempt

    made = outcome(lambda self: output(), attempt=3, reward=scoring(function))
    assert made["output"]["reward_score"] == 3.0


def test_a_loops_own_score_stays() -> None:
    """The function is not called; a score of 0 is one."""

    async def never() -> float:
        raise AssertionError

    made = outcome(lambda self: output(reward_score=0.0), reward=scoring(never))["output"]
    assert (made["reward_score"], made["metrics"]["compute_score"]) == (0.0, 0.0)
    assert "reward_extra_info" not in made["extra_fields"]


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 1e39])
def test_a_loops_own_score_must_be_a_number(score: float) -> None:
    """`LoopError`, before it could spoil a batch's mean."""
    error = from_wire(outcome(lambda self: output(reward_score=score))["error"])
    assert isinstance(error, LoopError)
    assert "agent loop 'mine': a score must be a finite float32" in str(error)


def test_without_a_function_no_row_is_scored() -> None:
    """None, not 0."""
    assert outcome(lambda self: output())["output"]["reward_score"] is None


def test_what_a_batch_would_cut_is_not_scored() -> None:
    """The text is that of the trained response."""
    made = outcome(lambda self: output(), reward=scoring(of_length), rollout={"response_length": 2})
    assert made["output"]["extra_fields"]["reward_extra_info"] == {"text": "ab"}


def test_an_empty_response_is_scored() -> None:
    """As the empty text (D14: collate puts it nowhere)."""
    made = outcome(lambda self: output(response_ids=[], response_mask=[]), reward=scoring(of_length))
    assert made["output"]["reward_score"] == 0.0


async def fails(**row: Any) -> float:
    raise ValueError("made of cheese")


def test_a_row_that_cannot_be_scored_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    """`RewardError`; its answer is in the error and in the log, with the row's name."""
    made = outcome(lambda self: output(), reward=scoring(fails))
    error = from_wire(made["error"])
    assert (made["status"], made["output"]) == ("failed", None)
    assert isinstance(error, RewardError)
    assert str(error) == "reward function 'mine.score': ValueError: made of cheese; the answer was 'abc'"
    assert "in fails" in str(error.__cause__)
    assert "row 0 (uid u0, sample 3) has no score" in caplog.text


def test_a_row_may_go_without_a_score(caplog: pytest.LogCaptureFixture) -> None:
    """`on_error=none`: it is ok, and says why it has none."""
    made = outcome(lambda self: output(), reward=scoring(fails, on_error="none"))
    assert (made["status"], made["output"]["reward_score"]) == ("ok", None)
    info = made["output"]["extra_fields"]["reward_extra_info"]
    assert info == {"reward_error": "reward function 'mine.score': ValueError: made of cheese"}
    assert "made of cheese" in caplog.text


def test_siblings_of_a_hanging_reward_go_on() -> None:
    """They end at their own times; the one that hangs fails after `timeout_s` (G1, K22, K23)."""

    async def score(solution_str: str, extra_info: dict[str, Any]) -> float:
        await asyncio.sleep(10_000 if extra_info["number"] == 2 else 1)
        return 1.0

    async def main() -> list[tuple[str, float]]:
        async with Cluster() as cluster:
            mine = await worker(cluster, reward=scoring(score, timeout_s=60))
            loop_of(lambda self: output(extra_fields={"number": self.kwargs["number"]}))
            clock = asyncio.get_running_loop().time
            began = clock()

            async def one(number: int) -> tuple[str, float]:
                made = await mine.run(row(number, number=number))
                return made["status"], clock() - began

            return await asyncio.gather(*(one(number) for number in range(4)))

    assert run(main()) == [("ok", 1), ("ok", 1), ("failed", 60), ("ok", 1)]


def test_the_trajectorys_time_limit_is_not_the_rewards() -> None:
    """A reward may take longer than what is left of it."""

    async def body(self: Any) -> AgentLoopOutput:
        await asyncio.sleep(9)
        return output()

    made = outcome(body, reward=scoring(of_length), rollout={"trajectory_timeout_s": 10})
    assert made["output"]["reward_score"] == 3.0


def test_engines_forget_a_trajectory_before_it_is_scored() -> None:
    """Its sessions are over when the reward begins."""
    sessions = []

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.engine()

            async def score() -> float:
                await asyncio.sleep(1)
                sessions.append(len(cluster.core.dispatch.sessions))
                return 1.0

            async def body(self: Any) -> AgentLoopOutput:
                await self.server_manager.generate(self.session, [1], self.sampling_params)
                sessions.append(len(cluster.core.dispatch.sessions))
                return output()

            loop_of(body)
            await (await worker(cluster, reward=scoring(score))).run(row())

    run(main())
    assert sessions == [1, 0]


def test_cancelling_the_row_cancels_its_reward() -> None:
    """The function sees it; the trace says so."""
    seen, tracer = [], Recorder()

    async def score() -> float:
        try:
            await asyncio.sleep(10_000)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        return 1.0

    async def main() -> None:
        async with Cluster() as cluster:
            loop_of(lambda self: output())
            task = asyncio.create_task((await worker(cluster, reward=scoring(score), tracer=tracer)).run(row()))
            await asyncio.sleep(1)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()

    run(main())
    assert seen == ["cancelled"]
    assert [(event["kind"], event.get("status")) for event in tracer.events] == [("start", None), ("end", "cancelled")]


def test_a_partial_row_is_scored_too() -> None:
    """Its status still says that it is no finished one."""

    async def main() -> dict[str, Any]:
        async with Cluster() as cluster:
            await cluster.engine(faults=[{"do": "abort", "at_call": 1}])

            async def body(self: Any) -> AgentLoopOutput:
                await self.server_manager.generate("s", [1], self.sampling_params)
                return output()

            loop_of(body)
            ends_there = {"partial_rollout": False}
            return await (await worker(cluster, ends_there, reward=scoring(of_length))).run(row())

    made = run(main())
    assert (made["status"], made["output"]["reward_score"]) == ("partial", 3.0)


# ---- traces ---------------------------------------------------------------------------------------------------------


async def two_calls(self: Any) -> AgentLoopOutput:
    for turn in range(2):
        await self.server_manager.generate(self.session, [0, 1, 2][: 2 + turn], self.sampling_params)
    self.trace("mood", good=True)
    return output(num_turns=2)


def test_a_row_is_told_from_start_to_end() -> None:
    """Each engine call, what the loop says, the reward, the end; all of one attempt and session (K45)."""
    tracer = Recorder()
    outcome(two_calls, attempt=2, tracer=tracer, reward=scoring(of_length))
    assert [event["kind"] for event in tracer.events] == ["start", "generate", "generate", "mood", "reward", "end"]
    start, first, second, mood, reward, end = tracer.events
    own = ("trajectory", "uid", "sample", "attempt", "session", "worker")
    assert {json.dumps([event[key] for key in own]) for event in tracer.events} == {
        json.dumps([INFO, "u0", 3, 2, start["session"], "worker-0"])
    }
    assert (start["agent"], start["sampling_params"]["max_new_tokens"]) == ("mine", 4)
    assert [(e["call"], e["request"], e["prompt_tokens"]) for e in (first, second)] == [
        (0, start["session"], 2),
        (1, start["session"], 3),
    ]
    assert (second["prompt_text"], second["response_text"]) == ("abc$", Letters().decode(second["response_ids"], False))
    assert (second["response_tokens"], second["stop_reason"]) == (4, "length")
    assert mood["good"] is True
    assert (reward["score"], reward["info"], reward["error"], reward["seconds"]) == (3.0, {"text": "abc"}, None, 7.0)
    assert (end["status"], end["error"], end["num_turns"], end["reward_score"]) == ("ok", None, 2, 3.0)
    assert end["metrics"]["compute_score"] == 7.0
    json.dumps(to_json(tracer.events), allow_nan=False)


def test_attempts_have_sessions_of_their_own() -> None:
    """Two runs of one row are told apart."""
    tracer = Recorder()
    for attempt in (1, 2):
        outcome(two_calls, attempt=attempt, tracer=tracer)
    assert len({(event["attempt"], event["session"]) for event in tracer.events}) == 2


def test_failures_are_told() -> None:
    """An engine call's, the reward's, the row's."""
    tracer = Recorder()

    async def body(self: Any) -> AgentLoopOutput:
        await self.server_manager.generate("s", [], {})
        return output()

    outcome(body, tracer=tracer)
    outcome(lambda self: output(), tracer=tracer, reward=scoring(fails))
    (call,), (reward,) = tracer.of("generate"), tracer.of("reward")
    assert call["error"].startswith("InvalidRequest: ")
    assert (reward["score"], "made of cheese" in reward["error"]) == (None, True)
    assert [(event["status"], event["error"].split(":")[0]) for event in tracer.of("end")] == [
        ("failed", "InvalidRequest"),
        ("failed", "RewardError"),
    ]


def test_a_broken_tracer_hurts_no_row(caplog: pytest.LogCaptureFixture) -> None:
    """The row is ok; the log knows."""

    class Broken:
        def event(self, event: dict[str, Any]) -> None:
            raise OSError("full disk")

    assert outcome(two_calls, tracer=Broken())["status"] == "ok"
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 4  # start, generate, mood, end


def test_without_a_tracer_nothing_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And loops may call `trace` all the same."""
    monkeypatch.setattr("zagent.worker.trace.in_tokenizer_thread", None)
    assert outcome(two_calls)["status"] == "ok"


# ---- what loops are given -------------------------------------------------------------------------------------------


class Tool(BaseTool):
    async def execute(self, instance_id: str, arguments: dict[str, Any], **kwargs: Any) -> Any:
        """Never called here."""


def tools(*names: str) -> Toolbox:
    schema = {"type": "function", "function": {"description": "d", "parameters": {"type": "object", "properties": {}}}}
    return Toolbox(Tool({}, {**schema, "function": {**schema["function"], "name": name}}) for name in names)


def given(attribute: Callable[[Any], Any], column: Any = None, **world: Any) -> Any:
    """What ``attribute`` gives of a loop under way."""
    mine = row() if column is None else row(tools=column)
    made = outcome(lambda self: output(extra_fields={"it": attribute(self)}), given=mine, **world)
    if made["error"] is not None:
        raise from_wire(made["error"])
    return made["output"]["extra_fields"]["it"]


@pytest.mark.parametrize(
    ("column", "names"),
    [(None, ["a", "b"]), (["b"], ["b"]), ([], None), ([{"type": "function"}], ["a", "b"]), ("text", ["a", "b"])],
)
def test_a_rows_tools(column: Any, names: list[str] | None) -> None:
    """All, or those its column names; schemas in it are the loop's business; the column reaches `run`."""

    def seen(self: Any) -> Any:
        assert self.kwargs.get("tools") == column
        return None if self.tools is None else self.tools.names

    assert given(seen, column, toolbox=tools("a", "b")) == names


def test_a_tool_that_is_not_there_fails_the_row() -> None:
    """The known ones are listed."""
    with pytest.raises(InputError, match="no tool 'c'; known: a, b"):
        given(lambda self: None, ["a", "c"], toolbox=tools("a", "b"))


def test_where_there_are_no_tools_there_is_none() -> None:
    """Whatever a column of that name means to the loop."""
    assert given(lambda self: self.tools, ["cats"]) is None
    assert given(lambda self: self.tools, ["cats"], toolbox=tools()) is None


def test_session_attempt_and_interactions() -> None:
    """Of this attempt; the worker's."""
    found = given(lambda self: [self.session, self.attempt, sorted(self.interactions)], interactions={"user": None})
    assert (len(found[0]), *found[1:]) == (32, 1, ["user"])


def test_services_are_bound_to_the_attempts_session() -> None:
    """For loops and rewards alike; the broker forgets it when the row has ended."""
    sessions, during = [], []

    async def main() -> None:
        async with Cluster(pools=("engine", "worker", "greeter")) as cluster:

            async def hello(argument: Any, call: Call) -> Any:
                sessions.append(call.session)
                return argument[0]

            await cluster.member("greeter-0", {"hello": hello}, pool="greeter")
            calls = await cluster.caller()

            async def body(self: Any) -> AgentLoopOutput:
                assert await self.services["greeter"].hello("loop") == ["loop"]
                during.append((self.session, len(cluster.core.dispatch.sessions)))
                return output()

            async def score(services: Any) -> float:
                assert await services["greeter"].hello("reward") == ["reward"]
                return 1.0

            loop_of(body)
            config = TrainerConfig(RolloutConfig(), 1000)
            services = Services(calls, ["greeter"])
            mine = AgentLoopWorker(calls, Letters(), config, reward=scoring(score), services=services)
            assert (await mine.run(row()))["status"] == "ok"
            await asyncio.sleep(0.1)
            during.append(("", len(cluster.core.dispatch.sessions)))

    run(main())
    assert sessions == [during[0][0]] * 2
    assert [count for _, count in during] == [1, 0]


def test_loops_of_any_class() -> None:
    """With slots, with a `trace` method and attributes of their own: what is theirs stays."""

    @register("slotted")
    class Slotted:
        __slots__ = ("attempt",)

        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            return output(extra_fields={"it": self.attempt})

    @register("own")
    class Own:
        def __init__(self) -> None:
            self.session = "mine"

        def trace(self) -> str:
            return "mine"

        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            return output(extra_fields={"it": [self.session, self.trace(), self.attempt]})

    async def main() -> list[Any]:
        async with Cluster() as cluster:
            mine = await worker(cluster)
            made = [await mine.run(row(agent=agent), 2) for agent in ("slotted", "own")]
            return [one["output"]["extra_fields"]["it"] for one in made]

    assert run(main()) == [2, ["mine", "mine", 2]]


def test_the_tools_rewards_cross_the_wire_as_they_are() -> None:
    """Lists of floats; an array of numpy's stays one."""
    fields = {"tool_rewards": [0.0, 1.5], "turn_scores": np.array([1.0, 2.0])}
    made = outcome(lambda self: output(extra_fields=fields))["output"]["extra_fields"]
    assert made["tool_rewards"] == [0.0, 1.5]
    assert made["turn_scores"].tolist() == [1.0, 2.0]
