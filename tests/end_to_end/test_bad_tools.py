"""Tools that misbehave, in real workers: each row ends in its own outcome, named, and its siblings are untouched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import zagent
from support.clusters import sim_config

#: What the model is told of each tool.
TOLD = {
    "good": "fine",
    "raises": "RuntimeError: no luck",
    "exits": "SystemExit",
    "hangs": "Error: tool 'hangs' timed out after 0.5s",
    "hangs_in_a_thread": "Error: tool 'hangs_in_a_thread' timed out after 0.5s",
    "huge": "x" * 64 + "...(truncated)..." + "x" * 64,
    "no_text": "object",
    "no_object": "not a JSON object",
    "half": "not a JSON object",
    "misfit": "do not fit",
    "stranger": "unknown tool 'nobody'; available: stranger",
}


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zagent.AgentLoopManager]:
    place = tmp_path_factory.mktemp("tools")
    options = ["rollout.imports=[support.always_calls]", "rollout.agent=tool_agent", "rollout.multi_turn.format=always"]
    limits = ["rollout.multi_turn.max_user_turns=1", "rollout.multi_turn.tool_timeout=0.5"]
    lengths = ["rollout.multi_turn.max_tool_response_length=128", "rollout.response_length=1024"]
    tokens = ["engine.sim.eos_probability=0.2", "model.path=tiny", "rollout.prompt_length=512"]
    stop = ["engine.sim.eos_token_id=258"]
    with zagent.AgentLoopManager.launch(sim_config(place, *options, *limits, *lengths, *tokens, *stop)) as manager:
        yield manager


def rows(names: list[str]) -> zagent.DataProto:
    prompt = [{"role": "user", "content": "Go."}]
    return zagent.DataProto(
        non_tensor_batch={"raw_prompt": [prompt] * len(names), "uid": names, "tools": [[name] for name in names]}
    )


def test_each_is_told_to_the_model_and_the_loop_goes_on(manager: zagent.AgentLoopManager) -> None:
    """All at once; every row ends `ok` with two answers, and only the tool that works is counted as such."""
    names = list(TOLD)
    outcomes = {outcome.uid: outcome for outcome in manager.stream(rows(names))}
    for name in names:
        outcome = outcomes[name]
        assert outcome.status == "ok", (name, outcome.error)
        assert outcome.output is not None
        roles = [message["role"] for message in outcome.output.extra_fields["messages"]]
        assert roles == ["user", "assistant", "tool", "assistant"], name
        assert TOLD[name] in outcome.output.extra_fields["messages"][2]["content"], name
        metrics = outcome.output.metrics
        right = name in ("good", "huge")
        assert (metrics.tool_calls_ok, metrics.tool_calls_failed) == (int(right), int(not right)), name


def test_what_fails_a_row_fails_that_row(manager: zagent.AgentLoopManager) -> None:
    """An image to a model that sees none, a tool that nobody has, a choice that is no list: named; siblings are ok."""
    batch = rows(["good", "no_image", "good", "nowhere", "good"])
    batch.non_tensor_batch["uid"] = ["a", "image", "b", "nowhere", "c"]  # type: ignore[assignment]
    outcomes = {outcome.uid: outcome for outcome in manager.stream(batch)}
    assert {uid: outcome.status for uid, outcome in outcomes.items()} == {
        "a": "ok", "b": "ok", "c": "ok", "image": "failed", "nowhere": "failed",
    }  # fmt: skip
    assert isinstance(outcomes["image"].error, zagent.InvalidRequest)
    assert "no tool 'nowhere'; known:" in str(outcomes["nowhere"].error)


def test_nothing_is_left_running(manager: zagent.AgentLoopManager) -> None:
    """After all of that the counts are zero, and the worker is the one that was started."""
    pools = manager.status()["pools"]
    assert [worker["state"] for worker in pools["worker"].values()] == ["ready"]
    assert {member["in_flight"] for pool in pools.values() for member in pool.values()} == {0}
