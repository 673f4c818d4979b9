"""What an engine is to the rest of zagent: tokens in, tokens out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from zagent.errors import InvalidRequest, PromptTooLong
from zagent.types import StopReason, TokenOutput

#: Exit codes of an engine process whose engine is broken: by itself, or since a process of the engine's was killed from
#: outside. The launcher tells them apart, as only the first makes the engine's calls suspects.
ENGINE_DIED = 86
ENGINE_KILLED = 87

#: What becomes of running calls when an engine pauses: they end with the tokens they have (`stop_reason` "abort"), or
#: stand still and go on, on whatever weights there are then.
PauseMode: TypeAlias = Literal["abort", "in_place"]

#: Told what a running call has sampled since it was last told: ids, log-probabilities, versions relative to these.
Progress: TypeAlias = "Callable[[TokenOutput], None]"


class Death(NamedTuple):
    """Why an engine is broken for good. ``crashed``: by itself, so that one of its calls may be the reason."""

    reason: str
    crashed: bool

    @property
    def exit_code(self) -> int:
        return ENGINE_DIED if self.crashed else ENGINE_KILLED


@dataclass(slots=True)
class GenerateRequest:
    """One engine call.

    ``rid`` is unique per attempt and of fixed length (SGLang aborts by prefix). ``prompt_ids`` is int32 [tokens].
    ``sampling_params`` has SGLang's names, plus ``logprobs`` (bool, default False). The dict is the engine's own copy.
    """

    rid: str
    prompt_ids: np.ndarray
    sampling_params: dict[str, Any] = field(default_factory=dict)
    images: Sequence[bytes] | None = None
    videos: Sequence[bytes] | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of a started engine. ``context_length`` counts prompt and response together, ``reserved_tokens`` of it
    are the engine's own. ``tokenizer_probe`` is `zagent.loops.tokenizer.probe` of its tokenizer ("" = none).
    ``image_token_id`` and ``video_token_id`` are the placeholders, None where the model takes no such thing."""

    vocab_size: int
    context_length: int
    reserved_tokens: int = 0
    tokenizer_probe: str = ""
    image_token_id: int | None = None
    video_token_id: int | None = None
    #: Processes of the engine beside its own, for the launcher's last sweep.
    pids: tuple[int, ...] = ()


class TensorSpec(NamedTuple):
    """A tensor to come: name in the checkpoint, dtype as torch calls it (`float32`), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class WeightsGroup(NamedTuple):
    """A torch process group of trainer and engines: rank 0, who listens at ``address``:``port``, and from ``rank`` on
    the processes of one engine."""

    address: str
    port: int
    rank: int
    world_size: int
    name: str
    backend: str  #: `nccl`, or `gloo` where there is no GPU


class Engine(Protocol):
    """A started engine. All methods are called on one event loop, that of the engine process's main thread."""

    info: EngineInfo

    @property
    def version(self) -> int:
        """Of the weights."""

    @property
    def died(self) -> asyncio.Future[Death]:
        """Resolved once the engine is broken for good; what is running then never finishes."""

    async def start(self) -> None:
        """Become ready to generate. Heavy, blocking set-up belongs into the constructor, before the loop runs."""

    async def generate(self, request: GenerateRequest, progress: Progress | None = None) -> TokenOutput:
        """Answer with int32 ids and float32 log-probabilities (same length; None where `logprobs` is off).

        ``progress`` is told of every `engine.checkpoint_tokens` tokens or some more, in order and without a gap, but
        never of the last ones, which come with the answer (which has all of them).

        With images or videos `extra_fields["prompt_token_ids"]` is the prompt as the model saw it, int32 [tokens]: each
        placeholder has become as many as the image has tokens.

        Cancelling the awaiting task aborts the request in the engine before the cancellation gets through.
        Never returns an empty answer for an engine failure: raises `InvalidRequest` (the caller's fault; this call
        only), or `EngineError`.
        """

    async def clear_cache(self) -> None:
        """Forget all prefix KV; the cache stays usable. Raises `EngineError` if it cannot be done now."""

    async def pause(self, mode: PauseMode) -> None:
        """Running calls end (returns when they have), or stand still; until `resume`, calls that come do the same:
        end without a token (`stop_reason` "abort"), or wait."""

    async def resume(self) -> None:
        """Go on; without a pause nothing happens."""

    async def update_weights(self, directory: str, version: int, *, flush: bool) -> None:
        """Serve the weights in ``directory`` (safetensors, names of the checkpoint) as ``version`` from now on. KV of
        other versions is never used again; ``flush`` frees it, which takes an engine without running calls.

        Raises:
            EngineError: not done; the message says whether the former weights still serve.
        """

    async def join_group(self, group: WeightsGroup) -> None:
        """Become part of the trainer's process group. Blocks until all of it are there.

        Raises:
            EngineError: it did not come about.
            InvalidRequest: this engine takes no tensors from others.
        """

    async def leave_group(self, name: str) -> None:
        """Close that group on this side."""

    async def receive_weights(self, name: str, tensors: Sequence[TensorSpec], version: int, *, flush: bool) -> None:
        """Take the weights that rank 0 of the group ``name`` broadcasts one by one, and serve them as ``version``; else
        as `update_weights`."""

    async def checksum(self) -> str:
        """Of the weights: equal for equal ones."""

    async def release(self, tags: Sequence[str]) -> dict[str, int]:
        """Give memory (of `zagent.types.MEMORY_TAGS`) back to the device, without calls in flight; bytes by tag, 0
        where there is no such device."""

    async def restore(self, tags: Sequence[str]) -> None:
        """Take it again. KV is empty then, and weights are garbage unless they were kept."""

    def in_flight(self) -> int:
        """Calls the engine itself counts as running or queued."""

    async def close(self) -> None:
        """Free everything, end the engine's processes."""


def check_prompt(prompt_ids: np.ndarray, info: EngineInfo) -> None:
    """Refuse what would harm the engine: an id outside the vocabulary kills SGLang's scheduler.

    Raises:
        InvalidRequest: empty prompt, or an id outside [0, vocab_size).
        PromptTooLong: no room for even one token in the context.
    """
    if prompt_ids.size == 0:
        raise InvalidRequest("prompt_ids is empty")
    # One pass: as unsigned numbers, negative ids lie beyond every vocabulary.
    if int(np.maximum.reduce(prompt_ids.view(np.uint32))) >= info.vocab_size:
        low, high = int(prompt_ids.min()), int(prompt_ids.max())
        bad = low if low < 0 else high
        raise InvalidRequest(f"token id {bad} is outside the vocabulary of {info.vocab_size}")
    room = info.context_length - info.reserved_tokens - 1
    if prompt_ids.size >= room:
        raise PromptTooLong(f"prompt of {prompt_ids.size} tokens does not fit the context of {info.context_length}")


def check_media(request: GenerateRequest, info: EngineInfo) -> None:
    """Refuse a prompt whose placeholders are not one per image and one per video: SGLang takes more images than
    placeholders without a word, and hangs on placeholders that the caller has expanded.

    Raises:
        InvalidRequest: the numbers differ, or the model takes nothing of the kind.
    """
    for kind, media, token_id in (
        ("image", request.images, info.image_token_id),
        ("video", request.videos, info.video_token_id),
    ):
        sent = len(media or ())
        if token_id is None and sent:
            raise InvalidRequest(f"this model takes no {kind}s")
        found = 0 if token_id is None else int(np.count_nonzero(request.prompt_ids == token_id))
        if found != sent:
            raise InvalidRequest(
                f"the prompt has {found} {kind} placeholders (token id {token_id}) for {sent} {kind}s"
                + ("" if found < sent else "; they are sent unexpanded, and one that the model sampled counts, too")
            )


def token_budget(sampling_params: Mapping[str, Any], prompt_length: int, info: EngineInfo) -> int:
    """Tokens to ask for: the caller's `max_new_tokens`, cut to what the context leaves. Raises `InvalidRequest`."""
    room = info.context_length - info.reserved_tokens - prompt_length - 1
    asked = sampling_params.get("max_new_tokens")
    if asked is None:
        return room
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 0:
        raise InvalidRequest(f"max_new_tokens must be a non-negative int, got {asked!r}")
    return min(asked, room)


def no_tokens(stop_reason: StopReason, *, logprobs: bool) -> TokenOutput:
    """An answer without any."""
    return TokenOutput(np.empty(0, np.int32), np.empty(0, np.float32) if logprobs else None, stop_reason)
