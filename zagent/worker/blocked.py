"""The end of a worker whose event loop is blocked for good: `time.sleep`, a synchronous request, an endless `while`.

A blocked loop reaches no deadline and hears no cancel, so its rows would be waited for until somebody looks.
"""

from __future__ import annotations

import asyncio
import faulthandler
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

#: The least that counts as blocked for good, in seconds: imports in a loop take some (torch: 6 s).
AT_LEAST_S = 30.0
#: The timer is wound up this often, in seconds; each time costs a thread.
BEAT_S = 5.0


@asynccontextmanager
async def ends_when_blocked(limit_s: float) -> AsyncIterator[None]:
    """Within, the process writes where all its threads are to standard error and exits with code 1 once the event loop
    has been blocked for ``limit_s`` seconds. Its rows run again on other workers."""
    winding = asyncio.create_task(_wind(limit_s))
    try:
        yield
    finally:
        winding.cancel()
        faulthandler.cancel_dump_traceback_later()


async def _wind(limit_s: float) -> None:
    while True:
        faulthandler.dump_traceback_later(limit_s, exit=True)  # of its own thread, which needs no GIL
        await asyncio.sleep(min(BEAT_S, limit_s / 4))
