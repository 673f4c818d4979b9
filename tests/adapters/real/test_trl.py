"""TRL's own `GRPOTrainer` on real SGLang engines, in one environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import zagent
from support.transformers_reference import Reference
from zagent.adapters.trl import RolloutFunc, rollout_reward
from zagent.demo.questions import batch_of
from zagent.models import PACKAGED
from zagent.tiny.arithmetic import questions

# TRL's and torch's own warnings are theirs to heed.
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(580), pytest.mark.filterwarnings("default")]

#: Half-trained: not so sure of its tokens that weights make no difference.
MODEL = str(PACKAGED["tiny-early"])
STEPS = 3
#: Prompts a step, and samples of each.
PROMPTS, SAMPLES = 2, 4
TEMPERATURE = 0.9
RESPONSE = 160
#: Of a float32 engine's log-probabilities, beside a forward of the trainer's weights.
EXACT = 1e-3


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zagent.AgentLoopManager]:
    config = zagent.Config.load(
        overrides=[
            *(f"model.path={MODEL}", "engine.count=1", "worker.count=1"),
            f"logs.dir={tmp_path_factory.mktemp('logs')}",
            *("rollout.agent=tool_agent", "rollout.imports=[zagent.demo.calculator]"),
            *("rollout.prompt_length=384", f"rollout.response_length={RESPONSE}", f"rollout.temperature={TEMPERATURE}"),
            "reward.function=support.rewards.by_number",
        ]
    )
    with zagent.AgentLoopManager.launch(config) as manager:
        yield manager


class Watched(RolloutFunc):
    """Keeps what it gave, and the weights that the trainer had then."""

    def __init__(self, manager: zagent.AgentLoopManager, place: Path, answers: dict[str, str]) -> None:
        truths = lambda prompts: {"reward_model": [{"ground_truth": answers[p[0]["content"]]} for p in prompts]}  # noqa: E731
        super().__init__(manager, truths)
        self.place, self.given, self.versions = place, [], []  # type: ignore[var-annotated]

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(self.weights(len(self.given)))
        self.given.append(super().__call__(prompts, trainer))
        self.versions.append(self._manager.version)
        return self.given[-1]

    def weights(self, call: int) -> Path:
        return self.place / f"weights-{call}"

    def worst(self, call: int, weights: int) -> float:
        """Largest difference of the log-probabilities of that ``call`` to a forward under the weights of another."""
        reference, given = Reference(str(self.weights(weights))), self.given[call]
        worst = 0.0
        for prompt, completion, log_probs, mask in zip(
            *(given[key] for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask")), strict=True
        ):
            sampled = np.array(mask) == 1
            expected = reference.log_probs(prompt, completion, TEMPERATURE)
            worst = max(worst, float(np.abs(np.array(log_probs) - expected)[sampled].max()))
            assert not np.array(log_probs)[~sampled].any()
        return worst


@pytest.fixture(scope="module")
def trained(
    manager: zagent.AgentLoopManager, tmp_path_factory: pytest.TempPathFactory
) -> tuple[GRPOTrainer, Watched, list[dict[str, Any]]]:
    """Three steps of GRPO; the trainer, what it was given, and what its loss saw of each generation."""
    place = tmp_path_factory.mktemp("trl")
    asked = questions(11, STEPS * PROMPTS)
    columns = batch_of(asked, "q").non_tensor_batch
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in columns["raw_prompt"]])
    watched = Watched(manager, place, {question.text: str(question.answer) for question in asked})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(MODEL),
            reward_funcs=rollout_reward,
            train_dataset=dataset,
            rollout_func=watched,
            args=GRPOConfig(
                output_dir=str(place / "out"),
                max_steps=STEPS,
                per_device_train_batch_size=PROMPTS * SAMPLES,
                num_generations=SAMPLES,
                max_completion_length=RESPONSE,
                temperature=TEMPERATURE,
                learning_rate=1e-3,
                weight_decay=200.0,  # 20 % a step: the weights change, also where all samples of a group are alike
                lr_scheduler_type="constant",
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
            ),
        )
        learned: list[dict[str, Any]] = []
        score = trainer._generate_and_score_completions

        def noted(inputs: Any) -> Any:
            learned.append(score(inputs))
            return learned[-1]

        patch.setattr(trainer, "_generate_and_score_completions", noted)
        trainer.train()
    return trainer, watched, learned


def test_the_trainer_takes_its_steps(trained: tuple[GRPOTrainer, Watched, list[dict[str, Any]]]) -> None:
    """One generation each, a completion per repeated prompt, with the rollouts' rewards."""
    trainer, watched, _ = trained
    assert trainer.state.global_step == STEPS
    assert [len(given["completion_ids"]) for given in watched.given] == [PROMPTS * SAMPLES] * STEPS
    rewards = [log["rewards/rollout_reward/mean"] for log in trainer.state.log_history if "reward" in log]
    assert len(rewards) == STEPS
    given = [float(np.mean(given["reward_score"])) for given in watched.given]
    assert rewards == pytest.approx(given)
    assert all(set(given["status"]) == {"ok"} for given in watched.given)


def test_completions_are_sampled_from_the_trainers_weights(
    trained: tuple[GRPOTrainer, Watched, list[dict[str, Any]]],
) -> None:
    """At every step: under the weights of the step before, the log-probabilities are off by far more."""
    _, watched, _ = trained
    exact = [watched.worst(step, step) for step in range(STEPS)]
    stale = [watched.worst(step, step - 1) for step in range(1, STEPS)]
    print(f"log-probabilities, largest difference: {exact}; under the step before: {stale}")
    assert max(exact) < EXACT
    assert min(stale) > 10 * EXACT
    assert np.diff(watched.versions).tolist() == [1] * (STEPS - 1)


def test_tool_tokens_are_no_part_of_the_loss(trained: tuple[GRPOTrainer, Watched, list[dict[str, Any]]]) -> None:
    """TRL's mask is ours, padded; so are the log-probabilities that it was given."""
    _, watched, learned = trained
    assert any(0 in mask for mask in watched.given[0]["env_mask"])  # later it may have forgotten how
    for given, batch in zip(watched.given, learned, strict=True):
        for row, (mask, log_probs) in enumerate(zip(given["env_mask"], given["logprobs"], strict=True)):
            assert batch["tool_mask"][row][: len(mask)].tolist() == mask
            assert batch["completion_mask"][row].sum() == len(mask)
            found = batch["sampling_per_token_logps"][row][: len(mask)]
            assert np.allclose(found.tolist(), log_probs, atol=1e-6)
