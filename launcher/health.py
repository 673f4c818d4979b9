"""Whether a process that lives is well, slow or hung, judged by its signs of life. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

#: Three heartbeats: without a sign of life for as long, a member is slow, and gets nothing new.
SLOW_S = 3.0


class Health(StrEnum):
    """How a process is."""

    WELL = "well"
    SLOW = "slow"  #: to be spared
    HUNG = "hung"  #: to be ended


@dataclass(frozen=True, slots=True)
class Signs:
    """Seconds for which nothing was heard of a process (``silent_s``), and for which ``what`` in it had kept others
    waiting, as it said last (``lag_s``)."""

    silent_s: float
    lag_s: float = 0.0
    what: str = ""

    @property
    def stalled_s(self) -> float:
        """The longer of the two."""
        return max(self.silent_s, self.lag_s)

    def __str__(self) -> str:
        if self.silent_s >= self.lag_s:
            return f"nothing was heard of it for {self.silent_s:.0f} s"
        return f"{self.what or 'something'} kept everything else waiting for {self.lag_s:.0f} s"


def judge(signs: Signs, slow_for_s: float, hung_after_s: float) -> Health:
    """``slow_for_s``: how long it has been slow before our own eyes. A stall that we did not watch is none: the machine
    slept, or we were stopped ourselves."""
    if signs.stalled_s <= SLOW_S:
        return Health.WELL
    watched = slow_for_s >= max(hung_after_s - 2 * SLOW_S, SLOW_S / 2)
    return Health.HUNG if watched and signs.stalled_s >= hung_after_s else Health.SLOW
