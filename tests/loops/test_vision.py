"""Images in messages and among tokens: found, expanded by position, sent collapsed, checked, handed to the trainer."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from support.scripted_llm import ScriptedLLM
from support.tiny_vl import IMAGE_PAD, picture, vl_directory, vl_tokenizer
from zagent.config import RolloutConfig
from zagent.errors import ConfigError, EngineError, InputError, InvalidRequest, PromptTooLong
from zagent.loops.base import TrainerConfig
from zagent.loops.single_turn import SingleTurnAgentLoop
from zagent.loops.vision import expand_images, process_vision_info
from zagent.loops.vision_processor import VisionProcessor
from zagent.loops.vision_tokens import VisionTokens
from zagent.types import TokenOutput

PAD = 9
ONE, TWO = picture(64, 64, 1), picture(96, 64, 2)


class Counting:
    """An image is one byte: the number of its tokens."""

    image_token_id = PAD

    def count_tokens(self, image: bytes) -> int:
        return image[0]

    def inputs(self, images: Sequence[bytes]) -> dict[str, np.ndarray]:
        return {"image_grid_thw": np.array([[1, 1, image[0]] for image in images])}


def images(*counts: int) -> list[bytes]:
    return [bytes([count]) for count in counts]


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


# ---- messages -------------------------------------------------------------------------------------------------------


def test_images_and_videos_come_in_order_of_appearance() -> None:
    """Over messages and parts, of both spellings; text stays where it is."""
    messages = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [part("image", image=TWO), part("text", text="and"), part("image_url", image_url=ONE)],
        },
        {"role": "assistant", "content": None},
        {"role": "tool", "content": (part("video", video=b"film"), part("image", url=ONE), part("audio", audio=b"a"))},
        {"role": "user", "content": [part("video_url", video_url=b"second"), "loose text"]},
    ]
    assert process_vision_info(messages) == {"images": [TWO, ONE, ONE], "videos": [b"film", b"second"]}


def test_messages_without_any() -> None:
    """None, as verl has it, not an empty list."""
    assert process_vision_info([{"role": "user", "content": "hi"}]) == {"images": None, "videos": None}


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (part("image", image=b"x"), "message 1, part 1: an image of 1 bytes cannot be read"),
        (part("image", image=ONE[:4000]), "message 1, part 1: an image of 4000 bytes cannot be read: .*truncated"),
        (part("image"), "message 1, part 1: image without any"),
        (part("video", video="/no/such.mp4"), "message 1, part 1: /no/such.mp4 cannot be read"),
    ],
)
def test_one_that_cannot_be_read_is_named_by_its_place(bad: dict[str, Any], text: str) -> None:
    """Message and part, counted from 0."""
    messages = [{"role": "user", "content": [part("image", image=ONE)]}, {"content": [part("image", image=ONE), bad]}]
    with pytest.raises(InputError, match=text):
        process_vision_info(messages)


def test_videos_are_refused_where_tokens_must_be_exact() -> None:
    """SGLang writes their prompts anew."""
    messages = [{"role": "user", "content": [part("video", video=b"film")]}]
    with pytest.raises(InputError, match="videos in messages cannot be trained on"):
        asyncio.run(expand_images(VisionTokens(Counting()), [1], messages))


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_each_placeholder_becomes_its_images_tokens() -> None:
    """In order; everything else stays."""
    piece = VisionTokens(Counting()).expand([1, PAD, 2, 3, PAD], images(3, 1))
    assert piece.ids.tolist() == [1, PAD, PAD, PAD, 2, 3, PAD]
    assert piece.ids.dtype == piece.spans.dtype == np.int32
    assert piece.spans.tolist() == [[1, 4], [6, 7]]


@pytest.mark.parametrize(("ids", "count"), [([1, PAD], 0), ([1], 1), ([PAD, 1], 2), ([PAD, 1, PAD], 1)])
def test_placeholders_and_images_must_agree(ids: list[int], count: int) -> None:
    """Both numbers are named."""
    with pytest.raises(InvalidRequest, match=rf"{ids.count(PAD)} image placeholders \(token id 9\) for {count} images"):
        VisionTokens(Counting()).expand(ids, images(*[2] * count))


def test_a_model_without_eyes() -> None:
    """Takes text as it is, whatever its ids, refuses images, and gives the trainer nothing to look at."""
    blind = VisionTokens(None)
    piece = blind.expand([1, PAD, 2], None)
    blind.add(piece, 0)
    sent, sent_images = blind.sendable(piece.ids)
    blind.check(piece.ids, TokenOutput([1]))
    assert (piece.ids.tolist(), sent.tolist(), sent_images) == ([1, PAD, 2], [1, PAD, 2], None)
    assert (blind.extra_fields(), blind.multi_modal_data()) == ({}, None)
    with pytest.raises(InvalidRequest, match="1 images for a model that takes none"):
        blind.expand([1], images(1))


def test_a_row_without_images_of_a_model_with_eyes() -> None:
    """Says so by empty spans, so that its positions have the form of its siblings'."""
    vision = VisionTokens(Counting())
    vision.add(vision.expand([1, 2], None), 0)
    assert {key: value.shape for key, value in vision.extra_fields().items()} == {"image_spans": (0, 2)}
    assert vision.multi_modal_data() is None


counts = st.lists(st.integers(1, 5), max_size=4)


@given(st.lists(st.tuples(st.lists(st.integers(0, 12), max_size=5), counts), min_size=1, max_size=4))
def test_what_is_sent_and_what_is_trained(pieces: list[tuple[list[int], list[int]]]) -> None:
    """Prompt, then pieces inserted after sampled tokens, which may be placeholders by accident: the engine is sent what
    was rendered and sampled, and the spans lie on the images' tokens."""
    vision, rendered, trained = VisionTokens(Counting()), np.empty(0, np.int32), np.empty(0, np.int32)
    for sampled, sizes in pieces:
        ids = np.array([i for _ in sizes for i in (1, PAD, 2)], np.int32)
        piece = vision.expand(ids, images(*sizes))
        vision.add(piece, len(trained))
        rendered = np.concatenate([rendered, ids, np.array(sampled, np.int32)])
        trained = np.concatenate([trained, piece.ids, np.array(sampled, np.int32)])
    sent, sent_images = vision.sendable(trained)
    assert sent.tolist() == rendered.tolist()
    assert (sent_images or []) == images(*(size for _, sizes in pieces for size in sizes))
    for (start, end), image in zip(vision.extra_fields()["image_spans"], sent_images or [], strict=True):
        assert trained[start:end].tolist() == [PAD] * image[0]
        assert (trained[start - 1], trained[end]) == (1, 2)


def answered(ids: Sequence[int] | None) -> TokenOutput:
    return TokenOutput([1], extra_fields={} if ids is None else {"prompt_token_ids": np.array(ids, np.int32)})


@pytest.mark.parametrize(
    ("used", "text"),
    [
        (None, "did not return"),
        ([1, PAD, 2], "3 in all, not 4"),
        ([1, PAD, PAD, 3], "3 at position 3, not 2"),
    ],
)
def test_an_engine_that_expands_otherwise_is_found_out(used: Sequence[int] | None, text: str) -> None:
    """The difference is named."""
    vision = VisionTokens(Counting())
    piece = vision.expand([1, PAD, 2], images(2))
    vision.add(piece, 0)
    with pytest.raises(EngineError, match=text):
        vision.check(piece.ids, answered(used))
    vision.check(piece.ids, answered(piece.ids.tolist()))


# ---- the processor --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> VisionProcessor:
    directory = vl_directory(tmp_path_factory.mktemp("vl") / "model")
    return VisionProcessor(directory, "qwen3_vl", IMAGE_PAD)


@pytest.mark.parametrize("size", [(64, 64), (1, 1), (97, 33), (700, 300), (3, 500)])
def test_tokens_are_counted_from_the_head_as_the_processor_makes_them(
    processor: VisionProcessor, size: tuple[int, int]
) -> None:
    """One per 2 x 2 patches of what the image is scaled to."""
    inputs = processor.inputs([picture(*size)])
    assert processor.count_tokens(picture(*size)) == inputs["image_grid_thw"].prod() // 4
    assert inputs["pixel_values"].shape == (inputs["image_grid_thw"].prod(), 3 * 2 * 16 * 16)
    assert {key: value.dtype.name for key, value in inputs.items()} == {
        "pixel_values": "float32",
        "image_grid_thw": "int64",
    }


def test_pixel_values_are_those_of_pillow(processor: VisionProcessor) -> None:
    """Scaled by Pillow to a multiple of 32 pixels, then to [−1, 1], cut into patches of 16 x 16, four that become one
    token after each other, and each twice (as if in time)."""
    data = picture(90, 70)
    inputs = processor.inputs([data])
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 6]]
    scaled = np.asarray(Image.open(io.BytesIO(data)).resize((96, 64), Image.Resampling.BICUBIC), np.float32)
    expected = scaled / 127.5 - 1
    values = inputs["pixel_values"].reshape(2, 3, 2, 2, 3, 2, 16, 16)  # rows, columns, 2 x 2 in them, colours, time
    for y, x, dy, dx in np.ndindex(2, 3, 2, 2):
        top, left = 16 * (2 * y + dy), 16 * (2 * x + dx)
        patch = expected[top : top + 16, left : left + 16].transpose(2, 0, 1)
        assert np.abs(values[y, x, dy, dx] - patch[:, None]).max() < 1e-6


def test_a_strip_is_refused(processor: VisionProcessor) -> None:
    """The Qwen-VL families take no side of more than 200 times the other."""
    with pytest.raises(InputError, match="an image of 2 x 500 pixels"):
        processor.count_tokens(picture(2, 500))


def test_a_model_without_an_image_processor(tmp_path: Path) -> None:
    """Named, at the first image."""
    with pytest.raises(ConfigError, match=f"model.path='{tmp_path}': no image processor can be loaded"):
        VisionProcessor(str(tmp_path), "qwen3_vl", 1).count_tokens(ONE)


# ---- single_turn_agent ----------------------------------------------------------------------------------------------


def single_turn(processor: Any, content: Any, prompt_length: int = 60, overflow: str = "error") -> tuple[Any, Any]:
    """The row's output, and the engine."""
    tokenizer = vl_tokenizer()

    class Engine(ScriptedLLM):
        async def generate(self, request_id: str, prompt_ids: Any, params: Any, image_data: Any = None) -> TokenOutput:
            self.images = image_data
            output = await super().generate(request_id, prompt_ids, params)
            if image_data:
                expanded = VisionTokens(processor).expand(prompt_ids, image_data).ids
                output.extra_fields["prompt_token_ids"] = expanded
            return output

    engine = Engine(tokenizer, "yes")
    rollout = RolloutConfig(prompt_length=prompt_length, response_length=8, prompt_overflow=overflow)
    loop = SingleTurnAgentLoop(TrainerConfig(rollout), engine, tokenizer, processor)  # type: ignore[arg-type]
    return asyncio.run(loop.run({}, raw_prompt=[{"role": "user", "content": content}])), engine


def test_single_turn_with_images(processor: VisionProcessor) -> None:
    """Sent with one placeholder each, trained with all their tokens, with what the model saw and the images beside."""
    output, engine = single_turn(
        processor, [part("image", image=TWO), part("text", text="?"), part("image", image=ONE)]
    )
    sent = list(engine.asked[0].prompt)
    assert sent.count(IMAGE_PAD) == 2
    assert list(output.prompt_ids).count(IMAGE_PAD) == 6 + 4
    assert len(output.prompt_ids) == len(sent) + 5 + 3
    spans = output.extra_fields["image_spans"]
    assert [list(output.prompt_ids[start:end]) for start, end in spans] == [[IMAGE_PAD] * 6, [IMAGE_PAD] * 4]
    assert output.extra_fields["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 4, 6], [1, 4, 4]]
    assert output.multi_modal_data == {"images": [TWO, ONE]} and engine.images == [TWO, ONE]
    assert output.extra_fields["response_text"] == "yes"


def test_single_turn_of_text_with_a_model_with_eyes(processor: VisionProcessor) -> None:
    """No image is sent, and none invented."""
    output, engine = single_turn(processor, "?")
    assert engine.images is None and output.multi_modal_data is None
    assert output.extra_fields["image_spans"].shape == (0, 2)
    assert "multi_modal_inputs" not in output.extra_fields


@pytest.mark.parametrize("overflow", ["error", "left"])
def test_a_prompt_with_images_never_loses_its_head(processor: VisionProcessor, overflow: str) -> None:
    """Beyond `rollout.prompt_length`, images counted, the row fails whatever `prompt_overflow` says."""
    content = [part("image", image=TWO)]
    length = len(single_turn(processor, content)[0].prompt_ids)
    single_turn(processor, content, length, overflow)
    with pytest.raises(PromptTooLong, match=f"prompt of {length} tokens exceeds rollout.prompt_length={length - 1}"):
        single_turn(processor, content, length - 1, overflow)
