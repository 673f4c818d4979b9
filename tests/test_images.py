"""Images and videos as encoded files, in whichever form a row holds them."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.tiny_vl import picture
from zagent.errors import InputError
from zagent.images import decode_image, open_image, png, read_media

DATA = picture(8, 6)


def forms(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "ä b.png"
    file.write_bytes(DATA)
    return {
        "bytes": DATA,
        "bytearray": bytearray(DATA),
        "view": memoryview(DATA),
        "array": np.frombuffer(DATA, np.uint8),
        "path": str(file),
        "Path": file,
        "file URL": file.as_uri(),
        "data URL": "data:image/png;base64," + base64.b64encode(DATA).decode(),
        "url dict": {"url": file.as_uri()},
        "data set": {"bytes": DATA, "path": None},
        "data set by path": {"bytes": None, "path": str(file)},
    }


def test_every_form_is_read(tmp_path: Path) -> None:
    """All name the same file."""
    for form, source in forms(tmp_path).items():
        assert read_media(source) == DATA, form


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", "I;16"])
def test_a_pil_image_becomes_a_png_without_loss(mode: str) -> None:
    """Mode and pixels come back."""
    image = Image.open(io.BytesIO(DATA)).convert("L" if mode == "I;16" else mode)
    image = image.convert("I;16") if mode == "I;16" else image
    back = Image.open(io.BytesIO(read_media(image)))
    assert (back.format, back.mode) == ("PNG", mode)
    assert back.tobytes() == image.tobytes()


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "F"])
def test_a_mode_that_png_has_not_becomes_rgb(mode: str) -> None:
    """As it would in every image processor."""
    image = Image.open(io.BytesIO(DATA)).convert("L" if mode == "F" else mode).convert(mode)
    back = Image.open(io.BytesIO(png(image)))
    assert back.tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (7, "a int is no image or video"),
        (None, "a NoneType is no image"),
        (np.zeros((2, 2), np.uint8), "a ndarray is no image"),
        (np.zeros(4, np.float32), "a ndarray is no image"),
        ({"blob": 1}, "a dict with the keys blob names no image"),
        ({}, r"a dict with the keys \(none\)"),
        ("/no/such.png", "/no/such.png cannot be read: No such file"),
        ("/", "/ cannot be read: Is a directory"),
        ("file:///no/such.png", "/no/such.png cannot be read"),
        ("a\0b", "cannot be read: embedded null byte"),
        ("https://example.org/a.png", "'https://example.org/a.png' is not fetched"),
        ({"url": "HTTP://example.org/a.png"}, "is not fetched"),
        ("data:image/png,abc", "is no base64 data: URL"),
        ("data:image/png;base64", "is no base64 data: URL"),
        ("data:image/png;base64,ab!", "is no base64: "),
    ],
)
def test_what_is_none_is_named(source: Any, text: str) -> None:
    """The error says what it got, and of a file which."""
    with pytest.raises(InputError, match=text):
        read_media(source)


def test_a_relative_path_is_told_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers may run in another directory than their trainer: the error names where they looked."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=str(tmp_path / "cat.png")):
        read_media("cat.png")


@pytest.mark.parametrize("data", [b"", b"no picture", DATA[:20]])
def test_bytes_of_no_image(data: bytes) -> None:
    """Told by the head already, with their number."""
    with pytest.raises(InputError, match=f"an image of {len(data)} bytes cannot be read"):
        open_image(data)


def test_an_image_cut_off_is_found_when_it_is_decoded() -> None:
    """Its head is fine."""
    data = picture(64, 64)[:4000]
    assert open_image(data).size == (64, 64)
    with pytest.raises(InputError, match="an image of 4000 bytes cannot be read: image file is truncated"):
        decode_image(data)


def test_without_pillow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow is an extra."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"pip install 'zagent\[vision\]'"):
        open_image(DATA)


def test_pillow_is_loaded_with_the_first_image() -> None:
    """Importing the loops and what they need of images loads neither Pillow nor torch."""
    code = (
        "import sys, zagent.loops.single_turn, zagent.loops.vision_processor, zagent.trainer.rows as rows\n"
        "rows.plain([1, 'x'])\n"
        "zagent.loops.vision_processor.VisionProcessor('nowhere', 'qwen3_vl', 1)\n"
        "print([name for name in ('PIL', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
