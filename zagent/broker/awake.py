"""The broker's clock."""

from __future__ import annotations

import time
from collections.abc import Callable

#: The broker looks at the clock several times a second. Where so many seconds lie between two looks, it stood still.
STOOD_STILL_S = 1.0


class AwakeClock:
    """Monotonic seconds without those in which the process stood still (stopped, starved, a suspended machine): who did
    not come then is not late, for it could not be heard."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked = clock()
        self._missed = 0.0

    def __call__(self) -> float:
        """Now, by a look that comes after not too long."""
        now = self._clock()
        passed, self._looked = now - self._looked, now
        if passed >= STOOD_STILL_S:
            self._missed += passed
        return now - self._missed
