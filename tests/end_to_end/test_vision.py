"""Images through a whole cluster of simulated engines: launcher, broker, worker, trainer."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

import zagent
from support.clusters import sim_overrides
from support.tiny_vl import IMAGE_PAD, picture, vl_directory

#: Becomes four tokens.
SMALL = picture(64, 64)


def test_images_through_a_cluster(tmp_path: Path) -> None:
    """From PIL images in a batch to tensors; the images themselves are in each row's output; a row of text beside, and
    one whose image cannot be read, which fails alone."""
    model = vl_directory(tmp_path / "vl")
    overrides = [
        *sim_overrides(tmp_path, "engine.sim.tokens_per_image=4", "rollout.max_failed_fraction=0.25"),
        f"model.path={model}",
    ]
    image = {"type": "image", "image": Image.open(io.BytesIO(SMALL))}
    broken = {"type": "image", "image": b"no picture"}
    prompts = [[{"role": "user", "content": content}] for content in ([image, image], "text", [broken], [image])]
    batch = zagent.DataProto(non_tensor_batch={"raw_prompt": prompts})
    with zagent.AgentLoopManager.launch(zagent.Config.load(overrides=overrides)) as manager:
        out = manager.generate_sequences(batch)
        streamed = {outcome.index: outcome for outcome in manager.stream(batch)}
    assert tuple(out.batch["position_ids"].shape) == (4, 4, 128 + 32)
    assert (out.batch["prompts"] == IMAGE_PAD).sum(dim=1).tolist() == [8, 0, 0, 4]
    inputs = out.non_tensor_batch["multi_modal_inputs"]
    assert [None if row is None else row["pixel_values"].shape for row in inputs] == [
        (32, 1536),
        None,
        None,
        (16, 1536),
    ]
    assert "message 0, part 0: an image of 10 bytes cannot be read" in out.non_tensor_batch["error"][2]
    found = [outcome.output.multi_modal_data for index, outcome in sorted(streamed.items()) if outcome.output]
    assert [len(data["images"]) if data else 0 for data in found] == [2, 0, 1]
    kept = Image.open(io.BytesIO(found[0]["images"][0]))
    assert kept.tobytes() == image["image"].tobytes()
