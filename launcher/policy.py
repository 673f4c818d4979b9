"""What to do when a child of a serving cluster has exited, and how long stopping may take. Pure.

The one place where that is decided. Every process is started again, with back-off and a budget; a pool goes on with who
is left; without its broker, engines or workers the run ends.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from launcher.specs import ChildSpec, End
from zagent.config import LauncherConfig

#: Rooms without which no row can finish.
NEEDED = frozenset({"broker", "engine", "worker"})
#: Longest wait before a restart, in seconds: a service that needs another host should not be late by more.
LONGEST_RESTART_WAIT_S = 60.0
#: For the broker all others wait, and they give up after 30 s.
LONGEST_BROKER_WAIT_S = 2.0
#: Between a pool's end and the run's: the callers get their error, and the trainer what is finished.
ABANDONED_GRACE_S = 2.0
#: After the trainer's death all is gone within 5 s: these four, KILL (2 s at worst, for one stage) and the sweep.
ORPHANED_STOP_S = {"worker": 0.4, "service": 0.4, "engine": 0.8, "broker": 0.4}
#: In order: nothing may still be sent to what is gone.
STOP_ORDER = ("worker", "service", "engine", "broker")
#: Signals that a process brings upon itself. (Others come from outside: kill, the kernel's out-of-memory killer.)
CRASH_SIGNALS = frozenset(
    (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS)
)
#: `zagent.engine.base.ENGINE_KILLED`: the engine's own child was killed from outside.
ENGINE_KILLED = 87


@dataclass(frozen=True, slots=True)
class Decision:
    """``restart_after_s``: when to start it again; None = never. ``abandon``: nobody will serve its pool any more.
    ``end_after_s``: when the run ends for that; None = it goes on."""

    restart_after_s: float | None = None
    abandon: bool = False
    end_after_s: float | None = None


def on_exit(spec: ChildSpec, end: End, others: int, limits: LauncherConfig) -> Decision:
    """``others``: further processes of the same pool that live, or will again."""
    if sum(end.at - at < limits.restart_window_s for at in spec.restarted_at) < limits.max_restarts:
        failed_starts = end.failed_starts(spec.failed_starts)
        return Decision(restart_after_s=restart_wait_s(spec.room, failed_starts, limits.restart_wait_s))
    if spec.room == "broker":  # nobody is left to be told
        return Decision(end_after_s=0.0)
    if others:
        return Decision()
    return Decision(abandon=True, end_after_s=ABANDONED_GRACE_S if spec.room in NEEDED else None)


def restart_wait_s(room: str, failed_starts: int, first_wait_s: float) -> float:
    """Seconds to wait after ``failed_starts`` starts in a row that did not become ready."""
    wait_s = first_wait_s * 2.0 ** min(failed_starts, 100)
    if room == "broker":
        return min(wait_s, LONGEST_BROKER_WAIT_S) if failed_starts else 0.0
    return min(wait_s, max(LONGEST_RESTART_WAIT_S, first_wait_s))


def crashed(code: int, *, hung: bool = False) -> bool:
    """Whether a child died by itself, so that what it was doing may be the reason: by its exit code (negative = killed
    by that signal), or because we ended it since it ``hung`` (though nobody had stopped it)."""
    if code < 0:
        return hung or -code in CRASH_SIGNALS
    return code not in (0, ENGINE_KILLED)


def stop_timeout_s(room: str, stop_timeout_s: float, *, orphaned: bool) -> float:
    """TERM to KILL for the children of ``room``."""
    return min(stop_timeout_s, ORPHANED_STOP_S[room]) if orphaned else stop_timeout_s
