"""What spares a process Python's defaults: imports, which are most of its start, and garbage collection."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

#: When garbage is collected: after 10 000 objects more, every tenth time among those that stayed, too, every hundredth
#: among all (at Python's 700 instead of 10 000, half of the time it takes to start ten thousand trajectories went into
#: that, 0.8 s of it in one go: all of them live, and have some hundred objects each).
COLLECTED = (10_000, 10, 10)

_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


@contextmanager
def quick_imports() -> Iterator[None]:
    """Within, nothing is collected, for modules stay; afterwards they are none of the garbage collector's business.

    Nor does pydantic look through all installed packages (0.1 s) for plugins, which a user may have for models of their
    own but not for ours.
    """
    collects = gc.isenabled()
    told = _PLUGINS in os.environ
    if not told:
        os.environ[_PLUGINS] = "1"
    gc.disable()
    try:
        yield
    finally:
        if not told:
            del os.environ[_PLUGINS]
        gc.freeze()
        if collects:
            gc.enable()
