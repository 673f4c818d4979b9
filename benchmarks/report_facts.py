"""What a reader needs to know to believe figures: machine, versions, commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

PACKAGES = (
    *("zagent", "pyzmq", "msgpack", "numpy", "uvloop", "torch", "transformers", "sglang"),
    *("ray", "aiohttp", "sglang-router", "matplotlib"),
)
ROOT = Path(__file__).parents[1]


def facts(command: str) -> dict[str, Any]:
    """As `report.json` has them."""
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "load": os.getloadavg()[0],  # of the last minute, before anything was measured
        "commit": commit(ROOT),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of this Python and of what is installed of `PACKAGES`."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit(root: Path) -> str | None:
    """The checked-out commit, ``+changes`` if files differ from it; None where there is no git or no repository."""
    if shutil.which("git") is None:
        return None
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("+changes" if _git(root, "status", "--porcelain") else "")


def _git(root: Path, *words: str) -> str | None:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
