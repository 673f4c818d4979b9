"""Start-up: the broker first, beside it engines and services, then workers; all ready, or the whole start fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.child import Child
from launcher.specs import ChildSpec, Plan
from zagent.errors import StartupError

logger = logging.getLogger(__name__)

Spawn = Callable[[ChildSpec], Child]


async def start(
    plan: Plan, spawn: Spawn, timeout_s: float, on_serving: Callable[[str], None] = lambda _endpoint: None
) -> str:
    """Start all of ``plan``; the broker's endpoint. ``on_serving`` is called with it as soon as engines and services
    can be called, for which nobody needs a worker.

    Raises:
        ConfigError, UnknownAgent: a child cannot use its part of the configuration.
        StartupError: a child that failed, died or was not ready in ``timeout_s``; tokenizers that do not agree. What
            was spawned by then still runs.
    """
    ready = _Deadline(timeout_s).ready
    broker = spawn(plan.broker)
    if not plan.endpoint:
        await ready([broker])
    endpoint = plan.endpoint or str(broker.ready.result()["endpoint"])

    def join(specs: Iterable[ChildSpec]) -> list[Child]:
        return [spawn(replace(spec, settings={**spec.settings, "endpoint": endpoint})) for spec in specs]

    # A service that a loop calls before it is there has its calls wait in the broker.
    engines, services = join(plan.engines), join(plan.services)
    await ready([broker])
    workers = join(plan.workers)  # not before: where cores are few, engines come first
    await ready([*engines, *services], beside=workers)
    on_serving(endpoint)
    await ready(workers, beside=[*engines, *services])
    # A judge, which is a service, has a tokenizer of its own.
    check_tokenizers({child.spec.name: child.ready.result() for child in (*engines, *workers)})
    return endpoint


class _Deadline:
    """Waits for children until ``timeout_s`` seconds from now."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time() + timeout_s

    async def ready(self, children: Sequence[Child], beside: Sequence[Child] = ()) -> None:
        """Until all ``children`` are ready; raises at once what one of them, or of those ``beside``, failed with."""
        waiting = {child.ready: child for child in (*children, *beside) if not child.became_ready}
        names = ", ".join(child.spec.name for child in waiting.values())
        logger.info("waiting for %s, at most %.0f s", names, max(0.0, self._at - self._loop.time()))
        while late := [child for child in children if not child.became_ready]:
            left = max(0.0, self._at - self._loop.time())
            done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise late[0].failure(f"it said nothing within {self._timeout_s:g} s")
            for ready in done:
                ready.result()
                del waiting[ready]


def check_tokenizers(infos: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse members whose tokenizers encode the probe text differently; an empty probe says nothing.

    Raises:
        StartupError: names two that disagree.
    """
    probes = {name: info.get("tokenizer_probe") for name, info in infos.items() if info.get("tokenizer_probe")}
    first = next(iter(probes), None)
    for name, probe in probes.items():
        if first is not None and probe != probes[first]:
            raise StartupError(
                f"{first} and {name} tokenize differently (probe {probes[first]} and {probe}): the tokenizer.json of "
                "this model is not what transformers makes of it; set model.use_auto_tokenizer=true"
            )
