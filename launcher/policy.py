"""What to do when a child of a serving cluster exits by itself, and how long stopping may take. Pure.

The one place where that is decided. A service's process is started again, with back-off and a budget; other rooms go on
with who is left, and the run ends with the last of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.specs import ChildSpec, Member
from zagent.config import LauncherConfig

#: Whose processes are started again.
RESTARTED = frozenset({"service"})
#: Longest wait before a restart, in seconds: a service that needs another host should not be late by more.
LONGEST_RESTART_WAIT_S = 60.0
#: After the trainer's death all is gone within 5 s: these four, KILL (2 s at worst, for one stage) and the sweep.
ORPHANED_STOP_S = {"worker": 0.4, "service": 0.4, "engine": 0.8, "broker": 0.4}
#: In order: nothing may still be sent to what is gone.
STOP_ORDER = ("worker", "service", "engine", "broker")


@dataclass(frozen=True, slots=True)
class Decision:
    """``report``: members to tell the broker about. ``restart_after_s``: when to start it again; None = never.
    ``abandon``: nobody will serve its pool any more. ``end``: the run cannot go on."""

    report: tuple[Member, ...] = ()
    restart_after_s: float | None = None
    abandon: bool = False
    end: bool = False


def on_exit(spec: ChildSpec, others: int, limits: LauncherConfig, *, became_ready: bool) -> Decision:
    """``others``: further processes of the same pool that live, or will again. ``became_ready``: before it exited."""
    if spec.room == "broker":
        return Decision(end=True)
    if spec.room not in RESTARTED:
        return Decision(report=spec.members, end=others == 0)
    if spec.members[0].epoch > limits.max_restarts:
        return Decision(report=spec.members, abandon=others == 0)
    failed_starts = 0 if became_ready else spec.failed_starts + 1
    return Decision(report=spec.members, restart_after_s=restart_wait_s(failed_starts, limits.restart_wait_s))


def restart_wait_s(failed_starts: int, first_wait_s: float) -> float:
    """Seconds to wait after ``failed_starts`` starts in a row that did not become ready."""
    return min(first_wait_s * 2.0 ** min(failed_starts, 100), max(LONGEST_RESTART_WAIT_S, first_wait_s))


def stop_timeout_s(room: str, stop_timeout_s: float, *, orphaned: bool) -> float:
    """TERM to KILL for the children of ``room``."""
    return min(stop_timeout_s, ORPHANED_STOP_S[room]) if orphaned else stop_timeout_s
