"""Agent loops written for verl, unchanged in zagent's workers: list this module in `rollout.imports`, before theirs.

Their `@register` registers them here; names in `agent_loop_config_path` and dotted paths work, too. They are built with
verl's keywords, call `self.server_manager.generate` with verl's, and return verl's output. Where verl is installed they
derive from its own classes (which need `model.use_auto_tokenizer=true`), elsewhere from `stand_ins`. Text only; their
`self.config` has what zagent knows of verl's (`verl_config`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from zagent.adapters.verl import stand_ins
from zagent.client.llm_client import AsyncLLMServerManager
from zagent.errors import LoopError
from zagent.loops.base import TrainerConfig
from zagent.loops.registry import accepted, adopt, register
from zagent.models import hub_facts
from zagent.types import AgentLoopMetrics, AgentLoopOutput, TokenOutput


@dataclass(frozen=True, slots=True)
class Wrapped:
    """verl's `DictConfigWrap`; ``zagent`` is what it was made of."""

    config: Any
    zagent: TrainerConfig | None = None


class VerlLoop:
    """One of verl's loops as one of zagent's."""

    def __init__(self, factory: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
        ours: TrainerConfig = keywords["trainer_config"]
        config, model_type = verl_config(ours)
        offered = {
            "trainer_config": Wrapped(config, ours),
            "server_manager": Client(keywords["server_manager"], config),
            "tokenizer": keywords["tokenizer"],
            "processor": None,
            "dataset_cls": None,
            "data_config": Wrapped(config.data),
            "hf_model_type": model_type,
        }
        self.loop = factory(**accepted(factory, offered))

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Its trajectory. Raises `LoopError` for an output that is no such thing, or has images."""
        return converted(await self.loop.run(sampling_params, **row))


class Client:
    """verl's `LLMServerClient`: the keywords of its `generate`, and its limit on tokens."""

    def __init__(self, llm: AsyncLLMServerManager, config: DictConfig) -> None:
        self._llm = llm
        rollout = config.actor_rollout_ref.rollout
        self._response_length: int = rollout.response_length
        self._total: int = rollout.prompt_length + rollout.response_length

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        **_: Any,
    ) -> TokenOutput:
        """At most the tokens that `response_length`, and `prompt_length` with it, leave, unless ``sampling_params`` say
        how many; without a call where none are left. ``stop_reason`` is `completed` or `aborted`."""
        if image_data or video_data or audio_data:
            raise LoopError("loops written for verl see no images here: take zagent's own")
        limit = min(self._response_length, self._total - len(prompt_ids))
        params = {"max_tokens": limit, **sampling_params}
        if "max_new_tokens" in sampling_params:
            del params["max_tokens"]
        elif params["max_tokens"] <= 0:
            return TokenOutput([], [] if sampling_params.get("logprobs") else None, "completed")  # type: ignore[arg-type]
        output = await self._llm.generate(request_id, list(prompt_ids), params)
        ids, log_probs = _listed(output.token_ids), None if output.log_probs is None else _listed(output.log_probs)
        versions = [version for version, _, _ in output.versions]
        steps = {"min_global_steps": min(versions), "max_global_steps": max(versions)} if versions else {}
        reason: Any = "aborted" if output.stop_reason == "abort" else "completed"
        fields = {**output.extra_fields, **steps}
        return replace(output, token_ids=ids, log_probs=log_probs, stop_reason=reason, extra_fields=fields)


def _listed(values: Any) -> list[Any]:
    """Loops ask a list whether it is empty by its truth."""
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


@lru_cache(maxsize=4)
def _verl_config(rollout_json: str, model_path: str) -> tuple[DictConfig, str | None]:
    rollout = OmegaConf.create(rollout_json)
    agent = {"default_agent_loop": rollout.agent, "agent_loop_config_path": rollout.agent_loop_config_path}
    made = {
        "actor_rollout_ref": {
            "rollout": {**rollout, "name": "sglang", "mode": "async", "full_determinism": False, "agent": agent},
            "model": {"path": model_path},
        },
        "data": {
            "apply_chat_template_kwargs": rollout.apply_chat_template_kwargs,
            "max_prompt_length": rollout.prompt_length,
            "max_response_length": rollout.response_length,
        },
    }
    facts = hub_facts(model_path)
    return OmegaConf.create(made), None if facts is None else facts.model_type


def verl_config(ours: TrainerConfig) -> tuple[DictConfig, str | None]:
    """(verl's configuration, as far as it follows from zagent's section `rollout`; the model's type)"""
    return _verl_config(ours.rollout.model_dump_json(), ours.model_path)


def converted(output: Any) -> AgentLoopOutput:
    """verl's `AgentLoopOutput` as ours. Raises `LoopError`."""
    if isinstance(output, AgentLoopOutput):
        return output
    missing = [name for name in ("prompt_ids", "response_ids", "response_mask") if not hasattr(output, name)]
    if missing:
        raise LoopError(f"a loop written for verl returned a {type(output).__name__}, not an AgentLoopOutput")
    if any((output.multi_modal_data or {}).values()):
        raise LoopError("loops written for verl see no images here: take zagent's own")
    return AgentLoopOutput(
        prompt_ids=output.prompt_ids,
        response_ids=output.response_ids,
        response_mask=output.response_mask,
        response_logprobs=output.response_logprobs,
        routed_experts=output.routed_experts,
        reward_score=output.reward_score,
        num_turns=output.num_turns,
        metrics=AgentLoopMetrics.model_validate(output.metrics.model_dump()),
        extra_fields=output.extra_fields,
    )


def activate() -> type:
    """The base class of verl's loops in this process, from now on known to zagent's workers."""
    try:
        from verl.experimental.agent_loop import agent_loop as theirs
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("verl"):  # verl is there, and lacks something
            raise
        stand_ins.install()
        return stand_ins.AgentLoopBase
    registered_there = theirs.register

    def register_in_both(name: str) -> Callable[[type], type]:
        return lambda cls: registered_there(name)(register(name)(cls))

    theirs.register = register_in_both
    return theirs.AgentLoopBase  # type: ignore[no-any-return]


adopt(activate(), VerlLoop)
