"""Examples are scripts, found from their own directory; their tool has a name that others use, too."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def grpo_tiny() -> Iterator[ModuleType]:
    """`examples/grpo_tiny.py`, as if somebody had run it there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.setattr("zagent.loops.tools.function._REGISTRY", {})
        yield importlib.import_module("grpo_tiny")
    for name in ("grpo_tiny", "calculator"):
        del sys.modules[name]
