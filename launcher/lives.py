"""What follows when a child of a serving cluster dies: the broker is told at once; when all that it had started is
gone, the policy decides on its next life, its pool's end, or the run's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from launcher import logs, policy
from launcher.child import Child
from launcher.children import Children
from launcher.context import Context
from launcher.restarts import Restarts
from launcher.specs import ChildSpec, End, next_life, with_ports
from launcher.watch import Watch
from zagent.errors import ConnectionLost, PoolLost, StartupError, ZagentError

logger = logging.getLogger(__name__)


class Lives:
    """Restarts ``children`` of a cluster that serves at ``endpoint``; calls ``end`` with the reason when it cannot go
    on."""

    def __init__(self, children: Children, context: Context, endpoint: str, end: Callable[[ZagentError], None]) -> None:
        self._children, self._context, self._endpoint, self._end = children, context, endpoint, end
        self._loop = asyncio.get_running_loop()
        self._link = context.link(endpoint, context.secret)
        self._restarts = Restarts(self._start)
        self._mourned: set[Child] = set()  #: dead, told to the broker, not all gone
        self._watch = Watch(children.serving, context.limits.hung_after_s, self._tell_health, self._tell_stuck)

    async def close(self) -> None:
        """Nothing is started any more, nobody is watched or told."""
        self._restarts.cancel()
        self._watch.stop()
        await self._link.close()

    # ---- what the broker is told ------------------------------------------------------------------------------------

    def on_death(self, child: Child) -> None:
        """Its members are gone. Said twice, it changes nothing."""
        if child in self._mourned:
            return
        self._mourned.add(child)
        logger.error("%s is gone: %s", child.spec.name, child.end)
        self._tell_exited(child, child.end, crashed=child.crashed)

    def _tell_exited(self, child: Child, reason: str, *, crashed: bool) -> None:
        for member in child.spec.members:
            self._link.exited(member.pool, member.name, member.epoch, reason, crashed=crashed)

    def _tell_health(self, child: Child, slow: bool) -> None:
        for member in child.spec.members:
            self._link.health(member.pool, member.name, member.epoch, slow=slow)

    def _tell_stuck(self, child: Child) -> None:
        """Its calls need not wait until the kernel lets go of it."""
        self._tell_exited(child, f"{child.given_up}, and not even SIGKILL ended it", crashed=True)

    # ---- what comes next --------------------------------------------------------------------------------------------

    def on_exit(self, child: Child) -> None:
        """Nothing of it is left. Said twice, it changes nothing."""
        if child not in self._children:
            return
        self._children.forget(child)
        self._mourned.discard(child)
        who = f"{child.spec.name} (pid {child.pid})"
        self._over(child.spec, End(self._loop.time(), child.became_ready, child.crashed), who, child.end)

    def _over(self, spec: ChildSpec, end: End, who: str, reason: str) -> None:
        others = self._children.of_pool(spec.pool) + self._restarts.of_pool(spec.pool)
        decision = policy.on_exit(spec, end, others, self._context.limits)
        if decision.restart_after_s is not None:
            logger.info("%s is started again in %g s", spec.name, decision.restart_after_s)
            self._restarts.schedule(next_life(spec, end), decision.restart_after_s)
            return
        logger.error("%s is not started again: %d restarts are used up", spec.name, self._context.limits.max_restarts)
        words = self._last_words(spec, who, reason)
        if decision.abandon:
            self._link.abandoned(spec.pool, words)
        if decision.end_after_s is not None:
            error = PoolLost(words) if spec.members else ConnectionLost(words)
            self._loop.call_later(decision.end_after_s, self._end, error)

    def _last_words(self, spec: ChildSpec, who: str, reason: str) -> str:
        nobody = f", and no {spec.pool} is left" if spec.members else ""
        after = f", after {spec.life - 1} restart{'s' if spec.life > 2 else ''}" if spec.life > 1 else ""
        return f"{who} is gone{nobody}{after}: {reason}{logs.quoted(self._children.log(spec))}"

    def _start(self, spec: ChildSpec) -> None:
        try:
            child = self._children.spawn(self._renewed(spec))
        except (OSError, StartupError) as error:  # no memory, no file descriptors, no ports
            logger.error("%s could not be started: %s", spec.name, error)
            end = End(self._loop.time(), became_ready=False, crashed=True)
            self._over(spec, end, spec.name, f"it could not be started: {error}")
            return
        limit = self._context.limits.start_timeout_s
        timer = self._loop.call_later(limit, self._too_late, child, limit)
        child.ready.add_done_callback(partial(self._started, child, timer))

    def _renewed(self, spec: ChildSpec) -> ChildSpec:
        """With what is known now only."""
        if not spec.members:
            return replace(
                spec, settings={**spec.settings, "endpoint": self._endpoint, "expected": self._children.members()}
            )
        if spec.ports is not None and self._context.ports is not None:
            return with_ports(spec, self._context.ports.take())
        return spec

    def _started(self, child: Child, timer: asyncio.TimerHandle, ready: asyncio.Future[Any]) -> None:
        timer.cancel()
        if ready.exception() is None:
            logger.info("%s is back, life %d", child.spec.name, child.spec.life)

    def _too_late(self, child: Child, limit: float) -> None:
        logger.error("%s said nothing within %g s, ending it", child.spec.name, limit)
        child.give_up(f"it was not ready within {limit:g} s")
