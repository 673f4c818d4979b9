"""What users write: agent loops. `AgentLoopBase` and its helpers."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from zagent.client.llm_client import AsyncLLMServerManager
from zagent.config import RolloutConfig
from zagent.errors import PromptTooLong
from zagent.types import AgentLoopOutput, Ids

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """What a loop may know of the run: `trainer_config` of its constructor."""

    rollout: RolloutConfig
    #: Prompt and response together, as the engine counts; None = unknown (a hub id not on disk).
    context_length: int | None = None
    model_path: str = ""
    #: Tokens of the context that the engine keeps to itself.
    reserved_tokens: int = 8


class AgentLoopBase(ABC):
    """One trajectory: `run` is called once, on an instance of its own.

    Built with verl's keywords; an ``__init__`` of your own may take any of them, or ``**kwargs`` for the rest, plus
    what its entry in `rollout.agent_loop_config_path` says.

    Args:
        trainer_config: the run's `TrainerConfig`.
        server_manager: generates (`AsyncLLMServerManager.generate`). Engine calls through it get this row's seeds.
        tokenizer: transformers' tokenizer. Use the helpers here: they do not block the event loop.
        processor: the multimodal processor, or None.
        dataset_cls, data_config: the trainer's, or None.

    ``attempt`` (1, 2, …) is set afterwards: above 1, another worker was lost while it ran this row. So is
    ``row_name``, for log lines.
    """

    #: One thread: tokenizers are not safe to share between several, and one keeps the loop free all the same.
    _tokenizer_thread: ClassVar[ThreadPoolExecutor] = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def __init__(  # noqa: PLR0917 (verl's constructor)
        self,
        trainer_config: TrainerConfig,
        server_manager: AsyncLLMServerManager,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        **kwargs: Any,
    ) -> None:
        self.trainer_config = trainer_config
        self.rollout_config = trainer_config.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = data_config
        self.attempt = 1
        self.row_name = "row"

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """The trajectory of one row.

        Args:
            sampling_params: this row's own dict, for `server_manager.generate`.
            kwargs: the row: `raw_prompt` and every other key of the batch's `non_tensor_batch`.
        """

    async def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of ``messages`` with the generation prompt, in a thread.

        `rollout.apply_chat_template_kwargs` are given on every call; ``kwargs`` win over them.
        """
        options = {"add_generation_prompt": True, **self.rollout_config.apply_chat_template_kwargs, **kwargs}

        def render() -> list[int]:
            return list(
                self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False, **options)
            )

        return await self.in_tokenizer_thread(render)

    async def decode(self, ids: Ids) -> str:
        """Text of ``ids`` without special tokens, in a thread."""
        plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return await self.in_tokenizer_thread(lambda: str(self.tokenizer.decode(plain, skip_special_tokens=True)))

    async def in_tokenizer_thread(self, function: Callable[[], Result]) -> Result:
        """Run ``function()`` in the thread that owns the tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, function)

    def fit_prompt(self, prompt_ids: list[int] | np.ndarray) -> np.ndarray:
        """The prompt as int32 array of at most `rollout.prompt_length` tokens.

        Raises:
            PromptTooLong: it is longer, and `rollout.prompt_overflow` is `error`. With `left` its head is dropped,
                before the engine sees it, so that the trained context is the sampled one; a warning is logged.
        """
        ids = np.asarray(prompt_ids, np.int32)
        limit = self.rollout_config.prompt_length
        if len(ids) <= limit:
            return ids
        if self.rollout_config.prompt_overflow == "error":
            raise PromptTooLong(
                f"prompt of {len(ids)} tokens exceeds rollout.prompt_length={limit} "
                "(rollout.prompt_overflow=left would drop its head)"
            )
        logger.warning("%s: prompt of %d tokens lost its first %d", self.row_name, len(ids), len(ids) - limit)
        return ids[-limit:]

    def token_budget(self, prompt_length: int, response_length: int, sampling_params: dict[str, Any]) -> int:
        """Tokens the next call may sample: the smallest of the caller's `max_new_tokens` (or `max_tokens`), what
        `rollout.response_length` leaves after ``response_length``, and what the model's context leaves after
        ``prompt_length`` tokens (all that is sent). Zero or less: do not call the engine."""
        limits = [self.rollout_config.response_length - response_length]
        asked = (sampling_params.get(key) for key in ("max_new_tokens", "max_tokens"))
        limits.extend(int(tokens) for tokens in asked if tokens is not None)
        context = self.trainer_config.context_length
        if context is not None:
            limits.append(context - self.trainer_config.reserved_tokens - prompt_length)
        return min(limits)


def with_budget(sampling_params: dict[str, Any], budget: int) -> dict[str, Any]:
    """A copy of ``sampling_params`` that asks for at most ``budget`` tokens."""
    return {**{k: v for k, v in sampling_params.items() if k != "max_tokens"}, "max_new_tokens": budget}
