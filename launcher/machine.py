"""What this machine offers, found without torch: cores, free memory, visible GPUs."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.gpus import Gpus

logger = logging.getLogger(__name__)

#: nvidia-smi takes up to 10 s on a host with many GPUs and no persistence daemon.
NVIDIA_SMI_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Machine:
    """``cores`` this process may use, ``memory`` in bytes that is free for it, ``gpus`` that are visible."""

    cores: int
    memory: int
    gpus: Gpus = field(default_factory=Gpus)


def inspect(environ: Mapping[str, str] = os.environ) -> Machine:
    """The facts of this machine, as limited by affinity, control groups and CUDA_VISIBLE_DEVICES."""
    return Machine(cores(), available_memory(), Gpus.visible(environ.get("CUDA_VISIBLE_DEVICES"), installed_gpus()))


def cores(root: Path = Path("/")) -> int:
    """Cores of the affinity mask, or of the control group's CPU quota where that is less."""
    return max(1, min(len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in _quotas(root)), 1 << 16))


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated: MemAvailable, or what a control group's limit leaves where that is less."""
    text = (root / "proc/meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        raise OSError("/proc/meminfo names no MemAvailable")
    return max(0, min(int(found[1]) * 1024, *_room_in_groups(root), 1 << 62))


def installed_gpus() -> dict[str, str]:
    """Index to UUID of the NVIDIA GPUs here; empty without nvidia-smi or where it fails (no driver)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    command = [tool, "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("nvidia-smi is here but cannot be used, so no GPU is: %s", error)
        return {}
    return parse_gpus(answer.stdout)


def parse_gpus(text: str) -> dict[str, str]:
    """``0, GPU-ab…`` lines as index to UUID."""
    rows = (line.split(",") for line in text.splitlines())
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2 and row[0].strip().isdigit()}


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Directories of this process's control groups, own group first, then its parents; True = version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = root / "sys/fs/cgroup" / (names and controller)
        group = top / path.lstrip("/")
        yield from ((directory, not names) for directory in (group, *group.parents) if directory.is_relative_to(top))


def _number(file: Path, key: str | None = None) -> int | None:
    try:
        text = file.read_text()
    except OSError:
        return None
    found = re.search(r"^\d+" if key is None else rf"^{key} (\d+)", text, re.MULTILINE)
    return None if found is None else int(found[0].split()[-1])


def _room_in_groups(root: Path) -> Iterator[int]:
    """Limit minus use per group with a limit; page cache that can be dropped does not count as used."""
    for group, second in _groups(root, "memory"):
        limit = _number(group / ("memory.max" if second else "memory.limit_in_bytes"))
        used = _number(group / ("memory.current" if second else "memory.usage_in_bytes"))
        if limit is not None and used is not None:
            cache = _number(group / "memory.stat", "inactive_file" if second else "total_inactive_file") or 0
            yield limit - used + min(cache, used)


def _quotas(root: Path) -> Iterator[float]:
    for group, second in _groups(root, "cpu"):
        if second:
            quota, period = _number(group / "cpu.max"), _second_number(group / "cpu.max")
        else:
            quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota and period:
            yield quota / period


def _second_number(file: Path) -> int | None:
    try:
        words = file.read_text().split()
    except OSError:
        return None
    return int(words[1]) if len(words) == 2 else None
