"""Images as bytes of an encoded file: how they travel, whatever a row holds them as. Pillow is loaded lazily.

Orientation in EXIF data is not applied, and colours are left to the model's image processor, as SGLang does it.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from zagent.errors import InputError

#: Pixel modes that a PNG file can hold; other images are converted to RGB first, as every image processor does.
PNG_MODES = frozenset({"1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA"})


def is_pil_image(value: Any) -> bool:
    """Whether ``value`` is a `PIL.Image.Image`; does not import PIL, for without it there is none."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def png(image: Any) -> bytes:
    """A PIL image as a PNG file, without loss."""
    out = io.BytesIO()
    (image if image.mode in PNG_MODES else image.convert("RGB")).save(out, format="PNG", compress_level=1)
    return out.getvalue()


def read_media(source: Any) -> bytes:
    """The encoded file that ``source`` is or names.

    ``source``: bytes (also as uint8 array), a PIL image, a path, a `file://` or base64 `data:` URL, ``{"url": …}``, or
    what data sets keep images as: ``{"bytes": …, "path": …}``.

    Raises:
        InputError: nothing of these, a file that cannot be read, or an `http(s)` URL: workers fetch nothing.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source)
    if isinstance(source, np.ndarray) and source.dtype == np.uint8 and source.ndim == 1:
        return source.tobytes()
    if is_pil_image(source):
        return png(source)
    if isinstance(source, dict):
        return _read_dict(source)
    if isinstance(source, (str, os.PathLike)):
        return _read_text(os.fspath(source))
    raise InputError(f"a {type(source).__name__} is no image or video: bytes, a path or a data: URL is needed")


def _read_dict(source: dict[str, Any]) -> bytes:
    found = next((source[key] for key in ("bytes", "path", "url") if source.get(key) is not None), None)
    if found is None:
        raise InputError(f"a dict with the keys {', '.join(map(str, source)) or '(none)'} names no image or video")
    return read_media(found)


def _read_text(text: str) -> bytes:
    scheme = urlsplit(text[:64]).scheme.lower()
    if scheme in ("http", "https"):
        raise InputError(f"{text[:200]!r} is not fetched: put the file itself into the row, as bytes or as a path")
    if scheme == "data":
        return _read_data_url(text)
    path = Path(unquote(urlsplit(text).path) if scheme == "file" else text)
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        said = getattr(error, "strerror", None) or error
        raise InputError(f"{str(path.absolute())[:400]} cannot be read: {said}") from error


def _read_data_url(text: str) -> bytes:
    head, comma, data = text.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InputError(f"{text[:60]!r}… is no base64 data: URL")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise InputError(f"{text[:60]!r}… is no base64: {error}") from error


def open_image(data: bytes) -> Any:
    """``data`` as a PIL image of which only the head has been read. Raises `InputError`."""
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("images need Pillow, which is not installed: pip install 'zagent[vision]'") from error
    try:
        return Image.open(io.BytesIO(data))
    except Exception as error:  # each format's reader fails in its own way on bytes that are not of it
        raise InputError(f"an image of {len(data)} bytes cannot be read: {_said(error)}") from error


def decode_image(data: bytes) -> Any:
    """``data`` as a PIL image, read to its end. Raises `InputError`."""
    image = open_image(data)
    try:
        image.load()
    except Exception as error:
        raise InputError(f"an image of {len(data)} bytes cannot be read: {_said(error)}") from error
    return image


def _said(error: Exception) -> str:
    return "of no known format" if type(error).__name__ == "UnidentifiedImageError" else str(error)
