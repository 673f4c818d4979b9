"""What users write: agent loops. `AgentLoopBase` and its helpers."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from zagent.client.llm_client import AsyncLLMServerManager
from zagent.config import RolloutConfig
from zagent.errors import InvalidRequest, PromptTooLong, TemplateError
from zagent.loops.tokenizer import in_tokenizer_thread
from zagent.loops.tokens import ChatTemplate
from zagent.types import AgentLoopOutput, Ids

if TYPE_CHECKING:
    from zagent.loops.tools import Toolbox

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

    ``attempt`` (1, 2, …) is set afterwards: above 1, another worker was lost while it ran this row, and what it did in
    the world may have been done. So are ``row_key``, ``row_name``, for log lines, ``session``, ``tools``, ``services``
    and ``trace``.
    """

    #: Set by the worker, unless a constructor sets something of the same name itself.
    attempt: int = 1
    #: The same for all attempts at this row: step, uid (without uids, the row's index) and sample.
    row_key: str = ""
    row_name: str = "row"
    #: Unique to this attempt at the row (hex); "" outside a worker.
    session: str = ""
    #: The row's selection of the configured tools; None = there are none.
    tools: Toolbox | None = None
    #: User actors by pool name.
    services: Mapping[str, Any] = MappingProxyType({})

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

    def trace(self, kind: str, /, **fields: Any) -> None:  # noqa: B027 (loops need not have one)
        """Hand an event of this trajectory to the run's `zagent.Tracer`, if `trace.target` names one. For events of a
        loop's own, beside `start`, `generate`, `tool`, `reward` and `end`."""

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
        images: Sequence[bytes] | None = None,
        videos: Sequence[bytes] | None = None,
        remove_system_prompt: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of ``messages`` with the generation prompt, in a thread.

        Args:
            tools: JSON schemas, for the template to show.
            images, videos: what the messages' parts hold (`process_vision_info`); the template itself writes one
                placeholder for each.
            remove_system_prompt: render ``messages`` as amid a conversation, without what a template adds in front.
                `continue_chat` also closes the answer before.
            kwargs: for the template; `rollout.apply_chat_template_kwargs` are given on every call, these win over them.

        Raises:
            TemplateError: the template refuses the messages, drops a text, takes no tools; more or fewer images or
                videos than the messages have parts for.
        """
        self._check_sees(messages)
        for kind, media in (("image", images), ("video", videos)):
            check_media(messages, kind, media)

        def render() -> list[int]:
            template = self._template(kwargs)
            return template.fragment(messages, tools) if remove_system_prompt else template.prompt(messages, tools)

        return await self.in_tokenizer_thread(render)

    async def continue_chat(
        self, sampled: Ids, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Token ids to insert between the answer ``sampled`` and the next one: what its turn lacks, ``messages``, the
        generation prompt; in a thread. The prompt of the next call is all tokens so far and these.

        Args:
            sampled: the answer's ids, with the stop token if it was sampled.
            messages: tool results, a user's reply.
            tools: those given to `apply_chat_template`.

        Raises:
            TemplateError: the template refuses the messages, drops a text, or is not append-only.
        """
        self._check_sees(messages)
        return await self.in_tokenizer_thread(lambda: self._template({}).continuation(sampled, messages, tools))

    def _check_sees(self, messages: Sequence[Mapping[str, Any]]) -> None:
        if self.processor is None and any(count_parts(messages, kind) for kind in ("image", "video")):
            raise InvalidRequest("messages have images or videos, and this model takes none (or not in a way we know)")

    def _template(self, kwargs: Mapping[str, Any]) -> ChatTemplate:
        options = {**self.rollout_config.apply_chat_template_kwargs, **kwargs}
        return ChatTemplate.of(self.tokenizer, options, self.trainer_config.model_path)

    async def process_vision_info(self, messages: list[dict[str, Any]]) -> dict[str, list[bytes] | None]:
        """The messages' ``{"images": …, "videos": …}`` as encoded files, read and decoded in a thread; None where there
        are none. See `zagent.loops.vision.process_vision_info`."""
        from zagent.loops.vision import in_images_thread, process_vision_info

        return await in_images_thread(lambda: process_vision_info(messages))

    async def decode(self, ids: Ids) -> str:
        """Text of ``ids`` without special tokens, in a thread."""
        plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return await self.in_tokenizer_thread(lambda: str(self.tokenizer.decode(plain, skip_special_tokens=True)))

    async def in_tokenizer_thread(self, function: Callable[[], Result]) -> Result:
        """Run ``function()`` in the thread that owns the tokenizer."""
        return await in_tokenizer_thread(function)

    def fit_prompt(self, prompt_ids: list[int] | np.ndarray, *, has_images: bool = False) -> np.ndarray:
        """The prompt as int32 array of at most `rollout.prompt_length` tokens.

        Raises:
            PromptTooLong: it is longer, and `rollout.prompt_overflow` is `error`, or the prompt has images. Else its
                head is dropped, before the engine sees it, so that the trained context is the sampled one; with a
                warning.
        """
        ids = np.asarray(prompt_ids, np.int32)
        limit = self.rollout_config.prompt_length
        if len(ids) <= limit:
            return ids
        if has_images or self.rollout_config.prompt_overflow == "error":
            hint = "its images count" if has_images else "rollout.prompt_overflow=left would drop its head"
            raise PromptTooLong(f"prompt of {len(ids)} tokens exceeds rollout.prompt_length={limit} ({hint})")
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


def check_media(messages: Sequence[Mapping[str, Any]], kind: str, media: Sequence[bytes] | None) -> None:
    """Raise `TemplateError` unless ``media`` is None or has one item for each content part of ``kind`` (image, video):
    the template writes placeholders for parts, and the engine wants one placeholder for each item."""
    wanted = count_parts(messages, kind)
    if media is not None and len(media) != wanted:
        raise TemplateError(f"{len(media)} {kind}s for messages with {wanted} content parts of type {kind}")


def count_parts(messages: Sequence[Mapping[str, Any]], kind: str) -> int:
    """Content parts of ``kind`` (image, video) in ``messages``."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content]
    return sum(isinstance(part, Mapping) and part.get("type") in (kind, f"{kind}_url") for part in parts)


def with_budget(sampling_params: dict[str, Any], budget: int) -> dict[str, Any]:
    """A copy of ``sampling_params`` that asks for at most ``budget`` tokens."""
    return {**{k: v for k, v in sampling_params.items() if k != "max_tokens"}, "max_new_tokens": budget}
