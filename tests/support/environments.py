"""Environments beside the tests' own: another interpreter, with chosen packages only."""

from __future__ import annotations

import sysconfig
import venv
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(directory: Path, without: Collection[str] = ()) -> str:
    """The interpreter of a new environment in ``directory``: it has the packages of ours (as links) but those
    ``without``, and zagent as it lies here, with the tests' support."""
    venv.EnvBuilder(symlinks=True).create(directory)
    (theirs,) = directory.glob("lib/python*/site-packages")
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if package.name.partition("-")[0] not in without and not package.name.startswith("__editable__"):
            (theirs / package.name).symlink_to(package)
    (theirs / "here.pth").write_text(f"{ROOT}\n{ROOT / 'tests'}\n")
    return str(directory / "bin" / "python")
