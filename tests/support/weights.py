"""Directories of weights, for engines that only look at names and sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def weights_directory(place: Path, size: int = 4, *, name: str = "w") -> str:
    """One tensor ``name``, float32 [size]."""
    place.mkdir(parents=True, exist_ok=True)
    save_file({name: np.zeros(size, np.float32)}, place / "model.safetensors")
    return str(place)
