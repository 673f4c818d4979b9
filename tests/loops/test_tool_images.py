"""Tools that answer with pictures: they join the conversation with their tokens, or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import zagent
from support.scripted_llm import ScriptedLLM
from support.tiny_vl import IMAGE_PAD, picture, vl_directory, vl_tokenizer
from zagent.config import MultiTurnConfig, RolloutConfig
from zagent.errors import InputError
from zagent.loops.base import TrainerConfig
from zagent.loops.tool import ToolAgentLoop
from zagent.loops.tools import Toolbox
from zagent.loops.vision_processor import VisionProcessor
from zagent.loops.vision_tokens import VisionTokens
from zagent.types import AgentLoopOutput, TokenOutput

#: Of four and of six tokens.
SMALL, WIDE = picture(64, 64, 1), picture(96, 64, 2)
CALL = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'


@zagent.tool
def look() -> zagent.ToolResponse:
    """Take a photograph."""
    return zagent.ToolResponse(text="a photograph", image=[WIDE, SMALL])


@zagent.tool
def glimpse() -> zagent.ToolResponse:
    """Take a broken photograph."""
    return zagent.ToolResponse(text="a photograph", image=[WIDE[:500]])


class Seeing(ScriptedLLM):
    """Expands what it is sent, as an engine does."""

    def __init__(self, processor: VisionProcessor, *answers: str) -> None:
        super().__init__(vl_tokenizer(), *answers)
        self.processor = processor
        self.images: list[list[bytes]] = []

    async def generate(self, request_id: str, prompt_ids: Any, params: Any, image_data: Any = None) -> TokenOutput:
        output = await super().generate(request_id, prompt_ids, params)
        self.images.append(image_data)
        expanded = VisionTokens(self.processor).expand(prompt_ids, image_data).ids
        output.extra_fields["prompt_token_ids"] = expanded
        return output


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> VisionProcessor:
    return VisionProcessor(vl_directory(tmp_path_factory.mktemp("vl") / "model"), "qwen3_vl", IMAGE_PAD)


def run(processor: VisionProcessor, *answers: str, response_length: int = 300) -> tuple[AgentLoopOutput, Seeing]:
    turns = MultiTurnConfig(tools=(f"{__name__}.look", f"{__name__}.glimpse"), tools_in_template=False)
    rollout = RolloutConfig(prompt_length=100, response_length=response_length, multi_turn=turns)
    llm = Seeing(processor, *answers)
    loop = ToolAgentLoop(TrainerConfig(rollout), llm, llm.tokenizer, processor)  # type: ignore[arg-type]
    loop.tools = Toolbox.load(turns)
    content = [{"type": "image", "image": SMALL}, {"type": "text", "text": "look"}]
    return asyncio.run(loop.run({}, raw_prompt=[{"role": "user", "content": content}])), llm


def test_pictures_of_a_tool_join_with_their_tokens(processor: VisionProcessor) -> None:
    """The next call is sent one placeholder each, and all images so far; the trainer gets all tokens, unsampled."""
    output, llm = run(processor, CALL % "look", "I see")
    assert llm.images == [[SMALL], [SMALL, WIDE, SMALL]]
    assert [asked.seen.count(IMAGE_PAD) for asked in llm.asked] == [1, 3]
    spans = output.extra_fields["image_spans"]
    assert (spans[:, 1] - spans[:, 0]).tolist() == [4, 6, 4]
    ids = [*output.prompt_ids, *output.response_ids]
    assert all(ids[start:end] == [IMAGE_PAD] * (end - start) for start, end in spans)
    start, end = spans[1][0] - len(output.prompt_ids), spans[2][1] - len(output.prompt_ids)
    assert sum(output.response_mask[start:end]) == 0
    assert output.response_mask[-1] == 1
    assert output.extra_fields["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 6], [1, 4, 4]]
    assert output.multi_modal_data == {"images": [SMALL, WIDE, SMALL]}


def test_pictures_that_do_not_fit_join_not_at_all(processor: VisionProcessor) -> None:
    """Counted as expanded: one token less than they need, and neither tokens nor images nor the message are added."""
    whole, _ = run(processor, CALL % "look", "x")
    needed = len(whole.response_ids) - 2  # without the answer "x" and its stop token
    exact, _ = run(processor, CALL % "look", response_length=needed)
    short, _ = run(processor, CALL % "look", response_length=needed - 1)
    assert len(exact.extra_fields["image_spans"]) == len(exact.multi_modal_data["images"]) == 3
    assert len(short.extra_fields["image_spans"]) == len(short.multi_modal_data["images"]) == 1
    assert sum(short.response_mask) == len(short.response_ids)


def test_a_broken_picture_fails_the_row(processor: VisionProcessor) -> None:
    """Named by its place in the message that the tool gave."""
    with pytest.raises(InputError, match="message 0, part 0: an image of 500 bytes cannot be read"):
        run(processor, CALL % "glimpse", "x")
