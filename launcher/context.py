"""What a cluster is told beside its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from launcher.ports import Reservation
from launcher.rundir import RunDir
from zagent.config import LauncherConfig


class BrokerLink(Protocol):
    """The supervisor's line to the broker (`zagent.client.launcher_link.LauncherLink`): reports that nobody waits for,
    which arrive as soon as a broker is there, and are said again to the next one."""

    def exited(self, pool: str, name: str, epoch: int, reason: str, *, crashed: bool) -> None:
        """That member is gone; ``crashed``: by itself, so that one of its calls may be the reason."""

    def health(self, pool: str, name: str, epoch: int, *, slow: bool) -> None:
        """That member is slow, or no longer."""

    def abandoned(self, pool: str, reason: str) -> None:
        """The pool has nobody left: its calls end in `PoolLost`."""

    async def close(self) -> None:
        """Hang up, once all is said."""


#: Called with the broker's endpoint and the run's secret.
LinkFactory = Callable[[str, str], BrokerLink]


@dataclass(frozen=True, slots=True)
class Context:
    """``link`` makes the line to the broker; ``trainer`` is the pidfd of a process to end with; ``ports`` holds those
    of SGLang engines until they start; the run's ``directory`` is told which children there are."""

    run_id: str
    secret: str
    log_dir: Path
    limits: LauncherConfig
    link: LinkFactory
    trainer: int | None = None
    ports: Reservation | None = None
    directory: RunDir | None = None
