"""JSON to bytes and back, by Python's own module or by orjson."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple


class Codec(NamedTuple):
    """The two directions."""

    dumps: Callable[[Any], bytes]
    loads: Callable[[bytes], Any]


def codec(name: str) -> Codec:
    """Of the module ``name``: `json` or `orjson`."""
    module = importlib.import_module(name)
    if name == "orjson":
        return Codec(module.dumps, module.loads)
    return Codec(lambda value: module.dumps(value).encode(), module.loads)
