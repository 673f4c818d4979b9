"""What every member process does around its work: note the stop signal, end in order."""

from __future__ import annotations

import asyncio
import signal


def stop_requested() -> asyncio.Event:
    """An event that SIGTERM sets (the handler only notes; the loop acts). Call on the running loop, main thread."""
    event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, event.set)
    return event
