"""A trajectory's images among its tokens.

A trainer needs the *expanded* ids, one run of placeholders per image; SGLang takes one placeholder per image and
expands it itself. Between the two we go by position, never by token value, for a policy can sample the placeholder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from zagent.errors import EngineError, InvalidRequest
from zagent.types import IMAGE_SPANS, MULTI_MODAL_INPUTS, Ids, TokenOutput, int_array


class ImageProcessor(Protocol):
    """What is needed of `VisionProcessor`."""

    image_token_id: int

    def count_tokens(self, image: bytes) -> int: ...

    def inputs(self, images: Sequence[bytes]) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True, slots=True)
class Expanded:
    """``ids`` int32 [tokens] with a run of placeholders for each of ``images``; ``spans`` int32 [images, 2]."""

    ids: np.ndarray
    images: tuple[bytes, ...]
    spans: np.ndarray


class VisionTokens:
    """The images of one trajectory, appended as its tokens are.

    ``processor`` is the model's, or None: then all methods work, and an image is refused.
    """

    def __init__(self, processor: ImageProcessor | None) -> None:
        self._processor = processor
        self.images: list[bytes] = []
        self._spans = np.empty((0, 2), np.int32)

    def expand(self, ids: Ids, images: Sequence[bytes] | None) -> Expanded:
        """``ids`` (a prompt, or what is inserted between turns) with one placeholder per image → with all its tokens.
        Changes nothing here. With images: for the images' thread.

        Raises:
            InvalidRequest: placeholders and images differ in number, or the model takes no images.
            InputError: an image that cannot be read.
        """
        plain, images = _ids(ids), tuple(images or ())
        if self._processor is None:
            if images:
                raise InvalidRequest(f"{len(images)} images for a model that takes none (or not in a way we know)")
            return Expanded(plain, (), np.empty((0, 2), np.int32))
        places = np.flatnonzero(plain == self._processor.image_token_id)
        if len(places) != len(images):
            raise InvalidRequest(
                f"{len(places)} image placeholders (token id {self._processor.image_token_id}) for {len(images)} images"
            )
        return _expanded(plain, places, images, [self._processor.count_tokens(image) for image in images])

    def add(self, piece: Expanded, at: int) -> None:
        """``piece`` now stands in the trajectory, ``at`` tokens after its beginning."""
        self.images.extend(piece.images)
        self._spans = np.concatenate([self._spans, piece.spans + np.int32(at)])

    def sendable(self, context: np.ndarray) -> tuple[np.ndarray, list[bytes] | None]:
        """What an engine takes for ``context``, all tokens so far: ids with one placeholder per image, and the images
        (None if there are none)."""
        if not self.images:
            return context, None
        dropped = [np.arange(start + 1, end) for start, end in self._spans]
        return np.delete(context, np.concatenate(dropped)), list(self.images)

    def check(self, context: np.ndarray, output: TokenOutput) -> None:
        """Raise `EngineError` unless the engine that gave ``output`` worked on ``context``, token by token."""
        if not self.images:
            return
        used = output.extra_fields.get("prompt_token_ids")
        if used is None:
            raise EngineError("the engine did not return the prompt's expanded ids")
        if not np.array_equal(used, context):
            raise EngineError(
                f"the engine expanded the prompt's images to other tokens than we: {_differ(used, context)}"
            )

    def extra_fields(self) -> dict[str, Any]:
        """What a row of a model with eyes carries for its trainer: `image_spans` always, `multi_modal_inputs` with
        images. {} for other models. With images: for the images' thread."""
        if self._processor is None:
            return {}
        fields: dict[str, Any] = {IMAGE_SPANS: self._spans}
        if self.images:
            fields[MULTI_MODAL_INPUTS] = self._processor.inputs(self.images)
        return fields

    def multi_modal_data(self) -> dict[str, list[bytes]] | None:
        """The images themselves, for `AgentLoopOutput`."""
        return {"images": list(self.images)} if self.images else None


def _ids(ids: Ids) -> np.ndarray:
    found = int_array(ids)
    if found is None:
        raise InvalidRequest("token ids must be 32-bit integers in one dimension")
    return found


def _expanded(ids: np.ndarray, places: np.ndarray, images: tuple[bytes, ...], counts: list[int]) -> Expanded:
    repeats = np.ones(len(ids), np.int64)
    repeats[places] = counts
    ends = np.cumsum(repeats)[places]
    spans = np.stack([ends - counts, ends], axis=1).astype(np.int32) if images else np.empty((0, 2), np.int32)
    return Expanded(np.repeat(ids, repeats), images, spans)


def _differ(used: np.ndarray, context: np.ndarray) -> str:
    if len(used) != len(context):
        return f"{len(used)} in all, not {len(context)}"
    at = int(np.flatnonzero(used != context)[0])
    return f"{used[at]} at position {at}, not {context[at]}"
