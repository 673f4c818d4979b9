"""The launcher is light: it is imported again in every child."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded_after(code: str) -> set[str]:
    """Top-level modules in ``sys.modules`` of a fresh interpreter after ``code``."""
    script = f"import sys\n{code}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    return set(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    )


@pytest.mark.parametrize("module", ["launcher.run", "zagent.launch", "zagent.trainer.embed"])
def test_neither_torch_nor_transformers_is_imported(module: str) -> None:
    """Launch time is what the engines need, not what the launcher imports."""
    assert not loaded_after(f"import {module}") & {"torch", "transformers", "sglang", "zmq"}


@pytest.mark.parametrize("module", ["launcher.bootstrap", "zagent.launch", "launcher.janitor"])
def test_what_every_child_imports_is_lighter_still(module: str) -> None:
    """Children import the bootstrap and the main module again, before their rooms."""
    assert not loaded_after(f"import {module}") & {"torch", "transformers", "sglang", "zmq", "numpy", "pydantic"}


#: What each room may not import before it serves (with the tiny model, on the text path): each costs 0.1 s or more.
UNNEEDED = {
    "zagent.broker.server": {"pydantic", "omegaconf", "yaml", "hydra", "jinja2", "tokenizers"},
    "zagent.engine.server": {"omegaconf", "yaml", "hydra", "jsonschema", "jinja2", "tokenizers", "httpx"},
    "zagent.worker.server": {"omegaconf", "yaml", "hydra", "jsonschema", "huggingface_hub", "httpx"},
    "zagent.service.server": {"omegaconf", "yaml", "hydra", "jinja2", "tokenizers"},
    "zagent.trainer.manager": {"omegaconf", "yaml", "hydra", "jsonschema", "jinja2", "tokenizers"},
    "launcher.run": {"numpy", "omegaconf", "yaml", "hydra", "msgpack"},
}


@pytest.mark.parametrize("room", UNNEEDED)
def test_a_room_imports_only_what_it_needs(room: str) -> None:
    """Imports are most of the start of a cluster whose engines load nothing."""
    heavy = {"torch", "transformers", "sglang", "PIL", "matplotlib"}
    assert not loaded_after(f"import {room}") & (heavy | UNNEEDED[room])


PREPARED = """
from zagent.config import ModelConfig, RolloutConfig
from zagent.models import PACKAGED
from zagent.worker.server import prepare
from zagent.loops.tokenizer import probe
model = ModelConfig(path=str(PACKAGED["tiny"])).model_dump()
made = prepare({"model": model, "rollout": RolloutConfig().model_dump()})
probe(made.tokenizer)
made.tokenizer.pad_token_id
text = made.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
made.tokenizer.decode(made.tokenizer.encode(text))
"""


def test_a_text_worker_answers_rows_without_transformers() -> None:
    """From its start to the first row: `tokenizers` and jinja2 do."""
    loaded = loaded_after(PREPARED)
    assert {"tokenizers", "jinja2"} <= loaded
    assert not loaded & {"torch", "transformers", "huggingface_hub", "omegaconf", "hydra", "jsonschema", "PIL"}


def test_a_section_is_loaded_alone() -> None:
    """Children need one or two of them."""
    script = (
        "import sys\nfrom zagent.config import ModelConfig\nprint(*(m for m in sys.modules if 'zagent.config.' in m))"
    )
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert set(found) == {"zagent.config.engine", "zagent.config.section"}
