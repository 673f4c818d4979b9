"""A trainer on two real engines: ten steps of the GRPO example, and each sabotage of it is found."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import zagent
from zagent.demo.questions import batch_of
from zagent.models import resolve
from zagent.tiny.arithmetic import questions
from zagent.trainer.logprobs import response_logprobs

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_tiny.py"
STEPS, ROWS = 10, 32


def test_ten_steps_of_the_example(tmp_path: Path) -> None:
    """It ends well; before each step the engines are of the trainer's mind, which its own check confirms, and the
    ratios of the first are one to a thousandth; every step moves the weights, and there is a picture."""
    options = ["--steps", str(STEPS), "--prompts", "4", "--samples", "4", "--unseen", "16", "--check-every", "1"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *options, "--out", str(tmp_path / "out"), f"logs.dir={tmp_path / 'logs'}"],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    steps = found["steps"]
    assert len(steps) == STEPS
    assert all(0 <= step["reward"] <= 1 for step in steps)
    assert all(abs(step["ratio_mean"] - 1) < 1e-3 for step in steps)
    assert max(step["max_difference"] for step in steps) < 1e-2
    assert sum(step["tokens"] for step in steps) > 0
    assert (tmp_path / "out" / "reward.png").read_bytes().startswith(b"\x89PNG")


# ---- sabotage -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zagent.AgentLoopManager]:
    """Two engines and the half trained model."""
    config = zagent.Config.load(
        overrides=[
            *("model.path=tiny-early", "engine.count=2", "worker.count=1", "rollout.agent=tool_agent"),
            *("rollout.imports=[zagent.demo.calculator]", "rollout.prompt_length=320", "rollout.response_length=320"),
            f"logs.dir={tmp_path_factory.mktemp('logs')}",
        ]
    )
    with zagent.AgentLoopManager.launch(config) as manager:
        yield manager


@pytest.fixture(scope="module")
def untrained() -> Any:
    return AutoModelForCausalLM.from_pretrained(resolve("tiny-early"), dtype=torch.float32)


@pytest.fixture(scope="module")
def trained(untrained: Any) -> Any:
    """One step further: AdamW's first moves each weight by the learning rate, up or down."""
    model = copy.deepcopy(untrained)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    ids = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    return model


def generated(manager: zagent.AgentLoopManager, step: int) -> zagent.DataProto:
    batch = batch_of(questions(step, ROWS), f"step-{step}")
    batch.meta_info["global_steps"] = step
    return manager.generate_sequences(batch)


def test_without_sabotage_there_is_nothing_to_find(
    manager: zagent.AgentLoopManager, untrained: Any, trained: Any
) -> None:
    """After each of two updates every row agrees, with ratios of one; with the model before it, none does."""
    for step, (model, other) in enumerate([(trained, untrained), (untrained, trained)]):
        manager.update_weights(model)
        batch = generated(manager, step)
        check = zagent.check_logprobs(batch, model, version=manager.version)
        print(check)
        assert check.ok, check
        assert check.rows == ROWS
        assert abs(check.total.ratio_mean - 1) < 1e-3
        assert zagent.check_logprobs(batch, other, version=manager.version).rows_off == ROWS


def test_a_mask_shifted_by_one_is_found(manager: zagent.AgentLoopManager, untrained: Any) -> None:
    """In the batch, and in the trainer's own log-probabilities."""
    manager.update_weights(untrained)
    batch = generated(manager, 2)
    own = response_logprobs(untrained, batch)
    assert zagent.check_logprobs(batch, own).ok
    assert "shifted" in str(zagent.check_logprobs(batch, own.roll(1, dims=1)))
    batch.batch["response_mask"] = batch.batch["response_mask"].roll(1, dims=1)
    with pytest.raises(zagent.LogprobMismatch, match="the mask does not fit the tokens"):
        zagent.check_logprobs(batch, untrained).raise_for_problems()


def test_a_version_that_was_not_pushed_is_found(manager: zagent.AgentLoopManager, trained: Any, untrained: Any) -> None:
    """By its number where the push was forgotten; by its numbers where the engines got old weights under a new one."""
    manager.update_weights(untrained)
    forgotten = zagent.check_logprobs(generated(manager, 3), trained, version=manager.version + 1)
    assert "weights that were not pushed" in forgotten.problems[0]
    manager.update_weights(untrained)
    old = zagent.check_logprobs(generated(manager, 4), trained, version=manager.version)
    assert old.rows_off == ROWS
    assert "other weights than the trainer's" in str(old)


def test_weights_pushed_to_one_engine_only_are_found(
    manager: zagent.AgentLoopManager, trained: Any, untrained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both engines claim the new version; the rows of one of them are off, the other's agree."""
    untrained.save_pretrained(tmp_path / "old")
    left_out, *_ = manager.status()["pools"]["engine"]
    push = manager._control._on

    async def push_to_others(pool: str, name: str, method: str, argument: Any = None, *more: Any) -> Any:
        if (method, name) == ("update_weights", left_out):
            argument = [str(tmp_path / "old"), *argument[1:]]
        return await push(pool, name, method, argument, *more)

    monkeypatch.setattr(manager._control, "_on", push_to_others)
    manager.update_weights(trained)
    check = zagent.check_logprobs(generated(manager, 5), trained, version=manager.version)
    print(check)
    assert 0 < check.rows_off < check.rows == ROWS
    assert "an engine that samples from other weights than its peers" in str(check)
