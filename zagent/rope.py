"""Positions in time, height and width, as the Qwen-VL families count them. Pure numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from zagent.errors import InputError
from zagent.types import IMAGE_SPANS, MULTI_MODAL_INPUTS


def row_positions(length: int, extra_fields: Mapping[str, Any]) -> np.ndarray:
    """`rope_index` of a row of ``length`` real tokens with the images that its ``extra_fields`` tell of.

    Raises:
        InputError: `image_spans` and `multi_modal_inputs["image_grid_thw"]` do not fit each other or the row.
    """
    spans = _table(IMAGE_SPANS, extra_fields.get(IMAGE_SPANS), 2)
    grids = _table("image_grid_thw", (extra_fields.get(MULTI_MODAL_INPUTS) or {}).get("image_grid_thw"), 3)
    if len(spans) != len(grids):
        raise InputError(f"{IMAGE_SPANS} of {len(spans)} images, image_grid_thw of {len(grids)}")
    return rope_index(length, spans, grids)


def _table(name: str, value: Any, width: int) -> np.ndarray:
    """Int [rows, width]; None is a table without rows."""
    table = np.asarray(np.empty((0, width), np.int64) if value is None else value)
    if table.ndim != 2 or table.shape[1] != width or table.dtype.kind not in "iu":
        raise InputError(f"{name} must be an int array [images, {width}], got {table.dtype} {list(table.shape)}")
    return table


def rope_index(length: int, spans: np.ndarray, grids: np.ndarray) -> np.ndarray:
    """Int64 [3, length]: transformers' `get_rope_index` of one row without padding.

    ``spans`` [images, 2] are where each image's tokens start and end, in order, ``grids`` [images, 3] its patches in
    time, height and width. Text counts on by one per token, the same in all three; an image's tokens have their place
    in time, height and width, counted from where the text before stopped; the text behind goes on after the largest.

    Raises:
        InputError: spans that overlap or go beyond ``length``, or do not have one token per merged patch.
    """
    parts: list[np.ndarray] = []
    done = following = 0  # tokens, and the position of the next one
    for (start, end), grid in zip(spans.tolist(), grids.tolist(), strict=True):
        if not done <= start < end <= length:
            raise InputError(f"an image at tokens {start} to {end}, after {done} of {length}")
        parts.append(_text(following, start - done))
        following += start - done
        parts.append(following + _places(end - start, *grid))
        following = int(parts[-1][1:].max()) + 1
        done = end
    return np.concatenate([*parts, _text(following, length - done)], axis=1)


def _text(first: int, count: int) -> np.ndarray:
    return np.broadcast_to(np.arange(first, first + count), (3, count))


def _places(tokens: int, t: int, h: int, w: int) -> np.ndarray:
    """Time, height and width of each token of an image, int64 [3, tokens]. The model merges n x n patches into one
    token; n follows from the numbers of both."""
    side = math.isqrt(t * h * w // tokens)
    if not side or t * (h // side) * (w // side) != tokens or h % side or w % side:
        raise InputError(f"an image of {tokens} tokens and {t} x {h} x {w} patches")
    return np.indices((t, h // side, w // side)).reshape(3, -1)
