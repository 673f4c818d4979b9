"""Real clusters for end-to-end tests: a tiny tokenizer in place of a model, simulated engines, logs of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zagent
from support.tiny_tokenizer import saved_tokenizer

#: One token a byte plus three special ones (support/tiny_tokenizer.py).
VOCAB_SIZE = 259
CONTEXT = 4096


def model_directory(directory: Path) -> str:
    """A directory that passes for a model: tokenizer and config.json, no weights."""
    directory.mkdir(exist_ok=True)
    saved_tokenizer(directory)
    facts = {"model_type": "llama", "max_position_embeddings": CONTEXT, "vocab_size": VOCAB_SIZE}
    (directory / "config.json").write_text(json.dumps(facts))
    return str(directory)


def sim_overrides(tmp_path: Path, *more: str) -> list[str]:
    """Overrides for a small cluster of simulated engines; ``more`` win."""
    return [
        f"model.path={model_directory(tmp_path / 'model')}",
        f"logs.dir={tmp_path / 'logs'}",
        "engine.kind=sim",
        "engine.count=2",
        "worker.count=1",
        "rollout.prompt_length=128",
        "rollout.response_length=32",
        *more,
    ]


def sim_config(tmp_path: Path, *more: str) -> zagent.Config:
    return zagent.Config.load(overrides=sim_overrides(tmp_path, *more))


def questions(
    count: int, text: Callable[[int], str] = "Question {}?".format, **columns: Sequence[Any]
) -> zagent.DataProto:
    """A batch of ``count`` one-message prompts."""
    prompts = [[{"role": "user", "content": text(i)}] for i in range(count)]
    return zagent.DataProto(non_tensor_batch={"raw_prompt": prompts, **columns})
