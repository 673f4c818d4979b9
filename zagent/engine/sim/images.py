"""Images in simulated engines: a fixed number of tokens each, whatever is in them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np


def expand(prompt_ids: np.ndarray, image_token_id: int, tokens_per_image: int) -> np.ndarray:
    """``prompt_ids`` int32 [tokens] with ``tokens_per_image`` placeholders in place of each."""
    return np.repeat(prompt_ids, np.where(prompt_ids == image_token_id, tokens_per_image, 1))


def mark(expanded: np.ndarray, image_token_id: int, images: Sequence[bytes], vocab_size: int) -> np.ndarray:
    """``expanded`` with ids made from each image's bytes in place of its placeholders: what answers and the prefix
    cache depend on, so that two prompts with different pictures differ. SGLang does likewise."""
    marks = np.array([zlib.crc32(image) % vocab_size for image in images], np.int32)
    ids = expanded.copy()
    places = np.flatnonzero(ids == image_token_id)
    ids[places] = np.repeat(marks, len(places) // len(images))
    return ids
