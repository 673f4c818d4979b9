"""Images through a whole cluster with a real SGLang engine: what a trainer gets is what the engine saw."""

from __future__ import annotations

import asyncio
import base64
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zagent
from support.tiny_vl import IMAGE_PAD, picture, saved_vl

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

P, R = 160, 96
SMALL, WIDE, PHOTO = picture(64, 64, 1), picture(150, 70, 2), picture(200, 100, 3, "JPEG")
SMALL_TOKENS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_vl(tmp_path_factory.mktemp("vl") / "model")


@pytest.fixture(scope="module")
def manager(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zagent.AgentLoopManager]:
    """One engine on the CPU, one worker."""
    overrides = [
        *(f"model.path={model}", f"logs.dir={tmp_path_factory.mktemp('logs')}", "engine.count=1", "worker.count=1"),
        *(f"rollout.prompt_length={P}", f"rollout.response_length={R}", "rollout.max_failed_fraction=1"),
        *("rollout.imports=[support.picture_loop]", "engine.args.max_total_tokens=8192"),
    ]
    with zagent.AgentLoopManager.launch(zagent.Config.load(overrides=overrides)) as manager:
        yield manager


class Judge:
    """A float32 forward over the tensors and inputs of a batch, as a trainer would do it."""

    def __init__(self, path: str) -> None:
        import torch
        from transformers import Qwen3VLForConditionalGeneration

        self.torch = torch
        self.model: Any = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()

    def error(self, out: zagent.DataProto, row: int, positions: Any = None, images: Any = None) -> float:
        """The largest difference of the row's log-probabilities to the engine's; with other ``positions`` [3, P+R] or
        ``images`` than the batch's."""
        torch, batch = self.torch, out.batch
        given = images or out.non_tensor_batch.get("multi_modal_inputs", [None] * len(out))[row] or {}
        positions = batch["position_ids"][row, 1:] if positions is None else positions
        with torch.no_grad():
            logits = self.model(
                input_ids=batch["input_ids"][row : row + 1],
                attention_mask=batch["attention_mask"][row : row + 1],
                position_ids=positions.unsqueeze(1),
                **{key: torch.from_numpy(np.array(value)) for key, value in given.items()},
            ).logits[0]
        steps = torch.log_softmax(logits[P - 1 : -1], dim=-1)
        found = steps.gather(1, batch["responses"][row].unsqueeze(1))[:, 0]
        sampled = batch["response_mask"][row].bool()
        return float((found - batch["rollout_log_probs"][row])[sampled].abs().max())


@pytest.fixture(scope="module")
def judge(model: str) -> Judge:
    return Judge(model)


def user(*images: Any, text: str = "What is this?") -> dict[str, Any]:
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def generate(manager: zagent.AgentLoopManager, *prompts: dict[str, Any], **columns: Sequence[Any]) -> zagent.DataProto:
    rows = {"raw_prompt": [[prompt] for prompt in prompts], **columns}
    return manager.generate_sequences(zagent.DataProto(non_tensor_batch=rows))


@pytest.fixture(scope="module")
def batch(manager: zagent.AgentLoopManager) -> zagent.DataProto:
    """Single turns with 0, 1, 3, 1 and 2 images."""
    return generate(manager, user(), user(SMALL), user(WIDE, SMALL, PHOTO), user(WIDE), user(SMALL, PHOTO))


def test_a_trainer_can_use_the_batch_as_it_is(batch: zagent.DataProto, judge: Judge) -> None:
    """Log-probabilities are within 1e-3 of a forward over the batch's own ids, masks, positions and images, for rows
    with none, one and several of these."""
    assert list(batch.non_tensor_batch["error"]) == [None] * 5
    assert tuple(batch.batch["position_ids"].shape) == (5, 4, P + R)
    assert batch.batch["response_mask"].sum(dim=1).min() >= 8
    assert max(judge.error(batch, row) for row in range(5)) < 1e-3


def test_the_comparison_notices_what_is_wrong(batch: zagent.DataProto, judge: Judge) -> None:
    """Positions as of text, and images in another order, are far off."""
    as_text = batch.batch["position_ids"][2, :1].expand(3, -1)
    assert judge.error(batch, 2, positions=as_text) > 0.01
    inputs = batch.non_tensor_batch["multi_modal_inputs"][2]
    moved = {**inputs, "pixel_values": np.roll(inputs["pixel_values"], 4, axis=0)}
    assert judge.error(batch, 2, images=moved) > 0.01


def test_ids_are_expanded(batch: zagent.DataProto) -> None:
    """The trained prompt has a run of placeholders per image, of as many tokens as its patches merge to."""
    spans, start = batch.non_tensor_batch["image_spans"][2], P - int(batch.batch["attention_mask"][2, :P].sum())
    grids = batch.non_tensor_batch["multi_modal_inputs"][2]["image_grid_thw"]
    assert (spans[:, 1] - spans[:, 0]).tolist() == (grids.prod(axis=1) // 4).tolist() == [10, SMALL_TOKENS, 18]
    expected = np.zeros(P, bool)
    for first, end in spans:
        expected[start + first : start + end] = True
    assert np.array_equal(batch.batch["prompts"][2].numpy() == IMAGE_PAD, expected)


def test_an_image_may_be_given_in_any_form(manager: zagent.AgentLoopManager, tmp_path: Path) -> None:
    """Bytes, a PIL image, a path and a data: URL of one picture become the same inputs."""
    from PIL import Image

    (tmp_path / "a b.png").write_bytes(WIDE)
    url = "data:image/png;base64," + base64.b64encode(WIDE).decode()
    forms = [WIDE, Image.open(io.BytesIO(WIDE)), str(tmp_path / "a b.png"), (tmp_path / "a b.png").as_uri()]
    as_url = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    out = generate(manager, *map(user, forms), as_url)
    assert list(out.non_tensor_batch["error"]) == [None] * 5
    first, *others = (inputs["pixel_values"] for inputs in out.non_tensor_batch["multi_modal_inputs"])
    assert all(np.array_equal(first, other) for other in others)


def test_an_image_between_two_turns(manager: zagent.AgentLoopManager, judge: Judge) -> None:
    """It is trained on like those of the prompt: ids, positions and inputs fit, and its tokens are not sampled ones."""
    prompts, replies = [user(SMALL), user(), user(WIDE)], [user(PHOTO), user(SMALL, WIDE), user()]
    out = generate(manager, *prompts, reply=replies, turn_tokens=[12] * 3, agent_name=["second_picture"] * 3)
    assert list(out.non_tensor_batch["error"]) == [None] * 3
    assert max(judge.error(out, row) for row in range(3)) < 1e-3
    for row, counts in enumerate([(4, 18), (4, 10), (10,)]):
        spans = out.non_tensor_batch["image_spans"][row]
        assert tuple(spans[:, 1] - spans[:, 0]) == counts
    is_image = out.batch["responses"] == IMAGE_PAD
    assert is_image.sum(dim=1).tolist() == [18, 14, 0]
    assert out.batch["response_mask"][is_image].sum() == 0
    assert out.batch["response_mask"].sum(dim=1).min() > 12  # both turns were sampled


def test_bad_images_end_their_row_only(manager: zagent.AgentLoopManager) -> None:
    """Each is named, with the place where it is; their siblings are answered."""
    prompts = [
        user(SMALL, b"no picture"),
        user(SMALL[: len(SMALL) // 2]),
        user("https://example.org/cat.png"),
        user("/no/such/file.png"),
        user(SMALL, text="<|image_pad|>"),
        user(*[picture(500, 500)] * 3),
        {"role": "user", "content": [{"type": "video", "video": b"film"}]},
        user(SMALL),
    ]
    *errors, last = generate(manager, *prompts).non_tensor_batch["error"]
    assert last is None
    for error, text in zip(
        errors,
        [
            r"InputError: message 0, part 1: an image of 10 bytes cannot be read",
            r"InputError: message 0, part 0: an image of \d+ bytes cannot be read",
            r"InputError: message 0, part 0: 'https://example.org/cat.png' is not fetched",
            r"InputError: message 0, part 0: /no/such/file.png cannot be read: No such file",
            r"InvalidRequest: 2 image placeholders \(token id 261\) for 1 images",
            r"PromptTooLong: prompt of \d+ tokens exceeds rollout.prompt_length=160 \(its images count\)",
            r"InputError: videos in messages cannot be trained on",
        ],
        strict=True,
    ):
        assert re.match(text, error), f"{error!r} is not like {text!r}"


@pytest.fixture(scope="module")
def ask(manager: zagent.AgentLoopManager) -> Iterator[Callable[..., zagent.TokenOutput]]:
    """Calls the engine directly."""
    with asyncio.Runner() as runner:

        def ask(ids: list[int], images: list[bytes]) -> zagent.TokenOutput:
            call = manager.server_manager.generate("s", ids, {"max_new_tokens": 4, "logprobs": True}, images)
            return runner.run(call)

        ask([1], [])  # the link to the broker, which all tests share
        yield ask


@pytest.mark.parametrize(
    ("ids", "images", "text"),
    [
        ([1, IMAGE_PAD, 2], [SMALL, WIDE], r"1 image placeholders \(token id 261\) for 2 images"),
        ([1, IMAGE_PAD, 2, IMAGE_PAD], [SMALL], "2 image placeholders .* one that the model sampled counts, too"),
        ([1, *[IMAGE_PAD] * SMALL_TOKENS, 2], [SMALL], "4 image placeholders .* they are sent unexpanded"),
        ([1, IMAGE_PAD, 2], [], "1 image placeholders .* for 0 images"),
        ([1, 262, 2], [], "1 video placeholders"),
        ([1, IMAGE_PAD, 2], [b"no picture"], "(?i)image"),
    ],
    ids=["too few", "sampled", "expanded", "none", "video", "unreadable"],
)
def test_the_engine_refuses(ask: Callable[..., Any], ids: list[int], images: list[bytes], text: str) -> None:
    """What SGLang would take in silence or hang on ends that call only, at once, and says both numbers."""
    with pytest.raises(zagent.InvalidRequest, match=text):
        ask(ids, images)
    output = ask([1, IMAGE_PAD, 2], [SMALL])
    assert output.extra_fields["prompt_token_ids"].tolist() == [1, *[IMAGE_PAD] * SMALL_TOKENS, 2]
    assert output.extra_fields["prompt_token_ids"].dtype == np.int32
    assert len(output.token_ids) == 4
