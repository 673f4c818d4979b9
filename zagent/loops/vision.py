"""Images and videos in chat messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from zagent.alive import busy
from zagent.errors import InputError
from zagent.images import decode_image, read_media
from zagent.loops.vision_tokens import Expanded, VisionTokens
from zagent.types import Ids

Result = TypeVar("Result")
#: Keys of a content part that hold the image or video, in order of precedence, by the part's type.
_SOURCES = {
    "image": ("image", "image_url", "url", "path"),
    "image_url": ("image_url", "image", "url"),
    "video": ("video", "video_url", "url", "path"),
    "video_url": ("video_url", "video", "url"),
}
#: One thread: pictures are decoded beside the event loop and beside the tokenizer's thread.
_images_thread = ThreadPoolExecutor(1, thread_name_prefix="images")


async def in_images_thread(function: Callable[[], Result]) -> Result:
    """Run ``function()`` in the thread that works on images; all rows with images wait for it."""

    def work() -> Result:
        with busy("the images' thread"):
            return function()

    return await asyncio.get_running_loop().run_in_executor(_images_thread, work)


def process_vision_info(messages: Sequence[Mapping[str, Any]]) -> dict[str, list[bytes] | None]:
    """``{"images": …, "videos": …}`` of all ``messages`` in order of appearance, as encoded files; None where there are
    none. Images are decoded once, to know that they can be.

    Content parts are ``{"type": "image", "image": …}`` or ``{"type": "image_url", "image_url": {"url": …}}``, and
    likewise for videos; `zagent.images.read_media` says what they may hold.

    Raises:
        InputError: one that cannot be read; names message and part, counted from 0.
    """
    images: list[bytes] = []
    videos: list[bytes] = []
    for where, part in _parts(messages):
        is_image = part["type"].startswith("image")
        try:
            data = read_media(_source(part))
            if is_image:
                decode_image(data)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        (images if is_image else videos).append(data)
    return {"images": images or None, "videos": videos or None}


async def expand_images(vision: VisionTokens, ids: Ids, messages: Sequence[Mapping[str, Any]]) -> Expanded:
    """``ids``, which render ``messages``, with the images that stand in these; in the images' thread, if there are any.
    Changes nothing: `VisionTokens.add` does, once the tokens have a place.

    Raises:
        InputError: an image that cannot be read, or a video: SGLang writes the prompt anew around one, and what was
            sampled would no longer follow what is trained on. A loop of one's own may send videos with `generate`.
        InvalidRequest: placeholders and images differ in number, or the model takes no images.
    """
    if not any(True for _ in _parts(messages)):
        return vision.expand(ids, None)

    def expand() -> Expanded:
        found = process_vision_info(messages)
        if found["videos"]:
            raise InputError("videos in messages cannot be trained on: SGLang changes the ids of their prompts")
        return vision.expand(ids, found["images"])

    return await in_images_thread(expand)


async def trained_fields(vision: VisionTokens) -> dict[str, Any]:
    """`VisionTokens.extra_fields`, in the images' thread if there are any."""
    return await in_images_thread(vision.extra_fields) if vision.images else vision.extra_fields()


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each image and video, with its place."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, (list, tuple)) else ()):
            if isinstance(part, Mapping) and part.get("type") in _SOURCES:
                yield f"message {number}, part {place}", part


def _source(part: Mapping[str, Any]) -> Any:
    for key in _SOURCES[part["type"]]:
        if part.get(key) is not None:
            return part[key]
    raise InputError(f"{part['type']} without any: {{'type': {part['type']!r}, {part['type']!r}: …}} is needed")
