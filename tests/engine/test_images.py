"""Images on their way to engines, and in simulated ones; what SGLang is told of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.cluster_in_memory import Cluster
from support.sim_engines import answer_now, started
from support.tiny_vl import IMAGE_PAD, VOCAB_SIZE, vl_directory
from support.virtual_clock import run
from zagent import models
from zagent.engine import sglang_calls as calls
from zagent.engine.base import EngineInfo, GenerateRequest, check_media
from zagent.engine.methods import read_request
from zagent.engine.server import build
from zagent.errors import InvalidRequest, PromptTooLong
from zagent.types import TokenOutput
from zagent.wire.messages import Call

PAD, FILM = 7, 8
INFO = EngineInfo(vocab_size=100, context_length=64, image_token_id=PAD, video_token_id=FILM)
BLIND = EngineInfo(vocab_size=100, context_length=64)
SIM = {"image_token_id": PAD, "tokens_per_image": 5}


def request(ids: list[int], images: list[bytes] | None = None, videos: list[bytes] | None = None) -> GenerateRequest:
    params = {"max_new_tokens": 8, "logprobs": True}
    return GenerateRequest("rid", np.array(ids, np.int32), params, images, videos)


def answer(ids: list[int], images: list[bytes] | None, **sim: Any) -> TokenOutput:
    return answer_now(run(started(**{**SIM, **sim})), request(ids, images))


# ---- the check ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            request([1, PAD], []),
            r"the prompt has 1 image placeholders \(token id 7\) for 0 images; they are sent unexp",
        ),
        (
            request([1, PAD, PAD], [b"a"]),
            "2 image placeholders .* for 1 images; .* one that the model sampled counts, too",
        ),
        (request([1], [b"a"]), "0 image placeholders .* for 1 images$"),
        (request([1, PAD], [b"a", b"b"]), "1 image placeholders .* for 2 images$"),
        (request([1, FILM, PAD], [b"a"]), r"1 video placeholders \(token id 8\) for 0 videos"),
        (request([1], None, [b"a"]), "0 video placeholders .* for 1 videos"),
    ],
)
def test_one_placeholder_per_image_and_video(call: GenerateRequest, text: str) -> None:
    """Both numbers are named; where there are too many, the two ways to get there."""
    with pytest.raises(InvalidRequest, match=text):
        check_media(call, INFO)


def test_what_fits_passes() -> None:
    """And a model without eyes takes any id."""
    check_media(request([PAD, 1, FILM, PAD], [b"a", b"b"], [b"c"]), INFO)
    check_media(request([1]), INFO)
    check_media(request([PAD, FILM]), BLIND)


@pytest.mark.parametrize(("media", "kind"), [(([b"a"], None), "images"), ((None, [b"a"]), "videos")])
def test_a_model_without_eyes_takes_none(media: Any, kind: str) -> None:
    """Whatever the placeholder."""
    with pytest.raises(InvalidRequest, match=f"this model takes no {kind}"):
        check_media(request([PAD], *media), BLIND)


# ---- simulated engines ----------------------------------------------------------------------------------------------


def test_a_simulated_engine_expands_images() -> None:
    """Each placeholder becomes `tokens_per_image`, in the ids that come back with the answer."""
    output = answer([1, PAD, 2, PAD], [b"a", b"b"])
    used = output.extra_fields["prompt_token_ids"]
    assert (used.dtype, used.tolist()) == (np.int32, [1, *[PAD] * 5, 2, *[PAD] * 5])
    assert len(output.token_ids) == 8


def test_a_call_without_images_brings_no_ids_back() -> None:
    """They are the ones that were sent."""
    assert answer([1, 2], None).extra_fields == answer([1, 2], []).extra_fields == {}


def test_the_answer_depends_on_the_images() -> None:
    """On their bytes and their order; the same again gives the same."""
    same, again, other, swapped = (
        answer([1, PAD, 2, PAD], images).token_ids.tolist()
        for images in ([b"a", b"b"], [b"a", b"b"], [b"a", b"c"], [b"b", b"a"])
    )
    assert same == again
    assert same != other != swapped != same


def test_the_prefix_cache_knows_images_apart() -> None:
    """A second turn finds the first one only with the same picture."""

    async def main() -> tuple[int, int]:
        engine = await started(**{**SIM, "tokens_per_image": 100})
        ids = [1, PAD, *[2] * 60]
        await engine.generate(request(ids, [b"a"]))
        same, other = [(await engine.generate(request(ids, [image]))).cached_tokens for image in (b"a", b"b")]
        return same, other

    assert run(main()) == (128, 0)


def test_images_count_against_the_context() -> None:
    """The prompt is as long as it is expanded."""
    answer([1, PAD], [b"a"], context_length=20, tokens_per_image=10)
    with pytest.raises(PromptTooLong, match="prompt of 19 tokens"):
        answer([1, PAD], [b"a"], context_length=20, tokens_per_image=18)
    assert len(answer([1, PAD], [b"a"], context_length=20, tokens_per_image=14).token_ids) == 4


def test_a_simulated_engine_refuses_what_sglang_would() -> None:
    """By the same check; without a placeholder it is a model without eyes."""
    with pytest.raises(InvalidRequest, match="1 image placeholders"):
        answer([1, PAD], [])
    with pytest.raises(InvalidRequest, match="this model takes no images"):
        answer([1, PAD], [b"a"], image_token_id=None)


def test_the_placeholder_is_the_models(tmp_path: Path) -> None:
    """A simulated engine of a model with eyes takes its images without being told more."""
    settings = {
        "engine": {"kind": "sim", "sim": {"tokens_per_image": 3}},
        "members": [{"name": "engine-0", "index": 0}],
        "model": {"path": vl_directory(tmp_path / "model")},
    }
    (engine,) = build(settings)
    assert (engine.info.image_token_id, engine.info.vocab_size) == (IMAGE_PAD, VOCAB_SIZE)


# ---- the model's facts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "qwen3_vl", "image_token_id": 5}, 5),
        ({"model_type": "qwen2_5_vl", "image_token_id": 5, "text_config": {"vocab_size": 9}}, 5),
        ({"model_type": "qwen3_5", "image_token_id": 5, "language_model_only": True}, None),
        ({"model_type": "llava", "image_token_id": 5}, None),
        ({"model_type": "llama"}, None),
    ],
)
def test_which_models_see(tmp_path: Path, config: dict[str, Any], expected: int | None) -> None:
    """Those of the families whose images we can follow token by token."""
    import json

    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = models.facts(str(tmp_path))
    assert facts is not None and facts.image_token_id == expected


def test_facts_of_a_hub_id_come_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config.json is fetched; one that cannot be had is no fact, and no error."""
    import huggingface_hub

    def download(name: str, file: str) -> str:
        if name != "Qwen/Some-VL":
            raise OSError("offline")
        (tmp_path / file).write_text('{"model_type": "qwen3_vl", "image_token_id": 5}')
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    facts = models.hub_facts("Qwen/Some-VL")
    assert facts is not None and facts.image_token_id == 5
    assert models.hub_facts("Qwen/Other") is None
    assert models.hub_facts(str(tmp_path)) == facts


# ---- SGLang ---------------------------------------------------------------------------------------------------------


def test_sglang_is_asked_for_the_ids_it_used() -> None:
    """Only where there are images or videos; encoded files as they are."""
    asked = {"image_data": [b"a"], "video_data": None, "return_prompt_token_ids": True}
    assert calls.media(request([PAD], [b"a"])) == asked
    assert calls.media(request([FILM], None, [b"v"])) == {**asked, "image_data": None, "video_data": [b"v"]}
    assert calls.media(request([1])) == calls.media(request([1], [], [])) == {}


def test_sglangs_ids_come_with_the_answer() -> None:
    """As int32."""
    reply = {"output_ids": [1], "prompt_token_ids": [5, 7, 7], "meta_info": {"finish_reason": {"type": "stop"}}}
    reply["meta_info"]["weight_version"] = "0"  # type: ignore[index]
    ids = calls.to_output(reply, False).extra_fields["prompt_token_ids"]
    assert (ids.dtype, ids.tolist()) == (np.int32, [5, 7, 7])
    assert calls.to_output({**reply, "prompt_token_ids": None}, False).extra_fields == {}


# ---- the way there --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_images_travel_as_frames_of_their_own(form: Any) -> None:
    """Bytes in, bytes at the engine; between them each is a frame, and no part of the message's skeleton."""
    images = [b"first picture" * 50, b"second"]

    async def main() -> None:
        async with Cluster() as cluster:
            server = await cluster.engine(**SIM)
            frames: list[list[bytes]] = []
            arrived = cluster.router.receiver

            def record(batch: Any) -> None:
                frames.extend([bytes(frame) for frame in message] for _, message in batch)
                arrived(batch)

            manager = await cluster.manager()
            await manager.generate("s", [1], {"max_new_tokens": 1})
            cluster.router.receiver = record
            output = await manager.generate(
                "s", [PAD, 1, PAD], {"max_new_tokens": 2}, [form(image) for image in images]
            )
            assert output.extra_fields["prompt_token_ids"].tolist() == [*[PAD] * 5, 1, *[PAD] * 5]
            carried = [message for message in frames if images[0] in message]
            assert carried and all(images[1] in message for message in carried)
            assert not any(images[0] in frame and frame != images[0] for message in frames for frame in message)
            assert server.counts["prompt_tokens"] == 1 + 11
            await asyncio.sleep(0)

    run(main())


@pytest.mark.parametrize("image", ["text", 5, None, np.zeros((2, 2), np.uint8), np.zeros(2)])
def test_what_is_no_file_is_refused_before_it_is_sent(image: Any) -> None:
    """By its number."""

    async def main() -> None:
        async with Cluster() as cluster:
            await cluster.engine(**SIM)
            manager = await cluster.manager()
            with pytest.raises(InvalidRequest, match=r"image_data\[1\] must be the bytes of an encoded file"):
                await manager.generate("s", [PAD, PAD], {"max_new_tokens": 1}, [b"a", image])

    run(main())


@pytest.mark.parametrize("images", ["text", [b"bytes"], [5], [np.zeros(3)], {"a": 1}])
def test_what_is_no_list_of_files_never_reaches_an_engine(images: Any) -> None:
    """Any peer may send it."""
    for media in ([images, None], [None, images]):
        with pytest.raises(InvalidRequest, match="must be a list of uint8 arrays"):
            read_request([[1], {}, *media], Call(b"\x01" * 16, 3, "engine", "generate"))
