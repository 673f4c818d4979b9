"""Who holds gates, for the broker that is started in the place of this one if it dies: it waits for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path


class HoldersFile:
    """Nonces, one a line. A disk that is full costs the next broker its patience, not this one its life."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[bytes]:
        """Those that were written last; none where nobody has written."""
        try:
            return [bytes.fromhex(line) for line in self._path.read_text(encoding="ascii").split()]
        except (OSError, ValueError):
            return []

    def write(self, holders: Sequence[bytes]) -> None:
        """All of them, or none: a broker may die while it writes."""
        new = self._path.with_suffix(".new")
        try:
            new.write_text("".join(f"{nonce.hex()}\n" for nonce in holders), encoding="ascii")
            os.replace(new, self._path)
        except OSError as error:
            print(f"who holds gates could not be written: {error}", file=sys.stderr, flush=True)
