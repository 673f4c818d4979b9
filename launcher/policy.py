"""What to do when a child of a serving cluster exits by itself, and how long stopping may take. Pure.

The one place where that is decided: restarting with back-off and a budget is added here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan import ChildSpec, Member

#: After the trainer's death all is gone within 5 s: these three, KILL (2 s at worst, for one stage) and the sweep.
ORPHANED_STOP_S = {"worker": 0.5, "engine": 1.0, "broker": 0.5}
#: In order: nothing may still be sent to what is gone.
STOP_ORDER = ("worker", "engine", "broker")


@dataclass(frozen=True, slots=True)
class Decision:
    """``report``: members to tell the broker about. ``end``: the run cannot go on."""

    report: tuple[Member, ...] = ()
    end: bool = False


def on_exit(spec: ChildSpec, others_alive: int) -> Decision:
    """``others_alive``: processes of the same room that still run."""
    if spec.room == "broker":
        return Decision(end=True)
    return Decision(report=spec.members, end=others_alive == 0)


def stop_timeout_s(room: str, stop_timeout_s: float, *, orphaned: bool) -> float:
    """TERM to KILL for the children of ``room``."""
    return min(stop_timeout_s, ORPHANED_STOP_S[room]) if orphaned else stop_timeout_s
