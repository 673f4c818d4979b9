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
