"""The pure parts of the GRPO example: advantages, log-probabilities, loss, a step, and what is asked."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from support.fake_rollouts import FakeRollouts
from support.outcomes import ok
from support.sampled_batch import after_a_step, sampled_batch, tiny_model
from zagent.data_proto import DataProto
from zagent.tiny.arithmetic import questions


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture
def batch(model: Any) -> DataProto:
    """Twelve rows, three groups of four: one of all right rows, two mixed."""
    made = sampled_batch([model])
    scores = torch.zeros_like(made.batch["rollout_log_probs"])
    scores[:, 0] = torch.tensor([1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1])
    made.batch["rm_scores"] = scores
    return made


# ---- the algorithm --------------------------------------------------------------------------------------------------


def test_advantages_are_standard_deviations_from_the_groups_mean(grpo_tiny: ModuleType) -> None:
    """By hand; the mean of a group's is zero, whatever the others have."""
    scores = torch.tensor([1.0, 0.0, 1.0, 0.0, 5.0, 5.0, 5.0, 9.0])
    found = grpo_tiny.group_advantages(scores, 4)
    assert found[:4].tolist() == pytest.approx([0.866, -0.866, 0.866, -0.866], abs=1e-3)
    assert found[4:].tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-3)


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_a_group_of_one_opinion_has_no_advantage(grpo_tiny: ModuleType, score: float) -> None:
    """Exactly none: such rows are left out."""
    assert grpo_tiny.group_advantages(torch.full((8,), score), 8).tolist() == [0.0] * 8


def test_log_probabilities_are_those_of_the_engines(grpo_tiny: ModuleType, model: Any, batch: DataProto) -> None:
    """Of the token itself, not of its neighbour: this is where trainers are off by one."""
    sampled = batch.batch["response_mask"] == 1
    found = grpo_tiny.log_probs(model, batch).detach()
    torch.testing.assert_close(found[sampled], batch.batch["rollout_log_probs"][sampled], atol=1e-5, rtol=1e-5)


def test_parts_are_the_rows_without_their_common_padding(
    grpo_tiny: ModuleType, model: Any, batch: DataProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row once, narrower, with the same log-probabilities where it has any."""
    monkeypatch.setattr(grpo_tiny, "ROWS_AT_ONCE", 5)
    parts = list(grpo_tiny.parts_of(batch))
    assert [len(part) for part in parts] == [5, 5, 2]
    prompts = [prompt for part in parts for prompt in part.batch["prompts"].tolist()]
    assert sorted(prompts) == sorted(batch.batch["prompts"].tolist())
    assert parts[0].batch["input_ids"].shape[1] < batch.batch["input_ids"].shape[1]
    for part in parts:
        sampled = part.batch["response_mask"] == 1
        found = grpo_tiny.log_probs(model, part).detach()
        torch.testing.assert_close(found[sampled], part.batch["rollout_log_probs"][sampled], atol=1e-5, rtol=1e-5)


def test_the_loss_is_the_clipped_objective(grpo_tiny: ModuleType) -> None:
    """A ratio beyond the clip pays no more where that was wanted, and all of it where it was not."""
    ratios = torch.tensor([[1.0, 1.5, 0.5], [1.0, 1.5, 0.5]])
    found = [
        float(grpo_tiny.clipped_loss(ratios.log(), torch.tensor([1.0, -1.0]), mask))
        for mask in (torch.tensor([[1, 1, 1], [0, 0, 0]]), torch.tensor([[0, 0, 0], [1, 1, 1]]))
    ]
    assert found == pytest.approx([-(1.0 + 1.2 + 0.5), 1.0 + 1.5 + 0.8])


def test_nothing_is_learnt_where_the_mask_is_zero_or_the_ratio_clipped(grpo_tiny: ModuleType) -> None:
    """The gradient of such tokens is zero, and that of others is minus the advantage at a ratio of one."""
    differences = torch.tensor([[0.0, 0.0, 1.0, -1.0]], requires_grad=True)
    grpo_tiny.clipped_loss(differences, torch.tensor([2.0]), torch.tensor([[1, 0, 1, 1]])).backward()
    assert differences.grad is not None
    assert differences.grad[0].tolist() == pytest.approx([-2.0, 0.0, 0.0, -2.0 * 0.3679], abs=1e-3)


def test_a_step_is_that_of_the_whole_batch_at_once(grpo_tiny: ModuleType, model: Any, batch: DataProto) -> None:
    """Parts and left out groups change nothing but the time it takes."""
    at_once, in_parts = copy.deepcopy(model), copy.deepcopy(model)
    advantages = grpo_tiny.group_advantages(batch.batch["rm_scores"].sum(dim=1), 4)
    differences = grpo_tiny.log_probs(at_once, batch) - batch.batch["rollout_log_probs"]
    mask = batch.batch["response_mask"]
    (grpo_tiny.clipped_loss(differences, advantages, mask) / mask.sum()).backward()
    torch.nn.utils.clip_grad_norm_(at_once.parameters(), grpo_tiny.LARGEST_GRADIENT)
    torch.optim.SGD(at_once.parameters(), lr=0.1).step()

    optimizer = torch.optim.SGD(in_parts.parameters(), lr=0.1)
    statistics = grpo_tiny.train_step(in_parts, optimizer, batch, samples=4)
    for one, other in zip(at_once.parameters(), in_parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    assert statistics.tokens == int(mask[4:].sum())
    assert statistics.ratio_mean == pytest.approx(1.0, abs=1e-4)


def test_a_step_makes_what_was_rewarded_likelier(grpo_tiny: ModuleType, model: Any, batch: DataProto) -> None:
    """And the other rows of its group less likely."""
    learner = copy.deepcopy(model)
    before = grpo_tiny.log_probs(learner, batch).detach()
    grpo_tiny.train_step(learner, torch.optim.SGD(learner.parameters(), lr=0.05), batch, samples=4)
    gained = ((grpo_tiny.log_probs(learner, batch).detach() - before) * batch.batch["response_mask"]).sum(dim=1)
    right = batch.batch["rm_scores"].sum(dim=1) == 1
    assert gained[4:][right[4:]].mean() > 0 > gained[4:][~right[4:]].mean()


def test_a_batch_of_one_opinion_changes_nothing(grpo_tiny: ModuleType, model: Any, batch: DataProto) -> None:
    """All right: no gradient, no ratio, and no error."""
    learner = copy.deepcopy(model)
    batch.batch["rm_scores"][:, 0] = 1.0
    statistics = grpo_tiny.train_step(learner, torch.optim.SGD(learner.parameters(), lr=1.0), batch, samples=4)
    assert statistics.tokens == 0
    for one, other in zip(model.parameters(), learner.parameters(), strict=True):
        assert torch.equal(one, other)


def test_stale_batches_have_ratios_away_from_one(grpo_tiny: ModuleType, model: Any, batch: DataProto) -> None:
    """What the other modes train on; the statistics show it."""
    learner = after_a_step(model)
    statistics = grpo_tiny.train_step(learner, torch.optim.SGD(learner.parameters(), lr=0.0), batch, samples=4)
    assert statistics.ratio_std > 0.01


# ---- what is asked, and how batches come ----------------------------------------------------------------------------


def options(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"steps": 3, "prompts": 4, "seed": 5, "overrides": []} | changes)


def test_prompts_are_new_ones(grpo_tiny: ModuleType) -> None:
    """None is among the unseen, each step has its own, and the seed decides."""
    unseen = questions(5, 6)  # which training with that seed would begin with
    steps = list(grpo_tiny.new_prompts(options(), unseen))
    asked = [row[0]["content"] for batch in steps for row in batch.non_tensor_batch["raw_prompt"]]
    assert [len(batch) for batch in steps] == [4, 4, 4]
    assert [batch.meta_info for batch in steps] == [{"global_steps": step} for step in range(3)]
    assert not {one.text for one in unseen} & set(asked)
    assert asked == [one.text for one in questions(5, 18)[6:]]


class Recorder:
    """A manager that only writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def update_weights(self, model: Any) -> None:
        self.told.append(("weights", model))

    def generate_sequences(self, batch: DataProto) -> DataProto:
        self.told.append(("generate", list(batch.non_tensor_batch["uid"])))
        scores = torch.zeros(len(batch), 2)
        scores[::2, 1] = 1.0
        return DataProto({"rm_scores": scores}, batch.non_tensor_batch, batch.meta_info)


def test_in_sync_each_batch_is_sampled_by_the_weights_of_the_moment(grpo_tiny: ModuleType) -> None:
    """Weights first, then the rows, the samples of a prompt side by side."""
    manager, prompts = Recorder(), (DataProto(non_tensor_batch={"uid": [name, name + "'"]}) for name in "ab")
    batches: Iterator[DataProto] = grpo_tiny.sync(manager, prompts, "model", 2)
    assert list(next(batches).non_tensor_batch["uid"]) == ["a", "a", "a'", "a'"]
    assert manager.told == [("weights", "model"), ("generate", ["a", "a", "a'", "a'"])]
    assert [len(batch) for batch in batches] == [4]
    assert manager.told[2:] == [("weights", "model"), ("generate", ["b", "b", "b'", "b'"])]


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
def test_the_other_modes_give_batches_of_the_same_form(grpo_tiny: ModuleType, mode: str) -> None:
    """As many, the samples of a prompt side by side, each prompt once; and the engines get the model in between."""
    manager = FakeRollouts(seconds=lambda row: 0.0, partial_rollout=True)
    found = list(grpo_tiny.MODES[mode](manager, grpo_tiny.new_prompts(options(), []), "model", 2))
    assert [len(batch) for batch in found] == [8, 8, 8]
    uids = [uid for batch in found for uid in batch.non_tensor_batch["uid"]]
    assert uids[::2] == uids[1::2]
    assert sorted(uids[::2]) == sorted(one.text for one in questions(5, 12))
    pushed = [entry[1] for entry in manager.log if entry[0] == "update"]
    assert set(pushed) == {"model"}
    assert len(pushed) >= 2


def test_accuracy_is_measured_greedily(grpo_tiny: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """One validation row per question."""
    manager = Recorder()
    assert grpo_tiny.accuracy(manager, questions(0, 4)) == 0.5
    assert manager.told[0][1] == [one.text for one in questions(0, 4)]
    assert "4 unseen questions: 50.0%" in capsys.readouterr().out
    assert grpo_tiny.rows_of(questions(0, 4), validate=True).meta_info == {"validate": True}


def test_the_reward_is_for_the_right_number_said_last(grpo_tiny: ModuleType) -> None:
    """Not for a result that the calculator said and the model did not."""
    score = sys.modules["calculator"].score  # type: ignore[attr-defined]
    said = {"role": "assistant", "content": "The answer is 57."}
    assert score([said], "57") == 1.0
    assert score([said], "7") == 0.0
    assert score([{"role": "tool", "content": "57"}], "57") == 0.0
    assert score([{"role": "assistant", "content": "Well."}], "57") == 0.0


def test_simulated_engines_are_rewarded_by_chance(grpo_tiny: ModuleType) -> None:
    """By their first token; and the configuration says so."""
    coin = sys.modules["calculator"].coin  # type: ignore[attr-defined]
    assert [coin(ok(response=(first, 9)).output) for first in (4, 5)] == [0.0, 1.0]
    chosen = {
        engine: grpo_tiny.config_of(options(model="tiny-early", engine=engine)).reward.function
        for engine in ("sglang", "sim")
    }
    assert chosen == {"sglang": "calculator.score", "sim": "calculator.coin"}


# ---- what is left behind --------------------------------------------------------------------------------------------

FOUND = {"before": 0.6, "after": 0.8, "steps": [{"reward": 0.5}, {"reward": 0.7}]}


def test_the_plot_is_a_picture(grpo_tiny: ModuleType, tmp_path: Path) -> None:
    """A PNG."""
    grpo_tiny.plot(FOUND, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_a_word(
    grpo_tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no picture, and no error."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    grpo_tiny.plot(FOUND, tmp_path / "reward.png")
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
