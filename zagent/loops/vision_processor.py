"""The model's image processor: how many tokens an image becomes, and what the model sees of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zagent.errors import ConfigError, InputError
from zagent.images import decode_image, open_image


class VisionProcessor:
    """Of the model at ``path``. Loaded with the first image: it brings torch with it where that is installed.

    transformers' Pillow back-end is used, as in our engines (`image_processor_backend`): torchvision's rounds
    differently when it scales, by up to 0.15 per pixel value, and differently again on each kind of device. All methods
    are for the thread of `zagent.loops.vision.in_images_thread`.

    Args:
        path: the model's directory, or its hub id.
        family: its `model_type`.
        image_token_id: the placeholder.
    """

    def __init__(self, path: str, family: str, image_token_id: int, *, trust_remote_code: bool = False) -> None:
        self.path = path
        self.family = family
        self.image_token_id = image_token_id
        self._trust = trust_remote_code
        self._processor: Any = None

    def count_tokens(self, image: bytes) -> int:
        """Tokens that ``image``, an encoded file, becomes. Raises `InputError` if it cannot be read."""
        processor, opened = self._loaded(), open_image(image)
        try:
            patches = processor.get_number_of_image_patches(opened.height, opened.width)
        except ValueError as error:  # a side more than 200 times the other
            raise InputError(f"an image of {opened.width} x {opened.height} pixels: {error}") from error
        return int(patches // processor.merge_size**2)

    def inputs(self, images: Sequence[bytes]) -> dict[str, np.ndarray]:
        """The model's inputs beside token ids: `pixel_values` float32 [patches, values], `image_grid_thw` int64
        [images, 3] (patches in time, height and width)."""
        made = self._loaded()(images=[decode_image(image) for image in images], return_tensors="np")
        return {key: np.ascontiguousarray(value) for key, value in made.items()}

    def _loaded(self) -> Any:
        if self._processor is None:
            self._processor = _load(self.path, self.family, self._trust)
        return self._processor


def _load(path: str, family: str, trust_remote_code: bool) -> Any:
    from transformers import AutoImageProcessor

    options: dict[str, Any] = {"backend": "pil", "trust_remote_code": trust_remote_code}
    if family == "qwen2_vl":  # SGLang 0.5.23 overrules what the model's file says
        options["size"] = {"shortest_edge": 3136, "longest_edge": 1003520}
    try:
        return AutoImageProcessor.from_pretrained(path, **options)
    except Exception as error:  # transformers and its hub have classes of their own for each way to fail
        raise ConfigError(
            f"model.path={path!r}: no image processor can be loaded: {type(error).__name__}: {error}"
        ) from error
