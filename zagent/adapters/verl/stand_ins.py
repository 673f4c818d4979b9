"""What agent loops import from verl, for workers where verl is not installed."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from zagent.loops import base, registry
from zagent.types import AgentLoopMetrics, TokenOutput

Function = TypeVar("Function", bound=Callable[..., Any])


class AgentLoopOutput(BaseModel):
    """verl's: a trajectory as plain lists."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None
    mm_processor_output: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Merged:
    """The tokens of a trajectory after a merge (verl's `MergeResult`)."""

    token_ids: list[int]
    appended_token_count: int


class AgentLoopBase(base.AgentLoopBase):
    """verl's base class: its constructor, its attributes, its helpers; text only."""

    def __init__(  # noqa: PLR0917 (verl's constructor)
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        hf_model_type: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(trainer_config.zagent, server_manager, tokenizer, processor, dataset_cls, data_config.config)
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.apply_chat_template_kwargs = self.data_config.get("apply_chat_template_kwargs", {})
        self.mm_processor_kwargs: dict[str, Any] = {}
        self.loop = asyncio.get_running_loop()

    async def process_multi_modal_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The messages' images and videos, where there are any."""
        return {key: value for key, value in (await self.process_vision_info(messages)).items() if value}

    def _get_mm_processor_kwargs(self, audio_data: Any = None) -> dict[str, Any]:
        return {}

    def _assert_mm_supported(self, has_multi_modal: bool) -> None:
        if has_multi_modal:
            raise ValueError("loops written for verl see no images here: take zagent's own")

    @staticmethod
    def build_sglang_video_payload(videos: Any, mm_inputs: dict[str, Any]) -> None:
        """Nothing, since there are no videos."""

    async def ct_build_initial_tokens(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **_: Any
    ) -> list[int]:
        """The first prompt; without its head where it is longer than `prompt_length`."""
        return (await self.apply_chat_template(messages, tools))[-self.rollout_config.prompt_length :]

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: Sequence[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: Sequence[float] | None = None,
    ) -> tuple[Merged, list[int], list[float] | None]:
        """What the model sampled, behind what there is: mask 1."""
        count = len(assistant_token_ids)
        merged = Merged([*runtime_token_ids, *assistant_token_ids], count)
        log_probs = None if response_logprobs is None else [*response_logprobs, *(assistant_logprobs or ())]
        return merged, [*response_mask, *[1] * count], log_probs

    async def ct_merge_context_msg(  # noqa: PLR0917 (verl's)
        self,
        previous_messages: list[dict[str, Any]],
        updated_messages: list[dict[str, Any]],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> tuple[Merged, list[int], list[float] | None]:
        """The messages that are new, and the next header, behind what there is: mask 0."""
        new = await self.continue_chat(runtime_token_ids, updated_messages[len(previous_messages) :], tools)
        merged = Merged([*runtime_token_ids, *new], len(new))
        log_probs = None if response_logprobs is None else [*response_logprobs, *[0.0] * len(new)]
        return merged, [*response_mask, *[0] * len(new)], log_probs


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Adds the seconds it takes to ``timing_raw[name]``."""
    started = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - started


def rollout_trace_op(function: Function) -> Function:
    """Tracing is zagent's (`trace.target`)."""
    return function


#: Module -> names. Packages on the way are made, too.
MODULES: dict[str, dict[str, Any]] = {
    "verl.experimental.agent_loop.agent_loop": {
        "AgentLoopBase": AgentLoopBase,
        "AgentLoopMetrics": AgentLoopMetrics,
        "AgentLoopOutput": AgentLoopOutput,
        "register": registry.register,
    },
    "verl.experimental.agent_loop": {
        "AgentLoopBase": AgentLoopBase,
        "AgentLoopOutput": AgentLoopOutput,
    },
    "verl.utils.profiler": {"simple_timer": simple_timer},
    "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
    "verl.workers.rollout.replica": {"TokenOutput": TokenOutput},
}


def install() -> None:
    """Make these modules importable in this process."""
    for name, contents in MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            _module(".".join(parts[:end]))
        vars(sys.modules[name]).update(contents)


def _module(name: str) -> None:
    if name in sys.modules:
        return
    module = ModuleType(name, "A part of verl, as agent loops see it on zagent.")
    module.__path__ = []  # a package without files: what is not here is a ModuleNotFoundError that names it
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
