"""How cost grows, up to 512 simulated engines and 50 000 trajectories in flight.

* broker: what one call costs the broker process, against engines, calls in flight and sessions. Members that answer at
  once and a caller, both on zagent's own links with nothing above them; 1024 tokens of prompt, 128 of answer, int32.
  Where the busier of its two threads would take a whole core the single broker saturates.
* waiting: the broker's memory, while calls wait in it that no member takes.
* at rest: a launched cluster that is asked nothing.
* trajectories: whole batches through `AgentLoopManager.stream`, every row one answer that takes longer than all rows
  take to start, so that all of them are in flight at once, each a coroutine in a worker. Processor time is what the
  cluster takes beyond what it takes at rest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import Processes
from benchmarks.scale.broker import BrokerBench
from benchmarks.scale.cluster import Fleet
from benchmarks.scale.figures import (
    AT_REST,
    ENGINES,
    GROUPS,
    IN_FLIGHT,
    NAME,
    REFERENCE,
    SESSIONS,
    TRAJECTORIES,
    WAITING,
    case,
)
from benchmarks.scale.load import Load, Pile
from benchmarks.scale.picture import plots
from benchmarks.scale.tables import table
from benchmarks.suite import Figure, Options, Record

__all__ = ["NAME", "PEERS", "plots", "run", "table"]

PEERS = ("zagent",)
REPEATS = 3
#: Tokens of a prompt.
PROMPT = 1024
#: Seconds that a cluster at rest is watched.
REST_S = 5.0


@dataclass(frozen=True)
class Plan:
    """What is measured: the x of each axis. ``calls`` per point, at least twice those in flight; ``pile``: calls that
    are added to those that wait, so many times."""

    engines: tuple[int, ...] = (1, 8, 64, 512)
    in_flight: tuple[int, ...] = (1, 8, 64, 1024, 10_000, 50_000)
    sessions: tuple[int, ...] = (100, 10_000, 100_000)
    calls: int = 20_000
    pile: int = 10_000
    piles: int = 5
    at_rest: tuple[int, ...] = (1, 64, 512)
    trajectories: tuple[int, ...] = (10, 100, 1000, 10_000, 50_000)


FULL = Plan()
QUICK = Plan((1, 8), (1, 64, 1024), (100, 10_000), 2000, 1000, 3, (1, 64), (10, 100, 1000))


def run(options: Options, record: Record) -> None:
    """Raises `Failed` where an answer was wrong, `RuntimeError` where a trajectory failed."""
    plan = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="scale-") as place:
        directory = Path(place)
        for repeat in range(options.repeats or (1 if options.quick else REPEATS)):
            _broker(plan, directory, repeat, record)
        for tokens in (0, PROMPT):
            _waiting(plan, directory, tokens, record)
        for engines in plan.at_rest:
            last = engines == plan.at_rest[-1]
            _cluster(engines, plan.trajectories if last else (), directory, record)


def recorder(record: Record, case: str, repeat: int = 0) -> Callable[[str, float, str], None]:
    """Takes name, value and unit."""
    return lambda name, value, unit: record(Figure(NAME, case, PEERS[0], repeat, name, value, unit))


def _broker(plan: Plan, directory: Path, repeat: int, record: Record) -> None:
    """Each axis with the others at `REFERENCE`."""
    for engines in plan.engines:
        with Processes() as processes:
            bench = BrokerBench(processes, directory, f"{repeat}-{engines}", engines)
            warm = Load(plan.calls // 10, REFERENCE.in_flight, 0, PROMPT)
            bench.cost(warm)
            _cost(bench, case(ENGINES, engines), repeat, record, Load(plan.calls, REFERENCE.in_flight, 0, PROMPT))
            if engines != min(plan.engines[-1], REFERENCE.engines):
                continue
            for sessions in plan.sessions:
                load = Load(plan.calls, REFERENCE.in_flight, sessions, PROMPT)
                _cost(bench, case(SESSIONS, sessions), repeat, record, load)
            for in_flight in plan.in_flight:
                calls = max(2 * in_flight, min(plan.calls, 3000 * in_flight))
                _cost(bench, case(IN_FLIGHT, in_flight), repeat, record, Load(calls, in_flight, 0, PROMPT))


def _cost(bench: BrokerBench, case: str, repeat: int, record: Record, load: Load) -> None:
    cost, put = bench.cost(load), recorder(record, case, repeat)
    put("calls_per_s", cost.calls_per_s, "1/s")
    put("main_us", cost.main_us, "µs")
    put("sockets_us", cost.sockets_us, "µs")
    put("limit", cost.limit, "1/s")


def _waiting(plan: Plan, directory: Path, tokens: int, record: Record) -> None:
    with Processes() as processes:
        bench = BrokerBench(processes, directory, f"waiting-{tokens}", 0)
        recorder(record, case(WAITING[tokens > 0], 0))("broker_mb", bench.memory() / 1e6, "MB")
        for number in range(1, plan.piles + 1):
            put = recorder(record, case(WAITING[tokens > 0], number * plan.pile))
            put("broker_mb", bench.pile(Pile(plan.pile, tokens)) / 1e6, "MB")


def _cluster(engines: int, batches: Sequence[int], directory: Path, record: Record) -> None:
    with Fleet(engines, max(batches, default=1), directory) as fleet:
        put = recorder(record, case(AT_REST, engines))
        put("start_s", fleet.start_s, "s")
        held = fleet.held()
        rest = fleet.idle(REST_S)
        for group, cores in rest.items():
            put(f"{group}_cores", cores, "")
            put(f"{group}_mb", held.memory[group] / 1e6, "MB")
            put(f"{group}_descriptors", held.descriptors[group], "")
        for rows in batches:
            flight, put = fleet.fly(rows), recorder(record, case(TRAJECTORIES, rows))
            put("peak", flight.peak, "")
            put("all_up_s", flight.all_up_s, "s")
            put("answer_s", flight.answer_s, "s")
            put("total_s", flight.total_s, "s")
            for group in GROUPS:
                put(f"{group}_ms", (flight.cpu_s[group] - rest[group] * flight.total_s) / rows * 1000, "ms")
                put(f"{group}_mb", flight.held.memory[group] / 1e6, "MB")
