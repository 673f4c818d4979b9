"""A broker of zagent's with members and a caller, all of them processes, under one kind of load after another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import Failed, Processes
from benchmarks.procfs import Holdings
from benchmarks.scale.cpu import Spent
from benchmarks.scale.load import Done, Load, Pile

#: Members of one process: more processes share the cores, and a larger one has more sockets than libzmq allows.
MEMBERS = 128


@dataclass(frozen=True)
class Cost:
    """Of one load: calls per second, and the broker's processor time per call, in µs: its own thread's and libzmq's."""

    calls_per_s: float
    main_us: float
    sockets_us: float

    @property
    def limit(self) -> float:
        """Calls per second at which the busier of the broker's two threads takes a core."""
        return 1e6 / max(self.main_us, self.sockets_us)


class BrokerBench:
    """Up until the ``processes`` end. ``name`` tells several in one directory apart."""

    def __init__(self, processes: Processes, directory: Path, name: str, engines: int) -> None:
        here = "benchmarks.scale.crowd"
        settings: dict[str, Any] = {"endpoint": f"ipc://{directory}/{name}"}
        (info,) = processes.start_ready([(f"broker-{name}", f"{here}:broker", settings)])
        self._pid: int = info["pid"]
        names = [f"engine-{index}" for index in range(engines)]
        groups = [names[first : first + MEMBERS] for first in range(0, engines, MEMBERS)]
        processes.start_ready(
            [(f"members-{name}-{i}", f"{here}:members", {**settings, "names": g}) for i, g in enumerate(groups)]
        )
        self._caller = processes.start(f"caller-{name}", f"{here}:caller", settings)
        self._caller.receive()

    def cost(self, load: Load) -> Cost:
        """Raises `Failed` where an answer was wrong."""
        before = Spent.of(self._pid)
        done = self._ask(load)
        spent = Spent.of(self._pid).since(before)
        return Cost(load.calls / done.seconds, spent.main / load.calls * 1e6, spent.sockets / load.calls * 1e6)

    def pile(self, pile: Pile) -> int:
        """The broker's resident memory, in bytes, once the calls of ``pile`` wait in it too."""
        self._ask(pile)
        return self.memory()

    def memory(self) -> int:
        """The broker's resident memory, in bytes."""
        return Holdings.of(self._pid).memory

    def _ask(self, wanted: Load | Pile) -> Done:
        self._caller.send(wanted)
        done: Done = self._caller.receive()
        if done.wrong:
            raise Failed(f"{done.wrong} wrong answers")
        return done
