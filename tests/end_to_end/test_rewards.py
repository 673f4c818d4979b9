"""Reward functions and traces in real workers: each row is scored or fails by itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import zagent
from support import rewards
from support.clusters import questions, sim_config
from zagent.errors import ConfigError, RewardError

TRUTHS = ["1", "raise", "0.25", "hang", "nan", "dict", "none", "exit", "2"]
#: What the error of a row says, by its truth.
ERRORS = {
    "raise": "ZeroDivisionError: division by zero",
    "hang": "DeadlineExceeded: the call took longer than 0.5 s",
    "nan": "gave no score: a score must be a finite float32, got nan",
    "none": "gave no score: a score must be a number, got None",
    "exit": "SystemExit: 3",
}
SCORES = [1.0, None, 0.25, None, None, 0.5, None, None, 2.0]


def rows(truths: Sequence[str]) -> zagent.DataProto:
    """A row for each trick of `support.rewards.by_truth`."""
    columns: dict[str, Any] = {"data_source": ["tricks"] * len(truths)}
    columns["reward_model"] = [{"ground_truth": truth} for truth in truths]
    return questions(len(truths), **columns)


def config(tmp_path: Path, *more: str, function: str = "by_truth") -> zagent.Config:
    path = f"{rewards.__name__}.{function}"
    return sim_config(tmp_path, f"reward.function={path}", "reward.timeout_s=0.5", "worker.count=2", *more)


@pytest.mark.parametrize("function", ["by_truth", "by_truth_async"])
def test_each_row_ends_by_itself(function: str, tmp_path: Path) -> None:
    """Good ones are scored whatever becomes of their siblings; a bad one's error names the function and the reason."""
    with zagent.AgentLoopManager.launch(config(tmp_path, function=function)) as manager:
        outcomes = sorted(manager.stream(rows(TRUTHS)), key=lambda outcome: outcome.index)
        again = list(manager.stream(rows(["1"] * 20)))  # the workers are as they were
    assert [outcome.output and outcome.output.reward_score for outcome in outcomes] == SCORES
    for truth, outcome in zip(TRUTHS, outcomes, strict=True):
        assert outcome.attempt == 1
        assert (outcome.status == "failed") == (truth in ERRORS)
        if truth in ERRORS:
            assert isinstance(outcome.error, RewardError)
            assert ERRORS[truth] in str(outcome.error)
            assert f"support.rewards.{function}" in str(outcome.error)
            assert "; the answer was '" in str(outcome.error)
    extra = outcomes[5].output.extra_fields["reward_extra_info"]
    assert extra == {"turns": 2, "source": "tricks"}
    assert outcomes[0].output.metrics.compute_score > 0
    assert {outcome.output.reward_score for outcome in again} == {1.0}


def test_rows_without_a_score_in_a_batch(tmp_path: Path) -> None:
    """`on_error=none`: all rows are ok, scores stand at the last token, reasons in a column."""
    with zagent.AgentLoopManager.launch(config(tmp_path, "reward.on_error=none")) as manager:
        out = manager.generate_sequences(rows(TRUTHS))
    assert out.meta_info["failed"] == 0
    assert out.non_tensor_batch["reward_score"].tolist() == SCORES
    assert out.batch["rm_scores"][:, -1].tolist() == [score or 0.0 for score in SCORES]
    assert out.batch["rm_scores"].sum() == sum(score or 0.0 for score in SCORES)
    for truth, said in zip(TRUTHS, out.non_tensor_batch["reward_error"], strict=True):
        assert ERRORS[truth] in said if truth in ERRORS else said is None
    assert out.meta_info["reward_extra_keys"] == ["reward_error", "source", "turns"]
    assert out.meta_info["timing"]["agent_loop/compute_score/max"] >= 0.5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.function=support.rewards.no_such", "reward.function='support.rewards.no_such' cannot be imported"),
        ("reward.function=support.rewards.needs_more", "missing a required argument: 'answer'"),
        ("trace.target=support.rewards.NUMBER", "trace.target='support.rewards.NUMBER' is a int"),
    ],
)
def test_a_wrong_path_ends_the_start(override: str, message: str, tmp_path: Path) -> None:
    """`ConfigError` with key, value and reason; nothing is left running."""
    with (
        pytest.raises(ConfigError, match=message),
        zagent.AgentLoopManager.launch(sim_config(tmp_path, override)) as manager,
    ):
        manager.wait_until_started()


def test_a_traced_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file per worker, each event whole; every row from start to end, with the text of prompt and response."""
    monkeypatch.chdir(tmp_path)
    traced = config(
        tmp_path,
        "trace.target=zagent.worker.trace.JsonlTracer",
        "trace.args.path=traces/{worker}.jsonl",
    )
    with zagent.AgentLoopManager.launch(traced) as manager:
        batch = rows(["1", "raise", "0.25", "2"] * 5)
        batch.meta_info["global_steps"] = 7
        outcomes = {outcome.index: outcome for outcome in manager.stream(batch)}
    paths = sorted((tmp_path / "traces").iterdir())
    assert [path.name for path in paths] == ["worker-0.jsonl", "worker-1.jsonl"]
    events = [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]
    by_session: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_session.setdefault(event["session"], []).append(event)
    assert len(by_session) == 20
    for story in by_session.values():
        start, generate, reward, end = story
        assert [event["kind"] for event in story] == ["start", "generate", "reward", "end"]
        assert start["trajectory"]["step"] == 7
        outcome = outcomes[start["trajectory"]["sample_index"]]
        assert end["status"] == outcome.status
        assert (reward["error"] is None) == (outcome.error is None)
        assert f"Question {outcome.index}?" in generate["prompt_text"]
        assert generate["prompt_text"].endswith("<|im_start|>assistant\n")
        if outcome.output is not None:
            assert generate["response_ids"] == list(outcome.output.response_ids)
            assert reward["score"] == end["reward_score"] == outcome.output.reward_score
