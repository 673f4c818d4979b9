"""Start-up: the broker first, then engines, services and workers side by side, ready or the whole start fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from launcher.child import Child
from launcher.specs import ChildSpec, Plan
from zagent.errors import StartupError

logger = logging.getLogger(__name__)

Spawn = Callable[[ChildSpec], Child]


async def start(plan: Plan, spawn: Spawn, timeout_s: float) -> str:
    """Start all of ``plan``; the broker's endpoint.

    Raises:
        ConfigError, UnknownAgent: a child cannot use its part of the configuration.
        StartupError: a child that failed, died or was not ready in ``timeout_s``; tokenizers that do not agree. What
            was spawned by then still runs.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    broker = spawn(plan.broker)
    await _ready([broker], deadline, timeout_s)
    endpoint = str(broker.ready.result()["endpoint"])
    # A service that a loop calls before it is there has its calls wait in the broker.
    members = [spawn(_joining(spec, endpoint)) for spec in (*plan.engines, *plan.services, *plan.workers)]
    await _ready(members, deadline, timeout_s)
    of_policy = [child for child in members if child.spec.room != "service"]  # a judge has a tokenizer of its own
    check_tokenizers({child.spec.name: child.ready.result() for child in of_policy})
    return endpoint


def _joining(spec: ChildSpec, endpoint: str) -> ChildSpec:
    return replace(spec, settings={**spec.settings, "endpoint": endpoint})


async def _ready(children: Iterable[Child], deadline: float, timeout_s: float) -> None:
    waiting = {child.ready: child for child in children}
    left = max(0.0, deadline - asyncio.get_running_loop().time())
    logger.info("waiting for %s, at most %.0f s", ", ".join(c.spec.name for c in waiting.values()), left)
    done, late = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
    for ready in done:
        ready.result()
    for ready in late:
        raise waiting[ready].failure(f"it said nothing within {timeout_s:g} s")


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
