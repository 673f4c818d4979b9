"""A row of `tool_agent` in a worker: tools, services, reward and trace together."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import zagent
from support.cluster_in_memory import Cluster
from support.scripted_llm import ScriptedLLM
from zagent.client.llm_client import pack_output
from zagent.client.services import Services
from zagent.config import MultiTurnConfig, RewardConfig, RolloutConfig
from zagent.loops.base import TrainerConfig
from zagent.loops.tools import Toolbox, ToolContext
from zagent.tiny.tokenizer import build
from zagent.wire.messages import Call
from zagent.worker.reward import Reward
from zagent.worker.runner import AgentLoopWorker
from zagent.worker.trace import Tracing

TOKENIZER = build()
ANSWERS = (
    '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>',
    '<tool_call>\n{"name": "divide", "arguments": {"a": 6, "b": 0}}\n</tool_call>',
    "It is 42.",
)


@zagent.tool
async def multiply(a: int, b: int, context: ToolContext) -> tuple[str, float]:
    """Multiply two numbers."""
    return str(await context.services["arithmetic"].times(a, b)), 0.5


@zagent.tool
def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


class Recorder:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, event: dict[str, Any]) -> None:
        self.events.append(event)


def score(solution_str: str, ground_truth: str, extra_info: dict[str, Any], messages: list[Any]) -> dict[str, Any]:
    """Right, and how it came about."""
    tools = [message["content"] for message in messages if message["role"] == "tool"]
    return {"score": ground_truth in solution_str, "tools": tools, "rewards": extra_info["tool_rewards"]}


def run_row() -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """The outcome of a row that calls two tools, what the tracer heard, and the service's sessions."""
    turns = MultiTurnConfig(tools=(f"{__name__}.multiply", f"{__name__}.divide"))
    rollout = RolloutConfig(agent="tool_agent", multi_turn=turns)
    tracer, sessions = Recorder(), []
    row = {
        "index": 0,
        "uid": "q",
        "sample": 1,
        "agent_name": "tool_agent",
        "kwargs": {"raw_prompt": [{"role": "user", "content": "6 x 7?"}], "reward_model": {"ground_truth": "42"}},
        "sampling_params": {"logprobs": True},
        "trajectory": {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False},
        "seed_key": [0, 1, False, "q", 1],
    }

    async def main() -> dict[str, Any]:
        async with Cluster(pools=("engine", "worker", "arithmetic")) as cluster:
            llm = ScriptedLLM(TOKENIZER, *ANSWERS)

            async def generate(argument: Any, call: Call) -> Any:
                return pack_output(await llm.generate(call.session, argument[0], argument[1]))

            async def times(argument: Any, call: Call) -> Any:
                sessions.append(call.session)
                (a, b), _ = argument
                return a * b

            await cluster.member("engine-0", {"generate": generate})
            await cluster.member("arithmetic-0", {"times": times}, pool="arithmetic")
            calls = await cluster.caller()
            worker = AgentLoopWorker(
                calls,
                TOKENIZER,
                TrainerConfig(rollout, 4096),
                toolbox=Toolbox.load(turns),
                reward=Reward(RewardConfig(function="mine.score"), score),
                tracing=Tracing(tracer, "worker-0", TOKENIZER, token2text=True),
                services=Services(calls, ["arithmetic"]),
            )
            made = await worker.run(row)
            await asyncio.sleep(0)
            assert len({asked.session for asked in llm.asked}) == 1
            assert len(cluster.core.dispatch.sessions) == 0
            return made

    return asyncio.run(main()), tracer.events, sessions


def test_a_row_that_uses_tools() -> None:
    """Tools reach services under the row's session; their rewards, counts and results reach score and outcome."""
    made, events, sessions = run_row()
    assert made["error"] is None
    output = made["output"]
    assert output["extra_fields"]["tool_rewards"] == [0.5, 0.0]
    assert (output["metrics"]["tool_calls_ok"], output["metrics"]["tool_calls_failed"]) == (1, 1)
    assert output["num_turns"] == 6
    assert output["reward_score"] == 1.0
    info = output["extra_fields"]["reward_extra_info"]
    assert info["rewards"] == [0.5, 0.0]
    assert info["tools"][0] == "42"
    assert "division by zero" in info["tools"][1]
    assert sessions == [events[0]["session"]]


def test_its_trace() -> None:
    """Texts of all calls as for a single turn (F5), each tool call with its time, in order."""
    _, events, _ = run_row()
    kinds = ["start", "generate", "tool", "generate", "tool", "generate", "reward", "end"]
    assert [event["kind"] for event in events] == kinds
    generated = [event for event in events if event["kind"] == "generate"]
    assert [event["call"] for event in generated] == [0, 1, 2]
    assert all(event["response_text"].startswith(text) for event, text in zip(generated, ANSWERS, strict=True))
    for before, after in pairwise(generated):
        assert after["prompt_ids"][: before["prompt_tokens"]] == before["prompt_ids"]
        assert after["prompt_text"].startswith(before["prompt_text"] + before["response_text"])
    tools = [event for event in events if event["kind"] == "tool"]
    assert [(event["name"], event["ok"], event["reward"]) for event in tools] == [
        ("multiply", True, 0.5),
        ("divide", False, 0.0),
    ]
    assert json.loads(tools[0]["arguments"]) == {"a": 6, "b": 7}
    assert tools[0]["text"] == "42"
    assert tools[0]["seconds"] > 0
