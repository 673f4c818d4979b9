"""Rows with images through a worker, on simulated engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.cluster_in_memory import Cluster
from support.tiny_vl import IMAGE_PAD, VOCAB_SIZE, picture, vl_directory, vl_tokenizer
from zagent.config import ModelConfig, RolloutConfig
from zagent.errors import from_wire
from zagent.loops.base import TrainerConfig
from zagent.loops.vision_processor import VisionProcessor
from zagent.worker.runner import AgentLoopWorker
from zagent.worker.server import _processor

#: Becomes four tokens.
SMALL = picture(64, 64)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> VisionProcessor:
    made = _processor(ModelConfig(path=vl_directory(tmp_path_factory.mktemp("vl") / "model")))
    assert made is not None
    return made


def outcome(processor: VisionProcessor, agent: str, images: int = 1, tokens: int = 4, **row: Any) -> dict[str, Any]:
    """Of a row with ``images`` pictures, on an engine that makes ``tokens`` of each."""
    import support.picture_loop  # noqa: F401 - registers its loop

    content = [*[{"type": "image", "image": SMALL}] * images, {"type": "text", "text": "?"}]
    made = {
        "index": 0,
        "uid": "u",
        "sample": 0,
        "agent_name": agent,
        "trajectory": {},
        "kwargs": {"raw_prompt": [{"role": "user", "content": content}], **row},
        "sampling_params": {"max_new_tokens": 6, "logprobs": True},
        "seed_key": [0, -1, False, "0", 0],
    }

    async def main() -> dict[str, Any]:
        async with Cluster() as cluster:
            sim = {"vocab_size": VOCAB_SIZE, "image_token_id": IMAGE_PAD, "tokens_per_image": tokens}
            await cluster.engine(**sim, kv_capacity_tokens=0)
            rollout = RolloutConfig(prompt_length=60, response_length=50)
            worker = AgentLoopWorker(
                await cluster.caller(), vl_tokenizer(), TrainerConfig(rollout), processor=processor
            )
            return await worker.run(made)

    return asyncio.run(main())  # not on virtual time: tokenizer and images have threads


def test_single_turn(processor: VisionProcessor) -> None:
    """The trained prompt is the expanded one, and so are the tokens that are counted; inputs and images come along."""
    made = outcome(processor, "single_turn_agent", images=2)
    assert made["status"] == "ok"
    output, fields = made["output"], made["output"]["extra_fields"]
    assert (output["prompt_ids"] == IMAGE_PAD).sum() == 8
    assert fields["prompt_tokens"] == len(output["prompt_ids"])
    assert fields["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 4, 4]] * 2
    assert output["multi_modal_data"] == {"images": [SMALL, SMALL]}


def test_an_image_between_two_turns(processor: VisionProcessor) -> None:
    """It joins with its tokens, unsampled; both calls and both images are told of."""
    reply = {"role": "user", "content": [{"type": "image", "image": SMALL}]}
    made = outcome(processor, "second_picture", reply=reply, turn_tokens=5)
    assert made["status"] == "ok", from_wire(made["error"])
    output = made["output"]
    start, end = output["extra_fields"]["image_spans"][1] - len(output["prompt_ids"])
    assert output["response_ids"][start:end].tolist() == [IMAGE_PAD] * 4
    assert output["response_mask"].sum() == 10 and output["response_mask"][start:end].sum() == 0
    assert len(output["multi_modal_data"]["images"]) == len(output["extra_fields"]["image_spans"]) == 2


def test_an_engine_that_expands_otherwise_fails_the_row(processor: VisionProcessor) -> None:
    """What was sampled does not follow what would be trained on."""
    error = from_wire(outcome(processor, "single_turn_agent", tokens=5)["error"])
    assert type(error).__name__ == "EngineError"
    assert "expanded the prompt's images to other tokens than we" in str(error)


def test_an_image_beyond_the_response_fails_the_row(processor: VisionProcessor) -> None:
    """A loop of one's own may have put it there; collate would cut its tokens off."""
    from zagent.loops.registry import register
    from zagent.types import AgentLoopOutput

    @register("too_late")
    class TooLate:
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
            fields = {"image_spans": np.array([[51, 52]]), "multi_modal_inputs": {"image_grid_thw": [[1, 2, 2]]}}
            return AgentLoopOutput(prompt_ids=[1], response_ids=[2] * 60, response_mask=[1] * 60, extra_fields=fields)

    error = from_wire(outcome(processor, "too_late")["error"])
    assert str(error) == "agent loop 'too_late': an image at tokens 51 to 52, after 0 of 51"


def test_a_model_without_eyes_has_no_processor(tmp_path: Path) -> None:
    """Its workers load nothing for images, and refuse them."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert _processor(ModelConfig(path=str(tmp_path))) is None
