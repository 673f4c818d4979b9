"""Does what the script says to a running cluster, by signals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from heapq import heappop, heappush

from benchmarks.chaos.losses import Loss, Losses, Stop
from benchmarks.chaos.script import Action, Room, chosen
from benchmarks.chaos.watch import Watch

#: Seconds between two looks whether it is time for something.
LOOK_S = 0.02


class Wrecker:
    """``every_s`` are the seconds from kill to kill in the ``script``."""

    def __init__(self, script: Iterator[Action], watch: Watch, losses: Losses, every_s: float) -> None:
        self._script, self._watch, self.losses, self._every_s = script, watch, losses, every_s
        self.stops: list[Stop] = []
        self.events: list[str] = []
        self._started = time.monotonic()
        self._stopped: list[tuple[float, int, Stop]] = []  # (until when, pidfd, who)
        #: Who was told to end (pid -> when). A status may be older than the death of who is in it.
        self.ended: dict[int, float] = {}

    def note(self, text: str) -> None:
        """Something happened now."""
        now = time.monotonic()
        self.events.append(f"{now:.2f}  {now - self._started:7.2f} s  {text}")

    def run(self, over: Callable[[], bool]) -> None:
        """Until ``over`` says so, or the script ends; whoever is stopped then goes on."""
        try:
            for action in self._script:
                if self._wait(over, self._started + action.at_s):
                    return
                self._act(action, over)
            self._wait(over, max((one[0] for one in self._stopped), default=0.0))
        finally:
            self._continue(until=float("inf"))

    def _wait(self, over: Callable[[], bool], at: float) -> bool:
        """Whether it is over before ``at``; meanwhile stopped processes go on in time."""
        while not over() and (now := time.monotonic()) < at:
            self._continue(now)
            time.sleep(min(LOOK_S, at - now))
        return over()

    def _continue(self, until: float) -> None:
        while self._stopped and self._stopped[0][0] <= until:
            _, handle, stop = heappop(self._stopped)
            stop.until = time.monotonic()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGCONT)
                self.note(f"{stop.name} (pid {stop.pid}) goes on")
            os.close(handle)

    def _act(self, action: Action, over: Callable[[], bool]) -> None:
        """Waits for somebody to do it to for half the time until the next kill."""
        patience = time.monotonic() + self._every_s / 2
        while not (names := self._candidates(action.room)):
            if time.monotonic() >= patience:
                self.note(f"nobody to {action.do} in {action.room}")
                return
            if self._wait(over, time.monotonic() + LOOK_S):
                return
        self._strike(action, chosen(names, action.pick))

    def _candidates(self, room: Room) -> list[str]:
        """Whoever lives, busy or not: else the last rows of a run would be hit by each and every kill."""
        if room == "broker":
            return [] if self._watch.broker in self.ended else ["broker"]
        return [name for name, one in self._watch.latest.members(room).items() if one["pid"] not in self.ended]

    def _strike(self, action: Action, name: str) -> None:
        latest = self._watch.latest
        if action.room == "broker":
            pid, epoch, in_flight = self._watch.broker, 0, latest.in_flight
        else:
            member = latest.members(action.room)[name]
            pid, epoch, in_flight = member["pid"], member["epoch"], member["in_flight"]
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self.note(f"{name} (pid {pid}) is gone already")
            return
        what = f"{name} (pid {pid}, epoch {epoch}), {in_flight} in flight"
        if action.do == "stop":
            self._stop(Stop(name, pid, time.monotonic()), handle, action.for_s)
        elif action.do == "term":
            self._end(pid, handle, signal.SIGTERM)
            self.note(f"terminate {what}")
        else:
            counts = in_flight > 0 and latest.fresh
            with self._watch.lock:  # what is seen from now on is seen after it
                self.losses.add(Loss(action.room, name, pid, epoch, time.monotonic(), in_flight, counts))
                self._end(pid, handle, signal.SIGKILL)
            self.note(f"kill {what}{'' if counts else ' (not counted)'}")

    def _end(self, pid: int, handle: int, number: signal.Signals) -> None:
        self.ended[pid] = time.monotonic()
        _send(handle, number)
        os.close(handle)

    def _stop(self, stop: Stop, handle: int, for_s: float) -> None:
        self.stops.append(stop)
        _send(handle, signal.SIGSTOP)
        heappush(self._stopped, (stop.at + for_s, handle, stop))
        self.note(f"stop {stop.name} (pid {stop.pid}) for {for_s:.1f} s")


def _send(handle: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, number)
