"""GRPO in plain PyTorch: a tiny model, half trained, learns by reward to ask a calculator.

    python examples/grpo_tiny.py --seed 0

Two SGLang engines sample on the CPU; the trainer's weights are pushed to them at every step. It prints a line per step,
and writes `summary.json` and, with matplotlib, `reward.png` into the directory `--out`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from calculator import rows_of
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import zagent
from zagent.models import resolve
from zagent.tiny.arithmetic import Question, questions

Batches = Iterator[zagent.DataProto]

#: Seed of the questions that accuracy is measured with; training asks others.
UNSEEN_SEED = 1_000_003
#: Rows of one forward and backward.
ROWS_AT_ONCE = 16
#: Ratios beyond 1 ± CLIP are not pushed further.
CLIP = 0.2
LARGEST_GRADIENT = 1.0


def config_of(options: argparse.Namespace) -> zagent.Config:
    return zagent.Config.load(
        overrides=[
            f"model.path={options.model}",
            f"engine.kind={options.engine}",
            "engine.count=2",
            "worker.count=1",
            "rollout.agent=tool_agent",
            "rollout.imports=[calculator]",
            f"reward.function=calculator.{'score' if options.engine == 'sglang' else 'coin'}",
            "rollout.prompt_length=320",
            "rollout.response_length=320",
            f"rollout.seed={options.seed}",
            *options.overrides,
        ]
    )


# ---- the algorithm --------------------------------------------------------------------------------------------------


def group_advantages(scores: torch.Tensor, samples: int) -> torch.Tensor:
    """[B] -> [B]: how much better than its group's mean (``samples`` rows side by side), in standard deviations."""
    groups = scores.view(-1, samples)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-6)).flatten()


def log_probs(model: torch.nn.Module, batch: zagent.DataProto) -> torch.Tensor:
    """[B, R]: of each token of the responses, which the logits one position before it are about."""
    inputs = {key: batch.batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
    responses = batch.batch["responses"]
    logits = model(**inputs, use_cache=False).logits[:, -responses.shape[1] - 1 : -1]
    return logits.log_softmax(dim=-1).gather(2, responses[..., None])[..., 0]


def clipped_loss(differences: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """PPO's objective, to be minimised, summed over the tokens that the model sampled. ``differences`` [B, R] of the
    log-probabilities now and then, ``advantages`` [B], ``mask`` [B, R]."""
    ratio = differences.exp()
    gain = torch.minimum(advantages[:, None] * ratio, advantages[:, None] * ratio.clamp(1 - CLIP, 1 + CLIP))
    return -(gain * mask).sum()


def parts_of(batch: zagent.DataProto) -> Batches:
    """Rows of about one length together, without the columns that are padding in all of them."""
    prompt_length = batch.batch["prompts"].shape[1]
    by_length = batch.batch["attention_mask"].sum(dim=1).argsort().numpy()
    for start in range(0, len(batch), ROWS_AT_ONCE):
        part = batch[by_length[start : start + ROWS_AT_ONCE]]
        real = part.batch["attention_mask"].any(dim=0).nonzero()
        first, end = int(real.min()), int(real.max()) + 1
        for key, column in part.batch.items():
            if key in ("input_ids", "attention_mask", "position_ids"):
                part.batch[key] = column[:, first:end]
            elif key in ("responses", "response_mask", "rollout_log_probs"):
                part.batch[key] = column[:, : end - prompt_length]
        yield part


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: zagent.DataProto, samples: int
) -> zagent.LogprobStatistics:
    """One step of ``optimizer``; how far the model was from the one that sampled, on the tokens that it learnt from."""
    batch.batch["advantages"] = group_advantages(batch.batch["rm_scores"].sum(dim=1), samples)
    tokens = batch.batch["response_mask"].sum()
    informative = batch[(batch.batch["advantages"] != 0).numpy()]  # groups that are all right or all wrong are not
    seen = [torch.empty(0)]
    for part in parts_of(informative):
        mask = part.batch["response_mask"]
        differences = log_probs(model, part) - part.batch["rollout_log_probs"]
        (clipped_loss(differences, part.batch["advantages"], mask) / tokens).backward()
        seen.append(differences.detach()[mask == 1])
    torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
    optimizer.step()
    optimizer.zero_grad()
    return zagent.LogprobStatistics.of(torch.cat(seen), tolerance=CLIP)


# ---- where batches come from: prompts in, n samples of each out -----------------------------------------------------


def sync(manager: zagent.AgentLoopManager, prompts: Batches, model: Any, n: int) -> Batches:
    """Generation and training take turns: what is trained on was sampled by the same weights."""
    for batch in prompts:
        manager.update_weights(model)
        yield manager.generate_sequences(batch.repeat(n))


def one_step_off(manager: zagent.AgentLoopManager, prompts: Batches, model: Any, n: int) -> Batches:
    """While one batch is trained on, the next one is generated by the weights of the step before."""
    repeated = (batch.repeat(n) for batch in prompts)
    with zagent.OneStepOffAgentLoopManager(manager, repeated, weights=lambda: model) as batches:
        yield from batches


def fully_async(manager: zagent.AgentLoopManager, prompts: Batches, model: Any, n: int) -> Batches:
    """Groups are generated without a pause, by weights that are at most one step old when they end."""
    first = next(prompts)
    batches = zagent.FullyAsyncAgentLoopManager(
        manager, chain([first], prompts), ppo_mini_batch_size=len(first), n=n, staleness_threshold=1.0
    )
    with batches:
        for batch in batches:
            yield batch
            if batches.update_due:
                batches.update_weights(model)


MODES = {mode.__name__: mode for mode in (sync, one_step_off, fully_async)}


def new_prompts(options: argparse.Namespace, unseen: Sequence[Question]) -> Batches:
    """For each step `options.prompts` questions, none of them among ``unseen``."""
    known = {question.text for question in unseen}
    asked = (one for one in questions(options.seed, 2 * options.steps * options.prompts) if one.text not in known)
    for step in range(options.steps):
        yield rows_of([next(asked) for _ in range(options.prompts)], global_steps=step)


def accuracy(manager: zagent.AgentLoopManager, asked: Sequence[Question]) -> float:
    """Share of right answers, sampled greedily."""
    scores = manager.generate_sequences(rows_of(asked, validate=True)).batch["rm_scores"].sum(dim=1)
    print(f"greedy accuracy on {len(asked)} unseen questions: {scores.mean():.1%}", flush=True)
    return float(scores.mean())


# ---- the run --------------------------------------------------------------------------------------------------------


def train(manager: zagent.AgentLoopManager, options: argparse.Namespace) -> dict[str, Any]:
    """The whole run: accuracy `before` and `after`, and what happened at each of the `steps`."""
    model = AutoModelForCausalLM.from_pretrained(resolve(options.model), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.0)
    unseen = questions(UNSEEN_SEED, options.unseen)
    # Trained on what older weights have sampled, the model is of the engines' mind only before its first step.
    checked = range(0, options.steps, options.check_every) if options.mode == "sync" else [0]
    before, steps = accuracy(manager, unseen), []
    asked_at = time.perf_counter()
    for batch in MODES[options.mode](manager, new_prompts(options, unseen), model, options.samples):
        began = time.perf_counter()
        if options.engine == "sglang" and len(steps) in checked:
            version = manager.version if options.mode == "sync" else None
            zagent.check_logprobs(batch, model, version=version).raise_for_problems()
        reward = float(batch.batch["rm_scores"].sum(dim=1).mean())
        ratios = train_step(model, optimizer, batch, options.samples)
        ended = time.perf_counter()
        times = {"waited_s": began - asked_at, "trained_s": ended - began}
        steps.append({"reward": reward, **asdict(ratios), **times})
        print(line(len(steps), steps[-1]), flush=True)
        asked_at = ended
    manager.update_weights(model)
    return {"before": before, "after": accuracy(manager, unseen), "steps": steps}


def line(step: int, facts: dict[str, float]) -> str:
    return (
        "step {step:3}: reward {reward:.3f}, ratio {ratio_mean:.5f} ± {ratio_std:.5f} ({ratio_min:.3f} to "
        "{ratio_max:.3f}), clipped {outside:.1%}, waited {waited_s:.1f} s, trained {trained_s:.1f} s"
    ).format(step=step, **facts)


def plot(found: dict[str, Any], file: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (extra `bench`)")
        return
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([step["reward"] for step in found["steps"]], label="mean sampled reward")
    axes.plot(
        [0, len(found["steps"])], [found["before"], found["after"]], "o", label="greedy accuracy, unseen questions"
    )
    axes.set(xlabel="step", ylabel="share of right answers", title="GRPO: a tiny model and its calculator")
    axes.legend(loc="lower right")
    figure.savefig(file)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mode", choices=MODES, default="sync")
    parser.add_argument(
        "--engine", choices=("sglang", "sim"), default="sglang", help="sim: rewards by chance, for timing"
    )
    parser.add_argument("--model", default="tiny-early")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=8, help="per step")
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unseen", type=int, default=1000, help="questions of an evaluation")
    parser.add_argument(
        "--check-every", type=int, default=10, help="steps from one check of log-probabilities to the next"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/grpo_tiny"))
    parser.add_argument("overrides", nargs="*", help="key=value of zagent's configuration")
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    with zagent.AgentLoopManager.launch(config_of(options)) as manager:
        found = train(manager, options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "summary.json").write_text(json.dumps(found, indent=1))
    plot(found, options.out / "reward.png")


if __name__ == "__main__":
    main()
