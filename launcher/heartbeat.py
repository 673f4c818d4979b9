"""The thread of a child that tells the launcher every second how the child is, and that ends it before its memory
takes the machine down.

Runs in the child, beside the room: also while the room starts, and while its event loop is blocked. What holds the
interpreter's lock (a regular expression, one huge allocation) stops this thread as well; then the beats stay away,
which the launcher sees.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from zagent import alive

#: Between two beats, in seconds. The launcher calls a child slow after three without one.
BEAT_S = 1.0
#: Looks at the memory between two beats: Python code fills 1 GB/s at most, so a limit is overrun by 0.1 GB.
LOOKS = 10
#: Exit code of a child that held more memory than its limit.
OUT_OF_MEMORY = 88
#: A beat that comes this late, in seconds, was kept back with everything else here: a stopped process or machine.
AWAY_S = 1.0
#: Characters of what a beat says is slow: a beat is one write to a pipe (4096 bytes), or none.
SAID = 200

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Heartbeat:
    """``tell(beat)`` is False once nobody listens. ``memory_limit`` in resident bytes, 0 = none; ``resident()`` tells
    what there are."""

    def __init__(
        self, tell: Callable[[Mapping[str, Any]], bool], memory_limit: int, resident: Callable[[], int] | None = None
    ) -> None:
        self._tell = tell
        self._limit = memory_limit
        self._resident = resident or resident_bytes
        self._back, self._away = 0.0, 0.0

    def start(self) -> None:
        """From now on, in a thread of its own, until nobody listens."""
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def _run(self) -> None:
        looks = LOOKS if self._limit else 1
        while self._tell(self.beat(time.monotonic())):
            began = time.monotonic()
            for _ in range(looks):
                time.sleep(BEAT_S / looks)
                self.check_memory()
            self.rested(began, time.monotonic())

    def rested(self, began: float, ended: float) -> None:
        """The pause after a beat is over; of a long one it is noted when it ended and for how long we were away."""
        late = ended - began - BEAT_S
        if late > AWAY_S:
            self._back, self._away = ended, late

    def beat(self, now: float) -> dict[str, Any]:
        """What the launcher is told. Time for which this thread was kept from running is nobody else's lag: after a
        SIGCONT the event loop may have had no turn yet."""
        lag, what = alive.longest() or (None, "")
        if lag is not None and lag > now - self._back:
            lag = max(0.0, lag - self._away)
        return {"event": "beat", "lag_s": lag, "what": what[:SAID]}

    def check_memory(self) -> None:
        """End the process if it holds too much."""
        if self._limit and (held := self._resident()) > self._limit:
            _end(held, self._limit)


def resident_bytes() -> int:
    """Memory of this process that is in RAM, shared pages too; its children's is their own."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE


def _end(held: int, limit: int) -> NoReturn:
    """Say why and where, past Python's streams, whose locks others may hold, and leave."""
    said = f"{held / 1e9:.2f} GB of memory are beyond memory_limit_gb={limit / 1e9:g}, ending; all threads:\n"
    os.write(2, said.encode())
    faulthandler.dump_traceback(2, all_threads=True)
    os._exit(OUT_OF_MEMORY)
