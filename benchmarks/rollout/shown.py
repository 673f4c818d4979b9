"""Table and plots of the figures."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.drawing import colour, drawing
from benchmarks.suite import Figure, cases, markdown, median, peers, ratios, spread, values

#: Engine -> (s, calls running).
Lines = dict[str, list[tuple[float, int]]]
#: The peer under which the bound's own figures are recorded.
BOUND = "bound"
#: What the engines ran over time, for the plots: columns case, peer, engine, at (s), running.
TIMELINE = "rollout-timeline.csv"


def table(figures: Sequence[Figure]) -> str:
    """The bounds, and below them each case and peer."""
    return f"{bounds_table(figures)}\n\n{peers_table(figures)}"


def bounds_table(figures: Sequence[Figure]) -> str:
    """What was replayed, and the least that it could take."""
    head = ["case", "engine calls", "time ×", "work / capacity, s", "longest row, s", "cached at best"]
    names = {"calls": ".0f", "speedup": ".1f", "work_s": ".1f", "longest_s": ".1f", "cached_share": ".0%"}
    return markdown(
        head, [[case, *(_median(figures, case, BOUND, *pair) for pair in names.items())] for case in cases(figures)]
    )


def peers_table(figures: Sequence[Figure]) -> str:
    """Ratios over the repeats: median (lowest–highest)."""
    head = [
        "case",
        "who chooses",
        "makespan / bound",
        "to the last answer",
        "makespan / zagent",
        "idle in the tail",
        "tokens/s",
        "cached",
    ]
    rows = []
    for case in cases(figures):
        for peer in peers(f for f in figures if f.case == case and f.peer != BOUND):
            over = list(values(figures, case=case, peer=peer, name="over_bound").values())
            slower = ratios(figures, case=case, name="makespan_s", over=peer, under="zagent")
            rows.append(
                [
                    case,
                    peer,
                    spread(over),
                    _median(figures, case, peer, "answered_over_bound", ".2f"),
                    "1" if peer == "zagent" else spread(slower),
                    _median(figures, case, peer, "tail_share", ".0%"),
                    _median(figures, case, peer, "tokens_per_s", ",.0f"),
                    _median(figures, case, peer, "cached_share", ".0%"),
                ]
            )
    return markdown(head, rows)


def _median(figures: Sequence[Figure], case: str, peer: str, name: str, form: str) -> str:
    return format(median(figures, case=case, peer=peer, name=name), form)


def plots(figures: Sequence[Figure], directory: Path) -> list[Path]:
    """Makespans beside their bounds, and what the engines ran over time in the first case."""
    made = [_makespans(figures, directory / "rollout.png")]
    timelines = read_timeline(directory / TIMELINE)
    for case in cases(figures)[:1]:
        found = {peer: lines for (of, peer), lines in timelines.items() if of == case}
        made += [_running(case, peer, found, directory) for peer in ("zagent", "static") if peer in found]
    return made


def _makespans(figures: Sequence[Figure], file: Path) -> Path:
    found, shown = cases(figures), [peer for peer in peers(figures) if peer != BOUND]
    width = 0.8 / len(shown)
    with drawing(file, title="Makespan of a batch", xlabel="", ylabel="makespan / bound") as axes:
        for number, peer in enumerate(shown):
            measured = [list(values(figures, case=c, peer=peer, name="over_bound").values()) for c in found]
            places = [i + (number - (len(shown) - 1) / 2) * width for i, runs in enumerate(measured) if runs]
            runs = [runs for runs in measured if runs]
            axes.bar(places, [np.median(one) for one in runs], width * 0.9, label=peer, color=_colour(peer))
            for place, one in zip(places, runs, strict=True):
                axes.plot([place, place], [min(one), max(one)], color="black", linewidth=1)
        axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
        axes.set_xticks(range(len(found)), [_about(figures, case) for case in found])
        axes.margins(y=0.25)  # room for the legend
        axes.legend(frameon=False, loc="upper center", ncols=len(shown), fontsize="small")
    return file


def _about(figures: Sequence[Figure], case: str) -> str:
    work, longest = (_median(figures, case, BOUND, name, ".1f") for name in ("work_s", "longest_s"))
    return f"{case}\nwork {work} s, longest row {longest} s"


def _running(case: str, peer: str, found: dict[str, Lines], directory: Path) -> Path:
    """One line an engine, on the time scale of the slowest peer that is drawn."""
    file = directory / f"rollout-{peer}.png"
    slots = np.percentile([count for line in found[peer].values() for _, count in line], 95) or 1.0
    end = max(at for peer in ("zagent", "static") for line in found.get(peer, {}).values() for at, _ in line)
    title = f"{peer}: {case}"
    with drawing(file, title=title, xlabel="s", ylabel="engine, and its slots in use") as axes:
        for number, (_, line) in enumerate(sorted(found[peer].items())):
            times, counts = (np.array(column) for column in zip(*line, strict=True))
            heights = 0.9 * np.minimum(counts / slots, 1.0)  # answers that were late overlap with the next call
            axes.fill_between(times, number, number + heights, step="mid", color=_colour(peer))
        axes.set_xlim(0, end)
        axes.set_yticks(range(len(found[peer])))
    return file


def _colour(peer: str) -> str:
    return {"sticky": "#7fb59f", "least-requests": "#c9a227", "random": "#adb5bd"}.get(peer) or colour(peer)


def read_timeline(file: Path) -> dict[tuple[str, str], Lines]:
    """(case, peer) -> engine -> (s, calls running); empty without the file."""
    found: dict[tuple[str, str], Lines] = defaultdict(lambda: defaultdict(list))
    if file.is_file():
        with file.open(newline="", encoding="utf-8") as lines:
            for case, peer, engine, at, count in csv.reader(lines):
                found[case, peer][engine].append((float(at), int(count)))
    return found
