"""Key files as the launcher makes them."""

from __future__ import annotations

import os
from pathlib import Path

from zagent.wire.keys import CLIENT_SUFFIX, BrokerKeys, ClientKeys, generate, to_text


def written(path: Path, keys: BrokerKeys | ClientKeys, mode: int = 0o600) -> str:
    """The path of a file with ``keys``."""
    path.write_text(to_text(keys))
    os.chmod(path, mode)
    return str(path)


def both(path: Path) -> tuple[str, BrokerKeys]:
    """The path of a new broker's file, with its client file beside it, and what is in it."""
    keys = generate()
    written(path.with_name(path.name + CLIENT_SUFFIX), keys.client)
    return written(path, keys), keys
