"""Looks after the processes that live: who is slow is spared, who hangs is ended."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable

from launcher.child import ABORT_S, KILL_S, Child
from launcher.health import SLOW_S, Health, judge

logger = logging.getLogger(__name__)

#: Between two looks, in seconds: as often as they say how they are.
LOOK_S = 1.0
#: One that lives as long after it was given up is beyond SIGKILL: a driver or a file system holds it.
STUCK_S = ABORT_S + KILL_S + 1.0


class Watch:
    """Looks at ``serving()`` on the running loop; ``tell(child, slow)`` is called when one becomes slow or well again,
    ``stuck(child)`` when one that hangs cannot be ended."""

    def __init__(
        self,
        serving: Callable[[], Iterable[Child]],
        hung_after_s: float,
        tell: Callable[[Child, bool], None],
        stuck: Callable[[Child], None],
    ) -> None:
        self._serving, self._hung_after_s = serving, hung_after_s
        self._tell, self._stuck = tell, stuck
        self._loop = asyncio.get_running_loop()
        self._slow: dict[Child, float] = {}  #: since when
        self._given_up: dict[Child, float] = {}  #: when each must be dead
        self._looked = self._loop.time()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_S, self._look)
        now = self._loop.time()
        if now - self._looked > SLOW_S:  # we were stopped ourselves, and maybe the whole machine
            self._slow = dict.fromkeys(self._slow, now)
        self._looked = now
        serving = list(self._serving())
        for times in (self._slow, self._given_up):
            for child in times.keys() - serving:
                del times[child]
        for child in serving:
            if child not in self._given_up:
                self._look_at(child, now)
            elif now >= self._given_up[child]:
                self._given_up[child] = math.inf
                logger.error("not even SIGKILL ended %s: stuck in the kernel", child.spec.name)
                self._stuck(child)

    def _look_at(self, child: Child, now: float) -> None:
        signs = child.signs()
        health = judge(signs, now - self._slow.get(child, now), self._hung_after_s)
        if health is Health.WELL:
            if self._slow.pop(child, None) is not None:
                logger.info("%s is well again", child.spec.name)
                self._tell(child, False)
        elif child not in self._slow:
            self._slow[child] = now
            logger.warning("%s is slow: %s", child.spec.name, signs)
            self._tell(child, True)
        if health is Health.HUNG:
            logger.error("%s hangs, ending it: %s", child.spec.name, signs)
            child.give_up(f"it hung: {signs}")
            self._given_up[child] = now + STUCK_S
