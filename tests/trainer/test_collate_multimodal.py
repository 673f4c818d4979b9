"""Positions of rows with images equal transformers' own; multimodal inputs reach the trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.tiny_vl import IMAGE_PAD, vl_config
from zagent.errors import InputError
from zagent.rope import rope_index
from zagent.trainer.collate import collate
from zagent.types import AgentLoopOutput, Outcome

P, R = 24, 40
#: Patches in time, height and width -> a quarter as many tokens.
GRIDS = {6: [1, 4, 6], 4: [1, 2, 8], 1: [1, 2, 2], 16: [1, 8, 8]}


def row(index: int, prompt: list[int], response: list[int], **changes: Any) -> Outcome:
    """A row of tokens 1, with an image of n tokens for each number n > 1 in ``prompt`` and ``response``."""
    spans: list[list[int]] = []
    ids: list[list[int]] = [[], []]
    for part, items in zip(ids, (prompt, response), strict=True):
        for item in items:
            start = len(part) if part is ids[0] else len(ids[0]) + len(part)
            if item > 1:
                spans.append([start, start + item])
            part.extend([IMAGE_PAD] * item if item > 1 else [1])
    sizes = [item for item in (*prompt, *response) if item > 1]
    fields: dict[str, Any] = {"image_spans": np.array(spans, np.int32).reshape(-1, 2)}
    if sizes:
        fields["multi_modal_inputs"] = {"image_grid_thw": np.array([GRIDS[size] for size in sizes])}
    output = AgentLoopOutput(
        prompt_ids=ids[0],
        response_ids=ids[1],
        response_mask=[int(i == 1) for i in ids[1]],
        extra_fields={**fields, **changes},
    )
    return Outcome(index, index, 0, "ok", output)


def padded(outcomes: list[Outcome], response_length: int = R) -> Any:
    return collate(outcomes, prompt_length=P, response_length=response_length)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "qwen2_vl"])
def model(request: pytest.FixtureRequest) -> Any:
    """transformers' model of each family, for its `get_rope_index`."""
    from transformers import AutoModel

    return AutoModel.from_config(vl_config(request.param))


def expected(model: Any, out: Any) -> Any:
    """What transformers says of the whole padded batch, [B, 3, P+R]; its images are told by their positions only."""
    import torch

    types = torch.zeros_like(out.batch["input_ids"])
    grids = []
    for i, spans in enumerate(out.non_tensor_batch["image_spans"]):
        left = P - int(out.batch["attention_mask"][i, :P].sum())
        for start, end in spans if spans is not None else ():
            types[i, left + start : left + end] = 1
        grids.extend((out.non_tensor_batch["multi_modal_inputs"][i] or {}).get("image_grid_thw", []))
    positions, _ = model.get_rope_index(
        out.batch["input_ids"],
        mm_token_type_ids=types,
        image_grid_thw=torch.tensor(np.array(grids)),
        attention_mask=out.batch["attention_mask"],
    )
    return positions.transpose(0, 1)


def test_positions_equal_transformers(model: Any) -> None:
    """Several images in prompt and response, padding left and right, an image at either end of its row, a row without
    images, a sampled placeholder: rows 1 to 3 are `get_rope_index`, row 0 counts as for text."""
    sampled = row(3, [1, 4, 1], [1, 1])
    assert sampled.output is not None
    sampled.output.response_ids[1] = IMAGE_PAD
    outcomes = [
        row(0, [1, 1, 6, 1], [1, 1, 1]),
        row(1, [1, 4, 1, 6, 1, 1], [1, 16, 1, 1, 1, 6, 1]),
        row(2, [1, 1, 1], [1] * R),
        sampled,
        row(4, [16, 1], [1, 6]),
    ]
    out = padded(outcomes)
    assert tuple(out.batch["position_ids"].shape) == (5, 4, P + R)
    assert (out.batch["position_ids"][:, 1:] == expected(model, out)).all()
    assert out.batch["position_ids"][2, 0].tolist() == [0] * (P - 3) + list(range(3 + R))


def test_row_0_counts_as_for_text() -> None:
    """One per token, whatever it stands for; the right padding keeps the last value, as in batches of text."""
    out = padded([row(0, [1, 6, 1], [1, 4, 1])])
    assert out.batch["position_ids"][0, 0].tolist() == [0] * (P - 8) + list(range(14)) + [13] * (R - 6)
    assert out.batch["position_ids"][0, 1:, P + 6 :].abs().sum() == 0


def test_a_batch_of_text_has_one_row_of_positions() -> None:
    """[B, P+R], as ever."""
    outcome = row(0, [1, 1], [1])
    assert outcome.output is not None
    del outcome.output.extra_fields["image_spans"]
    assert tuple(padded([outcome]).batch["position_ids"].shape) == (1, P + R)


def test_failed_rows_and_rows_that_say_nothing_stand_beside(model: Any) -> None:
    """A failed row has positions 0; a row whose loop tells of no spans counts as text."""
    silent = row(2, [1, 1], [1])
    assert silent.output is not None
    silent.output.extra_fields.clear()
    out = padded([row(0, [1, 6], [1]), Outcome(1, 1, 0, "failed", error=ValueError("x")), silent])
    assert out.batch["position_ids"][1].abs().sum() == 0
    assert out.batch["position_ids"][2, 1:, P - 2 : P + 1].tolist() == [[0, 1, 2]] * 3


def test_inputs_reach_the_trainer() -> None:
    """A column of each row's own, None where there are no images."""
    out = padded([row(0, [1, 6], [1]), row(1, [1], [1])])
    inputs = out.non_tensor_batch["multi_modal_inputs"]
    assert inputs[0]["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert inputs[1] is None


def test_a_response_cut_off_behind_its_images() -> None:
    """Positions end with the tokens that are kept."""
    out = padded([row(0, [1], [1, 4, 1, 1, 1])], response_length=6)
    whole = rope_index(9, np.array([[2, 6]]), np.array([GRIDS[4]]))
    assert out.batch["position_ids"][0, 1:, P - 1 :].tolist() == whole[:, :7].tolist()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"image_spans": [[1, 6]]}, "row 7: an image of 5 tokens and 1 x 4 x 6 patches"),
        ({"image_spans": [[1, 1]]}, "row 7: an image at tokens 1 to 1, after 0 of 8"),
        ({"image_spans": [[4, 10]]}, "row 7: an image at tokens 4 to 10, after 0 of 8"),
        ({"image_spans": [[-3, 3]]}, "row 7: an image at tokens -3 to 3"),
        ({"image_spans": [[0, 6], [3, 7]]}, "row 7: image_spans of 2 images, image_grid_thw of 1"),
        ({"image_spans": [1, 7]}, r"row 7: image_spans must be an int array \[images, 2\], got int64 \[2\]"),
        ({"image_spans": [[1.0, 7.0]]}, r"row 7: image_spans must be an int array"),
        ({"multi_modal_inputs": {"image_grid_thw": [[1, 3, 8]]}}, "row 7: an image of 6 tokens and 1 x 3 x 8 patches"),
        (
            {"image_spans": [[1, 3]], "multi_modal_inputs": {"image_grid_thw": [[1, 5, 2]]}},
            "row 7: an image of 2 tokens and 1 x 5 x 2 patches",
        ),
        ({"multi_modal_inputs": {"image_grid_thw": [[4, 6]]}}, r"row 7: image_grid_thw must be .*\[images, 3\]"),
        ({"multi_modal_inputs": None}, "row 7: image_spans of 1 images, image_grid_thw of 0"),
    ],
)
def test_images_that_do_not_fit_are_refused(changes: dict[str, Any], text: str) -> None:
    """Tokens, patches and places must agree; the row is named."""
    with pytest.raises(InputError, match=text):
        padded([row(7, [1, 6], [1], **changes)])


def test_images_may_not_overlap() -> None:
    """The second begins where the first has ended, or later."""
    grids = np.array([GRIDS[4], GRIDS[4]])
    assert rope_index(8, np.array([[0, 4], [4, 8]]), grids).shape == (3, 8)
    with pytest.raises(InputError, match="an image at tokens 3 to 7, after 4 of 8"):
        rope_index(8, np.array([[0, 4], [3, 7]]), grids)


def test_an_image_beyond_the_cut_is_refused() -> None:
    """What the model saw of it could not be told from the tokens that are left."""
    with pytest.raises(InputError, match="row 0: an image at tokens 2 to 6, after 0 of 5"):
        padded([row(0, [1], [1, 4, 1])], response_length=4)
