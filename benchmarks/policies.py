"""What the optional routing policies are worth, and where they cost: the real broker core between modelled engines.

In virtual time (benchmarks/modelled), so that the same seed gives the same result to the last digit: the spread is that
of the work, not of the machine. Each case runs the same work with a policy and without; below 1, the policy wins. One
case is on real processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.drawing import drawing
from benchmarks.modelled.cluster import Layout, Result, simulate
from benchmarks.modelled.engine import Speed
from benchmarks.modelled.work import Sessions, SingleTurns, Work
from benchmarks.policies_processes import ENGINES, SAMPLES, measured
from benchmarks.suite import Figure, Options, Record, cases, markdown, median, ratios, spread
from zagent.broker.routing import Routing, routing
from zagent.config import RoutingConfig

NAME = "policies"
PEERS = ("zagent",)
REPEATS = 3
#: Remembered groups; as many as there are sessions by default.
GROUPS = 10_000
#: Room for all contexts of the sessions: what is measured is where they go, not what is thrown out.
ROOMY = Speed(kv_tokens=1_500_000)
#: What 64 calls at once do not always fit in.
TIGHT = Speed(kv_tokens=60_000)
BATCH = Speed().max_batch
_DOT = " · "


@dataclass(frozen=True)
class Case:
    """One point of a plot: policy, line, and where on it."""

    policy: str
    line: str
    x: int
    work: Work
    off: Layout
    on: Layout

    def __str__(self) -> str:
        return _DOT.join((self.policy, self.line, str(self.x)))


class Plot(NamedTuple):
    """How the cases of one policy are shown. ``what``: the column of the table."""

    title: str
    what: str


PROCESSES = "processes"
PLOTS = {
    "group": Plot("Samples of one prompt to one engine", "tokens of the prompt"),
    "rebind": Plot("Sessions may leave an overloaded engine", "routing.rebind_over.abs (rel = 1.5)"),
    "cap": Plot(f"At most so many calls per engine (batch: {BATCH})", "routing.max_in_flight_per_engine"),
}


def grouped() -> Routing:
    """`routing.group=true` with its default threshold."""
    return routing(RoutingConfig(group=True).thresholds, GROUPS)


def rebinding(over: int) -> Routing:
    """`routing.rebind_over.abs=` ``over``."""
    return routing({"rebind_over": (over, 1.5)}, GROUPS)


def group_cases(part: int = 1) -> Iterator[Case]:
    """128 trajectories per engine, two batches; and two layouts in which a group is hard to bring together."""
    for prompt in (512, 2048, 8192):
        for samples, engines in ((4, 2), (4, 8), (16, 2), (16, 8)):
            work = SingleTurns(max(1, engines * 128 // samples // part), samples, prompt)
            off = Layout(engines)
            line = f"{samples} samples, {engines} engines"
            yield Case("group", line, prompt, work, off, off._replace(routing=grouped()))
        off = Layout(8)
        few = SingleTurns(4, 16, prompt)
        yield Case("group", "4 prompts × 16 on 8 engines", prompt, few, off, off._replace(routing=grouped()))
        capped = Layout(8, cap=BATCH)
        work = SingleTurns(max(1, 256 // part), 4, prompt)
        yield Case("group", "4 samples, 8 capped engines", prompt, work, capped, capped._replace(routing=grouped()))


def rebind_cases(part: int = 1) -> Iterator[Case]:
    """64 sessions per engine: all engines there from the start, or one of four 30 s later."""
    for name, late in (("", 0), (", one late", 1)):
        for tokens in (256, 2048):
            work = Sessions(256 // part, tokens)
            off = Layout(4, ROOMY, late=late, late_s=30.0 / part)
            for over in (4, 8, 16, 32, 64):
                on = off._replace(routing=rebinding(over))
                yield Case("rebind", f"+{tokens} tokens a turn{name}", over, work, off, on)


def cap_cases(part: int = 1) -> Iterator[Case]:
    """Four batches of single turns per engine, all there at once."""
    work = SingleTurns(128 // part, 8, 1024)
    layouts = {
        "all engines alike": Layout(4),
        "one of four late": Layout(4, late=1, late_s=30.0 / part),
        "short of KV memory": Layout(4, TIGHT),
    }
    for line, off in layouts.items():
        for cap in (32, 48, 64, 80, 128):
            yield Case("cap", line, cap, work, off, off._replace(cap=cap))


def run(options: Options, record: Record) -> None:
    """Every case by as many seeds, then the one on real processes."""
    repeats = options.repeats or (1 if options.quick else REPEATS)
    part = 16 if options.quick else 1
    run_model((*group_cases(part), *rebind_cases(part), *cap_cases(part)), repeats, record)
    case = _DOT.join((PROCESSES, f"{SAMPLES} samples, {ENGINES} engines", "1000"))
    for peer, group in (("off", False), ("on", True)):
        for repeat, (seconds, share) in enumerate(measured(group, 4 if options.quick else 12, repeats)):
            record(Figure(NAME, case, peer, repeat, "makespan_s", seconds, "s"))
            record(Figure(NAME, case, peer, repeat, "cached_share", share, ""))


def run_model(some: Sequence[Case], repeats: int, record: Record) -> None:
    """In virtual time. The same work without a policy is run once."""
    known: dict[tuple[Layout, Work, int], Result] = {}
    for case in some:
        for repeat in range(repeats):
            for peer, layout in (("off", case.off), ("on", case.on)):
                key = layout, case.work, repeat
                if key not in known:
                    known[key] = simulate(layout, case.work.made(repeat))
                record(Figure(NAME, str(case), peer, repeat, "makespan_s", known[key].makespan_s, "s"))
                record(Figure(NAME, str(case), peer, repeat, "cached_share", known[key].cached_share, ""))
                record(Figure(NAME, str(case), peer, repeat, "preempted", known[key].preempted, ""))


def table(figures: Sequence[Figure]) -> str:
    """One table per policy."""
    parts = []
    for policy, plot in {**PLOTS, PROCESSES: Plot("The first of them on real processes", PLOTS["group"].what)}.items():
        rows = [_row(figures, case) for case in cases(figures) if case.split(_DOT)[0] == policy]
        head = ("", plot.what, "without, s", "with, s", "with / without", "cached without", "cached with", "policy")
        parts.append(f"**{plot.title}**\n\n{markdown(head, rows)}")
    return "\n\n".join(parts)


def _row(figures: Sequence[Figure], case: str) -> list[str]:
    _, line, x = case.split(_DOT)
    found = ratios(figures, case=case, name="makespan_s", over="on", under="off")
    seconds = [f"{median(figures, case=case, peer=peer, name='makespan_s'):.1f}" for peer in ("off", "on")]
    shares = [f"{median(figures, case=case, peer=peer, name='cached_share'):.0%}" for peer in ("off", "on")]
    return [line, x, *seconds, spread(found), *shares, verdict(found)]


def verdict(found: Sequence[float]) -> str:
    """Of the makespans' ratios: a policy wins, or loses, only if it does so by more than 1 % on every seed's work."""
    if max(found) < 0.99:
        return "wins"
    return "loses" if min(found) > 1.01 else "–"


def plots(figures: Sequence[Figure], directory: Path) -> list[Path]:
    """`policies-group.png`, `policies-rebind.png` and `policies-cap.png`: medians, lowest and highest of the ratios."""
    return [_plot(figures, policy, directory / f"policies-{policy}.png") for policy in PLOTS]


def _plot(figures: Sequence[Figure], policy: str, file: Path) -> Path:
    lines: dict[str, list[tuple[int, list[float]]]] = {}
    for case in cases(figures):
        name, line, x = case.split(_DOT)
        if name == policy:
            found = ratios(figures, case=case, name="makespan_s", over="on", under="off")
            lines.setdefault(line, []).append((int(x), sorted(found)))
    plot = PLOTS[policy]
    with drawing(file, title=plot.title, xlabel=plot.what, ylabel="makespan, with / without (lower: wins)") as axes:
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        for line, points in lines.items():
            xs = [x for x, _ in points]
            axes.plot(xs, [found[len(found) // 2] for _, found in points], marker="o", markersize=3, label=line)
            axes.fill_between(xs, [found[0] for _, found in points], [found[-1] for _, found in points], alpha=0.15)
        axes.set_xticks(xs, [str(x) for x in xs])
        axes.legend(fontsize=8)
    return file
