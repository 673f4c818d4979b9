"""Environments beside the tests' own: another interpreter, with chosen packages only.

`python environments.py DIRECTORY PACKAGE…` makes one without those packages.
"""

from __future__ import annotations

import sys
import sysconfig
import venv
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(directory: Path, without: Collection[str] = ()) -> str:
    """The interpreter of a new environment in ``directory``: it has the packages of ours (as links) but those
    ``without``, and zagent as it lies here, with the tests' support. What is installed there goes before."""
    venv.EnvBuilder(symlinks=True).create(directory)
    shared = directory / "shared"
    shared.mkdir()
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if package.name.partition("-")[0] not in without and not package.name.startswith("__editable__"):
            (shared / package.name).symlink_to(package)
    (theirs,) = directory.glob("lib/python*/site-packages")
    # A site directory of its own: pip replaces nothing outside its environment.
    lines = (ROOT, ROOT / "tests", f"import site; site.addsitedir({str(shared)!r})")
    (theirs / "here.pth").write_text("".join(f"{line}\n" for line in lines))
    return str(directory / "bin" / "python")


if __name__ == "__main__":
    environment(Path(sys.argv[1]).resolve(), sys.argv[2:])
