"""One run: a cluster, a batch, perhaps a wrecker, and what is left afterwards."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import zagent
from benchmarks import procfs
from benchmarks.chaos.agent import Line, read_ledger
from benchmarks.chaos.losses import Losses, Stop
from benchmarks.chaos.script import KINDS, Action, actions, slow_spells
from benchmarks.chaos.watch import Watch
from benchmarks.chaos.wreck import Wrecker

#: An answer of 24 tokens takes half a second: the quiet run of 500 rows lasts some 25 s, and a row is short enough
#: to live through it when somebody is killed every half second.
TOKENS_PER_S = 45.0
#: What odd seeds stream back: their engine calls go on from there, those of even seeds begin again.
CHECKPOINT_TOKENS = 8
#: Trajectories that one worker runs at once: work is under way for the whole run, and not all of it in one place.
ROWS_PER_WORKER = 8
#: Seconds without any outcome after which the wrecking ends: at such a pace nothing gets anywhere.
STALL_S = 45.0
#: Seconds without any outcome, with nothing done to anybody any more, after which a run counts as hung.
PATIENCE_S = 90.0
#: Seconds after the last outcome within which nothing is in flight and everybody is back.
SETTLE_S = 30.0
#: Restarts without end: a budget is for processes that die by themselves.
OVERRIDES = (
    "model.path=tiny",
    "engine.kind=sim",
    f"engine.sim.decode_tokens_per_s={TOKENS_PER_S}",
    "engine.sim.eos_probability=0.01",
    "engine.sim.eos_token_id=258",
    f"worker.max_in_flight={ROWS_PER_WORKER}",
    "rollout.agent=chaos",
    "rollout.imports=[benchmarks.chaos.agent]",
    "rollout.prompt_length=128",
    "rollout.response_length=512",
    "launcher.max_restarts=1000000",
)


@dataclass(frozen=True)
class Plan:
    """What is run. The wrecking lasts as long as the run, or ``for_s`` seconds. ``overrides`` are the user's, and
    win."""

    rows: int = 500
    engines: int = 4
    workers: int = 4
    every_s: float = 2.0
    for_s: float = math.inf
    kinds: tuple[str, ...] = KINDS
    overrides: tuple[str, ...] = ()


@dataclass
class Run:
    """What became of it. ``broken``: what is wrong by itself, whatever another run says."""

    outcomes: list[zagent.Outcome] = field(default_factory=list)
    ledger: list[Line] = field(default_factory=list)
    losses: Losses = field(default_factory=Losses)
    stops: list[Stop] = field(default_factory=list)
    #: Who was told to end, and when (pid -> monotonic s).
    ended: dict[int, float] = field(default_factory=dict)
    #: Outcomes at which the wrecking ended, since none came any more under it.
    stalled_at: int | None = None
    events: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    status: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    run_id: str = ""


def batch_of(rows: int, ledger: Path) -> zagent.DataProto:
    """``rows`` prompts, two samples of each."""
    names = [f"q{i // 2}" for i in range(rows)]
    return zagent.DataProto(
        non_tensor_batch={
            "raw_prompt": [[{"role": "user", "content": f"What follows from {name}?"}] for name in names],
            "uid": names,
            "sample": [i % 2 for i in range(rows)],
            "ledger": [str(ledger)] * rows,
        }
    )


def run(plan: Plan, directory: Path, seed: int | None = None) -> Run:
    """The quiet run, or with ``seed`` the one that it decides. ``directory`` gets ledger and logs."""
    directory.mkdir(parents=True)
    done = Run()
    with zagent.AgentLoopManager.launch(config_of(plan, directory, seed)) as manager:
        done.run_id, run_dir = manager.run_id, run_dir_of(manager.endpoint)
        ledger = directory / "ledger"
        ledger.touch()
        collector = Collector(manager.stream(batch_of(plan.rows, ledger)))
        started = time.monotonic()
        try:
            if seed is not None:
                _wreck(plan, seed, manager, collector, done)
            collector.wait()
        finally:
            done.seconds = time.monotonic() - started
            done.outcomes = list(collector.outcomes)
        done.broken += collector.broken
        if not collector.hung:
            done.status, unsettled = settled(manager, plan)
            done.broken += unsettled
    collector.join()
    done.ledger = read_ledger(str(ledger))
    done.broken += left_behind(done.run_id, run_dir)
    return done


def config_of(plan: Plan, directory: Path, seed: int | None) -> zagent.Config:
    """What is launched; with None, for the quiet run. Logs go below ``directory``."""
    counts = [f"engine.count={plan.engines}", f"worker.count={plan.workers}", f"logs.dir={directory / 'logs'}"]
    checkpoints = [f"engine.checkpoint_tokens={CHECKPOINT_TOKENS}"] if seed is not None and seed % 2 else []
    config = zagent.Config.load(overrides=[*OVERRIDES, *counts, *checkpoints, *plan.overrides]).to_dict()
    config["engine"]["sim"]["faults"] = [] if seed is None else slow_spells(seed, plan.engines, plan.kinds)
    return zagent.Config.from_dict(config)


def _wreck(plan: Plan, seed: int, manager: zagent.AgentLoopManager, collector: Collector, done: Run) -> None:
    with Watch(manager, done.losses, done.broken.append) as watch:
        wrecker = Wrecker(script_of(plan, seed), watch, done.losses, plan.every_s)
        done.events, done.stops, done.ended = wrecker.events, wrecker.stops, wrecker.ended
        wrecker.run(lambda: collector.over.is_set() or collector.silent_s > STALL_S)
        done.stalled_at = len(collector.outcomes) if collector.silent_s > STALL_S else None
        wrecker.note(f"{len(collector.outcomes)} outcomes")
        _until(lambda: not done.losses.open(), SETTLE_S)


def script_of(plan: Plan, seed: int) -> Iterator[Action]:
    """As long as the plan says."""
    return takewhile(lambda action: action.at_s < plan.for_s, actions(seed, plan.every_s, plan.kinds))


class Collector:
    """Takes the outcomes in a thread of its own; ``over`` once all are there, or none can come any more."""

    def __init__(self, stream: Iterator[zagent.Outcome]) -> None:
        self.outcomes: list[zagent.Outcome] = []
        self.broken: list[str] = []
        self.hung = False
        self.over = threading.Event()
        self._came = time.monotonic()
        self._thread = threading.Thread(target=self._collect, args=(stream,), name="chaos-outcomes")
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """Seconds since the last outcome."""
        return time.monotonic() - self._came

    def _collect(self, stream: Iterator[zagent.Outcome]) -> None:
        try:
            for outcome in stream:
                self.outcomes.append(outcome)
                self._came = time.monotonic()
        except Exception as error:
            if not self.hung:
                self.broken.append(f"the stream broke: {type(error).__name__}: {error}")
        finally:
            self.over.set()

    def wait(self) -> None:
        """Until it is over, or none has come for `PATIENCE_S`: then it hangs."""
        self._came = time.monotonic()
        while not self.over.wait(min(1.0, PATIENCE_S)):
            if self.silent_s > PATIENCE_S:
                self.hung = True
                self.broken.append(f"no outcome for {PATIENCE_S:g} s, {len(self.outcomes)} until then")
                return

    def join(self) -> None:
        """After the manager is closed, which ends the stream."""
        self._thread.join()


def settled(manager: zagent.AgentLoopManager, plan: Plan) -> tuple[Mapping[str, Any], list[str]]:
    """The last status, and what in it is not as it must be after the last outcome, even `SETTLE_S` later."""
    status: Mapping[str, Any] = {}
    wrong: list[str] = []

    def quiet() -> bool:
        nonlocal status, wrong
        try:
            status = manager.status()
            busy = {name: stats["in_flight"] for name, stats in manager.engine_stats().items() if stats["in_flight"]}
        except zagent.ZagentError as error:
            wrong = [f"after the last outcome: {type(error).__name__}: {error}"]
            return False
        wrong = unsettled(status, {"engine": plan.engines, "worker": plan.workers})
        wrong += [f"engine {name} still runs {count} calls" for name, count in busy.items()]
        return not wrong

    _until(quiet, SETTLE_S)
    return status, wrong


def unsettled(status: Mapping[str, Any], counts: Mapping[str, int]) -> list[str]:
    """What a cluster at rest, with so many members in each pool, would not say. Pure."""
    wrong = [f"{status['pending']} calls are pending after the last outcome"] if status["pending"] else []
    for pool, count in counts.items():
        members = status["pools"][pool]
        wrong += [f"{pool} has {len(members)} members instead of {count}"] if len(members) != count else []
        for name, member in members.items():
            if (state := member["state"]) != "ready":
                wrong.append(f"{name} is {state} after the last outcome")
            if held := member["in_flight"] + member["waiting"]:
                wrong.append(f"{name} has {held} calls after the last outcome")
    return wrong


def run_dir_of(endpoint: str) -> Path | None:
    """The run's directory, where its socket lies; not told by a TCP endpoint."""
    return Path(endpoint.removeprefix("ipc://")).parent if endpoint.startswith("ipc://") else None


def left_behind(run_id: str, run_dir: Path | None) -> list[str]:
    """What a closed cluster may not leave: processes, its directory, shared memory."""
    processes = [f"process {pid} ({name}) is left" for pid, name in procfs.of_run(run_id).items()]
    files = [f"{run_dir} is left"] if run_dir is not None and run_dir.exists() else []
    return processes + files + [f"{path} is left" for path in procfs.SHARED_MEMORY.glob(f"*{run_id}*")]


def _until(holds: Any, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True
