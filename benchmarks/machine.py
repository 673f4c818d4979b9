"""What figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine() -> str:
    """Cores and processor."""
    text = Path("/proc/cpuinfo").read_text()
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    processor = models[0] if models else platform.processor()
    return f"{len(os.sched_getaffinity(0))} cores, {processor}, Python {platform.python_version()}"
