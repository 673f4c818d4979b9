"""TRL: `GRPOTrainer(rollout_func=zagent.adapters.trl.RolloutFunc(manager), …)`, as of trl 1.16.

TRL samples prompts, scores completions and learns; zagent runs the agent loops, on the weights that the trainer has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zagent.data_proto import DataProto
from zagent.errors import ConfigError, InputError

if TYPE_CHECKING:
    from zagent.config import RolloutConfig
    from zagent.trainer.manager import AgentLoopManager

#: `GRPOConfig`'s names of what zagent's configuration says, too.
SAMPLING: Mapping[str, Callable[[RolloutConfig], Any]] = {
    "temperature": lambda rollout: rollout.temperature,
    "top_p": lambda rollout: rollout.top_p,
    "top_k": lambda rollout: rollout.top_k,
    "min_p": lambda rollout: None,
    "repetition_penalty": lambda rollout: rollout.repetition_penalty,
    "max_completion_length": lambda rollout: rollout.response_length,
}
#: Values of TRL that mean the same as ours.
_SAME = {("top_k", 0): -1, ("top_k", None): -1, ("min_p", 0): None}
#: Columns of a result that reward functions have by other names, or not at all.
_NOT_FORWARDED = ("raw_prompt", "uid", "prompt", "completion", "completion_ids")


class RolloutFunc:
    """TRL's ``rollout_func``: one trajectory for each prompt it is given.

    TRL repeats a prompt `num_generations` times before it asks. Weights are pushed (`manager.update_weights`) at the
    first call and whenever the trainer's `global_step` has moved since the last one; evaluation samples by
    `rollout.val_kwargs`. In a job of several processes each has a manager of its own, all but the first by `connect`;
    the first pushes.

    Args:
        manager: with the trainer's model as `model.path`, and the sampling that the trainer's `GRPOConfig` names.
        columns: makes the rows' columns beside `raw_prompt` (`agent_name`, `env_kwargs`, `reward_model`, …) from the
            prompts: TRL hands over nothing else of the dataset. (Its reward functions get that.)
    """

    def __init__(
        self, manager: AgentLoopManager, columns: Callable[[Sequence[Any]], Mapping[str, Sequence[Any]]] | None = None
    ) -> None:
        self._manager = manager
        self._columns = columns
        self._calls = 0
        self._pushed: int | None = None  #: the trainer's step

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """``prompt_ids``, ``completion_ids``, ``logprobs`` (of the engines; None without
        `rollout.calculate_log_probs`) and ``env_mask`` (1 on what the model sampled), each a list per prompt; and the
        result's other columns (``reward_score``, …), which TRL hands to the reward functions by name.

        A row that failed, where `rollout.max_failed_fraction` tolerates it, is one padding token with mask 0; its
        ``status`` says so.

        Raises:
            ConfigError: the trainer's configuration says something else than zagent's, or its model cannot be pushed.
            InputError: prompts that are no chat messages.
            RolloutError, WeightUpdateError: as the manager.
        """
        check_trainer(trainer, self._manager.config.rollout)
        self._push(trainer)
        columns = {} if self._columns is None else self._columns(prompts)
        batch = batch_of(prompts, trainer, self._calls, columns)
        self._calls += 1
        return fields_of(self._manager.generate_sequences(batch))

    def _push(self, trainer: Any) -> None:
        step = trainer.state.global_step
        if step == self._pushed:
            return
        model = whole_model(trainer)
        if trainer.accelerator.is_main_process:
            self._manager.update_weights(model)
        trainer.accelerator.wait_for_everyone()
        self._pushed = step


def rollout_reward(completions: Sequence[Any], reward_score: Sequence[float | None], **_: Any) -> list[float | None]:
    """A TRL reward function: the score that the loop or `reward.function` has given the row, as it is."""
    return list(reward_score)


def check_trainer(trainer: Any, rollout: RolloutConfig) -> None:
    """Raise `ConfigError` unless ``trainer`` learns from what zagent samples: TRL divides logits by its own
    temperature, and would run tools of its own after ours."""
    args = trainer.args
    differing = []
    for name, ours in SAMPLING.items():
        theirs = getattr(args, name)
        if _SAME.get((name, theirs), theirs) != ours(rollout):
            differing.append(f"{name}={theirs!r}, here {ours(rollout)!r}")
    if differing:
        raise ConfigError(
            f"the GRPOConfig and zagent's rollout section (max_completion_length is response_length there) differ: "
            f"{'; '.join(differing)}"
        )
    if args.generation_kwargs:
        raise ConfigError(f"generation_kwargs={args.generation_kwargs!r} would not reach zagent's engines")
    if trainer.tools:
        raise ConfigError("tools and environments belong to zagent's loops (rollout.imports), not to the GRPOTrainer")


def whole_model(trainer: Any) -> Any:
    """The trainer's model as `manager.update_weights` takes it. Raises `ConfigError` where its parts are elsewhere."""
    kind = str(getattr(trainer.accelerator.distributed_type, "value", trainer.accelerator.distributed_type))
    if kind in ("FSDP", "DEEPSPEED"):
        raise ConfigError(f"a model under {kind} has its weights in pieces: zagent.adapters.trl pushes whole ones")
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        raise ConfigError("a model with PEFT adapters saves only those: zagent.adapters.trl pushes whole models")
    return model


def batch_of(
    prompts: Sequence[Any], trainer: Any, call: int, columns: Mapping[str, Sequence[Any]] = MappingProxyType({})
) -> DataProto:
    """Rows for ``prompts`` with further ``columns``; the repetitions of a prompt, which TRL puts next to each other,
    share a `uid`. ``call`` counts those of this process: uids are unique in a run.

    Raises:
        InputError: a prompt that is no list of messages, a column of another length.
    """
    if not prompts or not all(isinstance(prompt, list) for prompt in prompts):
        raise InputError("zagent needs conversational prompts (lists of messages): it applies the chat template itself")
    rank = trainer.accelerator.process_index
    uids = [f"{rank}/{call}/{number}" for number, (_, group) in enumerate(groupby(prompts)) for _ in group]
    meta = {"global_steps": trainer.state.global_step, "validate": not trainer.model.training}
    return DataProto(non_tensor_batch={"uid": uids, **columns, "raw_prompt": list(prompts)}, meta_info=meta)


def fields_of(out: DataProto) -> dict[str, Any]:
    """What TRL wants of ``out`` (`AgentLoopManager.generate_sequences`), see `RolloutFunc.__call__`."""
    width = out.batch["prompts"].shape[1]
    real = out.batch["attention_mask"].bool()
    log_probs = out.batch.get("rollout_log_probs")
    fields: dict[str, Any] = {
        "prompt_ids": _unpadded(out.batch["prompts"], real[:, :width], at=-1),
        "completion_ids": _unpadded(out.batch["responses"], real[:, width:]),
        "logprobs": None if log_probs is None else _unpadded(log_probs, real[:, width:]),
        "env_mask": _unpadded(out.batch["response_mask"], real[:, width:]),
    }
    others = {key: column.tolist() for key, column in out.non_tensor_batch.items() if key not in _NOT_FORWARDED}
    return {**others, **fields}


def _unpadded(values: Any, real: Any, at: int = 0) -> list[list[Any]]:
    """Each row's ``real`` values. TRL takes no empty rows: one without any keeps the padding ``at``."""
    rows = zip(values, real, strict=True)
    return [row[mask].tolist() if mask.any() else [row[at].item()] for row, mask in rows]
